"""Kinds, precisions and short names of kernels, for real names with stored answers; parts of modules."""

from __future__ import annotations

import csv

from paths import TRACES
from tables import cases, rows

from lmbench.kernels.names import joined, kind_of, module_path, part_of, part_order, precision_of, short_name


def names():
    """The stored names: of this project's runs if `origin` is empty, else of public traces or a library's sources."""
    with (TRACES / "kernel_names.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_real_names_have_the_expected_kind():
    wrong = [row for row in names() if kind_of(row["name"], row["category"], row["operator"]) != row["kind"]]
    assert wrong == []


@cases("""
name | operator | kind
void cudnn::winograd_nonfused::winogradForwardData4x4<float, float> | aten::cudnn_convolution | conv
triton_poi_fused_nccl_view_0 | - | elementwise
# Names that were cut short are read as they are.
_ZN2at6native52_GLOBAL__N__chunk_cat_cuda_kernel | - | elementwise
# The letters in a library's name must not decide.
void fbgemm_gpu::unheard_of_kernel<int>(int) | - | unclassified
# Template arguments do not decide, unless the kernel is a general launcher.
void unheard_of_kernel<cutlass::bfloat16_t, flash::Softmax>(int) | - | unclassified
void cutlass::device_kernel<unheard::Softmax>(int) | - | gemm
volta_sgemm_64x64_nt | aten::convolution_backward | conv
unheard_of_kernel | aten::max_pool2d_with_indices_backward | pooling
unheard_of_kernel | _C::rms_norm | norm
unheard_of_kernel | my_module::attention_backward | attention
unheard_of_kernel | aten::mm | gemm
unheard_of_kernel | aten::_scaled_mm | gemm
triton_per_fused_abs_amax_1 | - | reduction
triton_poi_fused__scaled_mm__to_copy_clamp_2 | - | elementwise
unheard_of_kernel | c10d::allreduce_ | comm
unheard_of_kernel | - | unclassified
""")
def test_the_part_of_a_name_that_tells_what_runs_decides_its_kind(name, operator, kind):
    assert kind_of(name, "kernel", operator) == kind


@cases("""
name | precision
volta_sgemm_64x64_nt | fp32 off the tensor cores
void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(int) | fp32 off the tensor cores
void gemv2T_kernel_val<int, int, float, float, float, 128>(int) | fp32 off the tensor cores
sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8 | fp32 off the tensor cores
void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(int) | fp32 off the tensor cores
void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_tn_align1>(int) | tf32
sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64x128x32 | tf32
void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1>(int) | bf16
nvjet_sm90_tst_128x256_64x4_4x2_h_bz_coopA_NTN | bf16
# With float32 inputs, a name says TF32 or leaves it open.
nvjet_sm120_sss_tf32_mma_32x64x32_3_32x16x32 | tf32
nvjet_sm100_sss_128x64_64x6_2x1_v_bz_TNN | fp32 or tf32
miopenSp3AsmConv_v30_3_1_gfx9_fp32_f3x2_stride1 | fp32 off the tensor cores
naive_conv_ab_nonpacked_fwd_nchw_float_double_float | fp32 off the tensor cores
igemm_fwd_gtcx3_nhwc_fp32_bx0_ex1_bt256x64x16_wt64x16x4 | fp32 on matrix cores
miopenGcnAsmConv1x1U | -
Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV | bf16
volta_fp16_s884cudnn_fp16_128x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1 | fp16
void gemvx::kernel<int, int, __half, __half>(int) | fp16
sm90_xmma_gemm_e4m3e4m3_e4m3f32_f32_tn_n | fp8
# Of two types, weights of 4 bits are converted to the other's; the first type is the output's.
bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_sm100f | fp8
bmm_Bfloat16_E2m1E2m1_Fp32_t128x8x256u2_s7_sm100f | fp4
bmm_Bfloat16_MxE2m1Bfloat16_Fp32_t128x8x256u2_s7_sm100f | bf16
_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu | bf16
_matmul_ogs_NNT_bf16xfp8e4nvxmxfp4_16x128x256x1 | fp8
_matmul_ogs_NNT_bf16xmxfp8xmxfp4_16x128x256x1 | fp8
_matmul_ogs_NNT_fp16xfp16xmxfp4_16x128x256x1 | fp16
_matmul_ogs_NNT_bf16xmxfp4xmxfp4_16x128x256x1 | fp4
cutlass3x_sm100_bstensorop_s128x128x32gemm_block_scaled_ue8m0xe4m3_ue8m0xe2m1_f32_bf16_bf16 | fp8
cutlass_80_tensorop_d884gemm_64x64_16x4_nn_align1 | fp64
void internal::gemvx::kernel<int, int, float, float, float, float, false, true>(int) | fp32 off the tensor cores
void cudnn::cnn::wgrad2d_grouped_direct_kernel<false, true, int, float, float, float>(int) | fp32 off the tensor cores
void fft2d_r2c_32x32<float, false, 0u, false>(int) | fp32 off the tensor cores
nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT | fp8
nvjet_qrtst_128x128_128x6_1x2_h_bz_ovscale_TNT | fp8
void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::float_e4m3_t, int> >(int) | fp8
cublasGemm_unheard_of | -
void vectorized_elementwise_kernel<4, float>(int) | -
""")
def test_a_products_name_tells_its_precision(name, precision):
    assert precision_of(name, kind_of(name)) == precision
    # A run with TF32 off is fp32 where the name leaves it open.
    assert precision_of(name, kind_of(name), "highest") == precision.removesuffix(" or tf32")


def test_short_names_have_no_template_noise():
    for name in (row["name"] for row in names()):
        short = short_name(name)
        assert 0 < len(short) <= max(100, len(name) if "<" not in name else 0), name
        assert not set("<>{}*") & set(short.replace("->", "")), name


@cases("""
- [name, short]
- ["void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int,
    at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)", "vec_elementwise[add]"]
- ["void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous
    namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>
    >(int)", "multi_tensor_apply[FusedAdamMath]"]
- ["void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(int)",
    cutlass_80_simt_sgemm_128x256_8x4_nt_align1]
- [&nvjet nvjet_sm90_tst_128x256_64x4_4x2_h_bz_coopA_NTN, *nvjet]
- ["void split_embedding_codegen_device_kernel<float, 4>(int)", split_embedding_codegen_device_kernel]
# Only the namespaces tell a function called `kernel`: cuBLAS has one, and so has many a program.
- ["std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float, false>", "internal::gemvx::kernel"]
- ["void kernel<float, 128>(float*, Params)", kernel]
- [_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi64ELi8EEEvPT0_, add_rmsnorm_quant_kernel]
""")
def test_short_names_tell_what_ran(name, short):
    assert short_name(name) == short


#: Modules of LLAMA, of GPT-2 and of TorchTitan.
MODULES = dict(
    rows("""
model.embed_tokens | embedding
model.rotary_emb | rope
model.layers.0.input_layernorm | norm
model.layers.0.self_attn | attention
model.layers.0.self_attn.q_proj | qkv
model.layers.0.self_attn.k_proj | qkv
model.layers.0.self_attn.v_proj | qkv
model.layers.0.self_attn.q_norm | norm
model.layers.0.self_attn.o_proj | output
model.layers.0.post_attention_layernorm | norm
model.layers.0.mlp | ffn
model.layers.0.mlp.gate_proj | ffn
model.layers.0.mlp.act_fn | ffn
model.layers.0 | -
model.norm | norm
lm_head | head
transformer.wte | embedding
transformer.wpe | embedding
transformer.h.0.ln_1 | norm
transformer.h.0.attn.c_attn | qkv
transformer.h.0.attn.c_proj | output
transformer.h.0.attn.attn_dropout | attention
transformer.h.0.mlp.c_fc | ffn
transformer.h.0.mlp.c_proj | ffn
transformer.ln_f | norm
tok_embeddings | embedding
layers.0.attention.wq | qkv
layers.0.attention.wo | output
layers.0.attention.sdpa | attention
layers.0.feed_forward.w1 | ffn
layers.0.ffn_norm | norm
output | head
""")
)


def test_the_usual_names_of_other_models_have_parts():
    assert {path: part_of(path) or "" for path in MODULES} == MODULES
    assert {path: part_of(f"net._orig_mod.{path}") or "" for path in MODULES} == MODULES


def test_classes_tell_where_names_do_not():
    classes = {"a.0": "LlamaRMSNorm", "a.1": "GPT2MLP", "a.1.x": "Linear", "b": "CrossEntropyLoss", "c": "Linear"}
    expected = {"a.0": "norm", "a.1.x": "ffn", "b": "loss", "c": None}
    # A range may be named by the class alone.
    expected |= {"ViTSelfOutput": "output", "BertOutput": "ffn", "BertIntermediate": "ffn", "GPTAttention": "attention"}
    assert {path: part_of(path, classes) for path in expected} == expected


def test_fsdp2s_class_name_is_not_the_modules():
    classes = {"net.1": "FSDPSoftmax", "net.2": "FSDPRMSNorm"}
    assert [part_of(path, classes) for path in classes] == ["softmax", "norm"]
    assert module_path("nn.Module: FSDPBlock_12") == "Block"
    assert module_path("nn.Module: FSDPnet_0") == "FSDPnet"


def test_fused_parts_are_in_the_models_order():
    assert joined(["residual", "norm", "norm"]) == "norm+residual"
    assert joined([]) == "unclassified"
    assert sorted(["unclassified", "norm+qkv", "qkv", "norm", "embedding"], key=part_order) == [
        "embedding", "norm", "norm+qkv", "qkv", "unclassified",
    ]  # fmt: skip
