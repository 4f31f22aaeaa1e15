"""The results of a history, against planted steps in which every byte is known."""

from __future__ import annotations

import pickle

import planted_memory
import pytest
from planted_memory import FORWARD, MIB, USER, Allocator, planted_run, snapshot, write, write_recording
from refusals import usage_error
from tables import cases

from lmbench.memory.answer import history_answer
from lmbench.memory.findings import examine


def recorded(folder, step=None, **notes):
    """The findings of a planted recording by lmbench."""
    return examine(write_recording(folder, step or planted_run(), **notes))


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("planted"))


def mib(sizes):
    """The sizes of a mapping or series in MiB."""
    return {name: size / MIB for name, size in sizes.items()}


def test_the_peak_is_the_planted_one_by_category_phase_and_part(planted):
    phases = planted.phases
    peak_bytes = planted_run().memory.peak
    assert (planted.peak["allocated_bytes"], mib(planted.by_category)) == (peak_bytes, planted_memory.PEAK)
    assert (planted.peak["phase"], planted.peak["step"], planted.cuts) == ("backward", "7", [])
    assert [guard.status for guard in planted.guards] == ["pass", "pass"]
    # After the backward's last free 172 are held, and zero_grad begins with them.
    assert mib(phases["peak_bytes"]) == {"forward": 208, "backward": 252, "optimizer": 179, "zero_grad": 172}
    assert phases.loc["optimizer", "temporaries"] == 7 * MIB
    assert mib(planted.parts.loc["blocks.*.ffn"].dropna()) == {
        "parameters": 40, "optimizer_state": 80, "gradients": 20, "activations": 40,
    }  # fmt: skip
    assert mib(planted.parts.loc["head"].dropna()) == {"logits": 16}
    assert set(planted.parts.loc[""].dropna().index) == {"inputs", "temporaries", "workspaces", "unknown"}


def test_a_full_history_is_not_complete_and_its_sums_stay_exact(planted, tmp_path):
    """Allocations from before the first entry are known from their end."""
    for kept in (10, 25, 44):
        cut = recorded(tmp_path, planted_run(max_entries=kept), max_entries=kept)
        columns = ["allocated_bytes", "reserved_bytes"]
        assert (cut.played.entries[columns].to_numpy() == planted.played.entries[columns][-kept:].to_numpy()).all()
        assert "all that `--memory.max_entries` allows" in cut.cuts[0]
        assert cut.guards[1].status == "warn"


def test_a_missing_free_is_counted(tmp_path):
    step = planted_run()
    frees = [entry for entry in step.memory.entries if entry["action"][:5] == "free_" and entry["size"] == 5 * MIB]
    step.memory.entries = [entry for entry in step.memory.entries if entry not in frees[:2]]
    findings = recorded(tmp_path, step)
    assert (findings.played.holes, bool(findings.cuts)) == (1, True)


PACKAGES, WINDOWS = "/venv/lib/python3.12/site-packages", r"C:\Users\me\anaconda3\lib"
#: The C++ frames that stacks begin with.
CPP = (
    ("torch::unwind::unwind()", "??", 0),
    ("c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc()", "CUDACachingAllocator.cpp", 0),
    ("at::_ops::empty_strided::call(c10::ArrayRef<c10::SymInt>)", "", 0),
    ("at::_ops::bmm::call(at::Tensor const&, at::Tensor const&)", "??", 0),
    ("cfunction_call", "/usr/local/src/conda/python-3.10.14/Objects/methodobject.c", 543),
    ("start", "libc.so.6", 0), ("run_mod.llvm.9196", "pythonrun.o", 0),
)  # fmt: skip
CPP_ENGINE = (*CPP, ("torch::autograd::Engine::thread_main(std::shared_ptr<>)", "??", 0))
CALL = ("_call_impl", f"{PACKAGES}/torch/nn/modules/module.py", 1790)
#: Lightning runs a training step in the closure that the optimizer's step calls.
CLOSURE = (
    ("training_step", USER, 7), ("closure", f"{PACKAGES}/lightning/pytorch/loops/optimization/automatic.py", 135),
    ("step", f"{PACKAGES}/torch/optim/adamw.py", 220), ("wrapper", f"{PACKAGES}/torch/optim/optimizer.py", 500),
)  # fmt: skip


@cases("stack | line", 
        ((*CPP, ("einsum", f"{PACKAGES}/einops/einops.py", 9), ("forward", USER, 21), CALL), f"{USER}:21 forward"),
        (((("bmm", rf"{WINDOWS}\site-packages\torch\functional.py", 1), ("inner", rf"{WINDOWS}\contextlib.py", 2),
           ("loss", r"D:\work\lib\queue.py", 3))), r"D:\work\lib\queue.py:3 loss"),
        ((*CPP, ("<module>", "<ipython-input-3-5bf1>", 2)), "<ipython-input-3-5bf1>:2 <module>"),
        ((*CPP, CALL, ("forward", f"{PACKAGES}/transformers/models/llama/modeling_llama.py", 3)),
         f"{PACKAGES}/transformers/models/llama/modeling_llama.py:3 forward"),
        (CPP_ENGINE, "aten::bmm"),
        ((("forward", f"{PACKAGES}/torch/nn/modules/linear.py", 134), CALL),
         f"{PACKAGES}/torch/nn/modules/linear.py:134 forward"),
        ((*CPP[:2], ("run", f"{PACKAGES}/torch/_inductor/cudagraph_trees.py", 3)), ""))  # fmt: skip
def test_the_line_of_a_stack_is_the_users_or_the_operator_or_the_module(stack, line, tmp_path):
    memory = Allocator()
    memory.alloc(MIB, stack)
    findings = examine(write(tmp_path / "theirs.pickle", memory))
    assert findings.largest["user_frame"].tolist() == [line]


def test_the_innermost_frame_with_a_role_tells_the_category(tmp_path):
    stacks = {
        "activations": (*CPP, ("forward", USER, 20), CALL, *CLOSURE),
        "optimizer_state": (*CPP, ("step", USER, 70), *CLOSURE[2:]),
        "parameters": (*CPP, ("_init_sharded_param", f"{PACKAGES}/torch/distributed/fsdp/_fsdp_param.py", 5), CALL),
        "inputs": (*CPP, ("send_to_device", f"{PACKAGES}/accelerate/utils/operations.py", 150), *CLOSURE[2:]),
        "workspaces": (("at::cuda::getCurrentCUDABlasHandle()", "??", 0), *CPP, ("forward", USER, 20), CALL),
        "gradients": CPP_ENGINE,
        "unknown": (*CPP, ("elsewhere", "/home/someone/data.py", 5)),
    }
    memory, held = Allocator(), {}
    for size, (category, stack) in enumerate(stacks.items(), start=1):
        held[category] = memory.alloc(size * MIB, stack)
    passing = memory.alloc(10 * MIB, CPP_ENGINE)
    saved = memory.alloc(20 * MIB, stacks["unknown"])
    for address in (passing, saved, held["activations"]):
        memory.free(address, CPP_ENGINE)
    memory.free(held["gradients"], (("zero_grad", f"{PACKAGES}/torch/optim/optimizer.py", 1000), *CLOSURE))
    sizes = {category: size for size, category in enumerate(stacks, start=1)}
    sizes |= {"temporaries": 10, "activations": 1 + 20}
    assert mib(examine(write(tmp_path / "theirs.pickle", memory)).by_category) == sizes


def test_a_device_has_to_be_named_if_several_have_a_history(tmp_path):
    first, second, silent = Allocator(device=0), Allocator(device=1), Allocator(is_on=False)
    for size, memory in enumerate((first, second, silent), start=1):
        memory.alloc(size * MIB)
    path = write(tmp_path / "s.pickle", first, second)
    assert examine(path, device=1).peak["allocated_bytes"] == 2 * MIB
    for device in (None, 3):
        with usage_error("--device 0, 1"):
            examine(path, device)
    held = examine(write(tmp_path / "s.pickle", silent))
    assert held.peak["allocated_bytes"] == 3 * MIB
    assert held.cuts == ["it has no history, only what was held when it was taken"]


STATE = (("_init_group", f"{PACKAGES}/torch/optim/adam.py", 8), ("train", USER, 21))


@cases("""
- [in_forward_mib, state_mib, phase, remedy]
- [40, 10, forward, computing blocks again]
- [1, 99, optimizer, an optimizer with less state]
""")
def test_the_device_that_ran_out_is_shown_with_what_it_refused_and_what_unwinding_freed(
    in_forward_mib, state_mib, phase, remedy, tmp_path
):
    other, memory = Allocator(), Allocator(device=1)
    other.alloc(MIB)
    memory.alloc(state_mib * MIB, STATE)
    blocks = [memory.alloc(MIB, FORWARD) for _ in range(in_forward_mib)]
    memory.refuse(8 * MIB, 3 * MIB, FORWARD if phase == "forward" else STATE)
    for block in blocks:
        memory.free(block)
    findings = examine(write(tmp_path / "s.pickle", other, memory))
    assert mib(findings.by_category) == {"activations": in_forward_mib, "optimizer_state": state_mib}
    refused = findings.refused
    assert (findings.played.device, refused.phase, refused.location.split()[0]) == (1, phase, f"{USER}:21")
    assert (refused.requested_bytes, refused.device_free_bytes) == (8 * MIB, 3 * MIB)
    assert refused.allocated_bytes == (in_forward_mib + state_mib) * MIB
    headline = {line.label: line.text for line in history_answer(findings).headline}
    assert headline["do"].startswith(remedy)
    assert headline["refused"].startswith(f"8.0 MiB more in {phase}, at {USER}:21 ")


def test_the_form_of_torch_2_0_has_the_same_blocks_and_entries_without_times(tmp_path):
    today, torch20 = snapshot(planted_run().memory), snapshot(planted_run().memory)
    for segment in torch20["segments"]:
        for block in segment["blocks"]:
            del block["address"]
            if "requested_size" in block:
                block["history"] = [{"real_size": block.pop("requested_size"), "frames": block.pop("frames", [])}]
    for form in (today, torch20):
        del form["external_annotations"]
    for entry in torch20["device_traces"][0]:
        del entry["time_us"]
    answers = []
    for form in (today, torch20):
        (tmp_path / "s.pickle").write_bytes(pickle.dumps(form))
        findings = examine(tmp_path / "s.pickle")
        answers.append((findings.by_category, findings.phases.to_dict(), findings.largest.to_dict(), findings.cuts))
    assert answers[0] == answers[1]


def test_damaged_notes_are_an_error(tmp_path):
    step = planted_run()
    step.moments[0][0][0] = 1 << 70
    with usage_error(r"memory_notes\.json"):
        recorded(tmp_path, step)


def test_a_replay_that_disagrees_with_the_allocator_warns(tmp_path):
    for requested_mib, status in ((252, "pass"), (253, "warn")):
        peaks = {"allocated_bytes": 0, "requested_bytes": requested_mib * MIB, "reserved_bytes": 0}
        assert recorded(tmp_path, peaks=peaks).guards[2].status == status
