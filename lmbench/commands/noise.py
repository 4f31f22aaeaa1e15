"""`lmbench noise RESULTS...`: the A/A noise floor that `compare` relies on, from repeats of one configuration."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from lmbench.compare.noise import MIN_NOISE_REPEATS, noise_answer, store_noise, survey
from lmbench.errors import UsageError, tell
from lmbench.report.answer import Answer


def noise(
    *results: str,
    run: bool = False,
    repeats: int = 10,
    results_dir: Path = Path("results"),
    settings: list[str] | None = None,
) -> Answer | int:
    """Measures how far a configuration is from itself when nothing was changed.

    The floor is stored as noise.json beside the results, by host, device and settings; `lmbench compare` finds
    it in the closest folder above all runs that it compares. It takes 6 repeats of a configuration or more, in any
    folder of runs or sweep. With --run it makes them as `lmbench fit --repeats` does, with its options.

    Args:
        results: results with repeats
        run: measure the repeats now
        repeats: processes to run
        results_dir: where --run puts the folder of its repeats
        settings: options of `lmbench fit`, with --run
    """
    words = [*(settings or [])]
    if not run and not results:
        raise UsageError("noise takes results with repeats, or --run with options of `lmbench fit`")
    if run and repeats < MIN_NOISE_REPEATS:
        raise UsageError(f"--repeats is {repeats}; a noise floor takes {MIN_NOISE_REPEATS}")
    if run:
        # Here: floors of results that are there do without what measures.
        from lmbench.commands.fit import repeated

        folder = results_dir / f"noise-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        words += [f"--measure.results_dir={results_dir}", f"--measure.run_id={folder.name}"]
        done = repeated(*results, repeats=repeats, settings=words)
        if isinstance(done, int):
            return done
        results = (str(folder),)
    measured = survey(results)
    if not measured.entries:
        raise UsageError("; ".join(line.text for line in measured.problems[:3]))
    home = results_dir.resolve() if run else measured.folder
    tell(f"noise: stored in {store_noise(home, [entry for _, entry in measured.entries])}")
    return noise_answer(measured)
