"""The table of GPUs: it matches whole names only, has dense figures, and guesses nothing."""

from __future__ import annotations

import pytest
from tables import cases

from lmbench.precision import GPUS, find_gpu, peak_flops


# TFLOP/s from datasheets: bf16, tf32, fp32.
@cases("""
name | rates
NVIDIA A100-SXM4-80GB | 312 156 19.5
NVIDIA A100 80GB PCIe | 312 156 19.5
NVIDIA H100 80GB HBM3 | 989.4 494.7 67
NVIDIA H200 | 989.4 494.7 67
NVIDIA H100 PCIe | 756 378 51
NVIDIA GeForce RTX 4090 | 165.2 82.6 82.6
NVIDIA GeForce RTX 5090 | 209.5 104.8 104.8
NVIDIA GB300 | 2500 1250 80
NVIDIA GB200 | 2500 1250 80
NVIDIA B300 SXM6 AC | 2250 1125 75
NVIDIA H800 | 989.4 494.7 67
NVIDIA H20 | 148 74 44
NVIDIA RTX PRO 6000 Blackwell Workstation Edition | 503.8 251.9 125.95
AMD Instinct MI300X | 1307.4 653.7 163.4
AMD Instinct MI325X | 1307.4 653.7 163.4
""")
def test_peaks_are_the_datasheets(name, rates):
    settings = [("bf16-mixed", "highest"), ("32-true", "high"), ("32-true", "highest")]
    peaks = [peak_flops(name, precision, matmul) for precision, matmul in settings]
    assert [peak.flops_per_s / 1e12 for peak in peaks] == pytest.approx([*map(float, rates.split())])
    assert [peak.dtype for peak in peaks] == ["bf16", "tf32", "fp32"]


@cases(
    """
name
NVIDIA GeForce RTX 4090 Laptop GPU
NVIDIA GeForce RTX 4090 D
NVIDIA GeForce RTX 4080 SUPER
NVIDIA A100-SXM4-80GB MIG 1g.10gb
NVIDIA H1000
NVIDIA H200 NVL
AMD Instinct MI300A
NVIDIA RTX PRO 6000 Blackwell Server Edition
cpu
""",
    "",
)
def test_an_unknown_gpu_has_no_peak(name):
    assert find_gpu(name) is peak_flops(name, "bf16-mixed") is None


def test_similar_names_differ_and_a_name_matches_with_and_without_the_maker():
    names = ("L4", "L40", "L40S", "H100 PCIe", "H100 80GB HBM3", "H100 NVL", "H200")
    assert len({find_gpu(f"NVIDIA {name}").name for name in names}) == len(names)
    assert find_gpu("A100-SXM4-40GB") == find_gpu("NVIDIA A100-SXM4-40GB")
    # Neighbouring data types differ by a factor of 2; a sparse figure would break it.
    pairs = [(gpu.half, gpu.tf32) for gpu in GPUS if gpu.tf32] + [(gpu.fp8, gpu.half) for gpu in GPUS if gpu.fp8]
    assert [pair for pair in pairs if pair[0] / pair[1] != pytest.approx(2, rel=0.02)] == []


@cases("""
- [fraction, teraflops]
- [0.0, 989.4]
- [0.5, 1319.2]
- [1.0, 1978.9]
""")
def test_in_fp8_the_peak_is_that_of_each_product_in_its_own_precision(fraction, teraflops):
    peak = peak_flops("NVIDIA H200", "fp8-tensorwise", fp8_fraction=fraction)
    assert peak.flops_per_s / 1e12 == pytest.approx(teraflops, rel=1e-4)
    assert f"fp8 for {fraction:.1%}" in peak.dtype


@cases("""
name | precision | teraflops
Tesla V100-SXM2-16GB | bf16-mixed | None
Tesla V100-SXM2-16GB | 32-true | 15.7
AMD Instinct MI355X | 32-true | 157.3
AMD Instinct MI355X | bf16-true | 2516.6
NVIDIA A100-SXM4-80GB | fp8-rowwise | None
NVIDIA H200 | 64-true | None
NVIDIA H200 | transformer-engine | None
NVIDIA H200 | int8-training | None
NVIDIA H200 | nonsense | None
""")
def test_a_gpu_without_a_unit_and_a_precision_without_rates_have_no_guessed_peak(name, precision, teraflops):
    peak = peak_flops(name, precision, "high")
    assert str(peak and peak.flops_per_s / 1e12) == teraflops
