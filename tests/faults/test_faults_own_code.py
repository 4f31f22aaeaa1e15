"""Faults planted in lmbench's own code: the recorded steps are never lost to them."""

from __future__ import annotations

from fit_process import SMALL, bench, plant
from tables import cases


def planted(*_, **__):
    raise ZeroDivisionError("planted in lmbench")


# Where it is, whether the user's own code raised before, and what comes of it.
@cases("""
- [place, users_raised, code, outcome, steps, said]
- [records.summary.evaluate_guards, false, 1, error, 8, ZeroDivisionError]
# It does not hide what the user's own code raised before.
- [records.summary.summarize_steps, true, 5, error, 5, planted in the user's own code]
- [fit.run.give, false, 1, ok, 8, the result could not be printed (planted in lmbench)]
# An observer that cannot leave its facts hinders no other.
- [callbacks.MemoryRecorder.run_closing, true, 5, error, 5, MemoryRecorder could not leave its facts]
""")
def test_a_fault_in_lmbench_keeps_the_steps_and_is_told(
    place, users_raised, code, outcome, steps, said, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(f"lmbench.{place}", planted)
    words = plant("on_train_batch_end", "raise", 5) if users_raised else ()
    run = bench(tmp_path, "--measure.warmup_steps=2", *SMALL, *words, code=code)
    assert (run.outcome, len(run.steps)) == (outcome, steps)
    told = capsys.readouterr().err
    assert said in told
    if place.endswith("evaluate_guards"):
        # What was done before the fault is there.
        assert (run.record.error.phase, run.record.phases.step.n) == ("summary", 6)
        assert "planted in lmbench" in run.record.error.message
    if place.endswith("give"):
        assert str(run.path) in told
    if users_raised:
        assert run.record.error.message == "planted in the user's own code"
