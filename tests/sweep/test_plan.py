"""A sweep's file: its cells and their words, and one clear line for each mistake in it."""

from __future__ import annotations

import re

import pytest
import yaml
from tables import cases

from lmbench.configs import shipped_studies
from lmbench.errors import UsageError
from lmbench.sweep.file import read_sweep_file, sweep_from
from lmbench.sweep.plan import make_plan


def cells(text):
    return make_plan("x", sweep_from(yaml.safe_load(text))).cells


# Files with a mistake, and a part of the message about it.
@cases("""
text | message
{matrix: {a: [{3: 1}]}} | option 3: name one such as data.batch_size
{base: {config: []}, matrix: {a.b: [1]}} | config takes a name or a path
[1, 2] | expected a mapping such as {a: 1}, got a list such as [a, b]
matrx: {a.b: [1]} | unknown field 'matrx'; allowed: base, matrix, 
{} | the matrix is empty
{matrix: {a.b: [1], model.size: []}} | matrix.model.size: expected a list such as [a, b] of length >= 1
{base: [1], modes: [forward]} | base: expected a mapping such as {a: 1}, got a list
{matrix: {a.b: [1]}, passes: [kernel]} | unknown pass 'kernel'; choose one of timing, sync, kernels, memory
{include: [{pass: kernel}]} | choose one of timing, sync, kernels, memory
{modes: [training]} | unknown mode 'training'; choose one of inference, forward
{matrix: {measure.mode: [forward]}} | measure.mode is set by the sweep; list it under `modes`
{matrix: {config: [smoke]}} | config is no axis; it belongs in base
{base: {measure.run_id: a}, matrix: {data.batch_size: [2]}} | run_id is set by the sweep; leave it out
{base: {measure.results_dir: x}, modes: [forward]} | --results_dir
{sides: {../A: {}, B: {}}} | sides: unknown value '../A'; allowed: A, B
{sides: {A: {environment: x}, B: {}}} | unknown environment 'x'
{modes: [forward], repeats: 0} | repeats: expected a whole number >= 1
{modes: [forward], timeout_s: .inf} | timeout_s: expected a number <= 1000000000.0
{environments: {x: {variables: {A: 1}}}} | environments[...].variables[...]: expected text, got a whole number
{matrix: {a.b: [1, 2]}, exclude: [{a.c: 1}]} | fits no cell; axes are a.b
{include: [{a.b: 1}], exclude: [{a.b: 1}]} | fits no cell; axes are those of the matrix, and there is none
{matrix: {a.b: [1]}, exclude: [{a.b: 1}]} | leaves no cell
{matrix: {a.b: [1, 1]}} | two cells are the same
{matrix: {a.b: [1, 2]}, include: [{a.b: 2}]} | two cells are the same
{matrix: {a.b: [1], x: [{a.b: 2}]}} | two axes set a.b
matrix: {model.hf_token: [a, b]} | looks like a secret, and cells go by what differs
{base: {config: smok}, modes: [forward]} | did you mean smoke?
{modes: [forward], largest: {option: a.b, most: 0}} | largest.most: expected a whole number >= 1
{matrix: {a.b: [1]}, largest: a.b} | largest: a.b is an axis of this sweep
{modes: [forward], base: {a.b: many}, largest: a.b} | begins at 'many' in base; it must be a whole number
""")
def test_a_mistake_is_reported_in_one_line(text, message):
    with pytest.raises(UsageError) as raised:
        cells(text)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@cases("""
- [text, axes]
# The last axis varies fastest, and modes follow the matrix.
- ["matrix: {a.b: [1, 2], c.d: [x, y]}, modes: [forward]",
   [[1, x, forward], [1, "y", forward], [2, x, forward], [2, "y", forward]]]
- ["matrix: {a.b: [1]}, modes: [inference, train_step]", [[1, inference], [1, train_step]]]
# A named axis sets several options at once.
- ["base: {a.b: 0}, matrix: {pair: [{a.b: 1, c.d: x}, {a.b: 2, c.d: y}]}", [[1, x], [2, "y"]]]
# Exclude takes lists, and include adds cells with options of their own.
- ["matrix: {a.b: [1, 2, 3], c.d: [x, y]}, exclude: [{a.b: [2, 3], c.d: y}], include: [{a.b: 9, e.f: z}]",
   [[1, x], [1, "y"], [2, x], [3, x], [9, z]]]
""")
def test_cells_are_the_grid_without_excluded_points_and_with_included_ones(text, axes):
    assert [[*cell.axes.values()] for cell in cells(f"{{{text}}}")] == axes


def test_passes_measure_each_cell_once_whatever_the_repeats():
    text = "{base: {memory.predict: true}, matrix: {a.b: [1, 2]}, passes: [timing, sync, memory], repeats: 3}"
    plan = make_plan("x", sweep_from(yaml.safe_load(text)))
    passes = ["timing", "sync", "memory"]
    assert [cell.options.get("timer.clock") for cell in plan.cells] == [None, "sync", None] * 2
    assert [cell.options.get("memory.history") for cell in plan.cells] == [None, None, True] * 2
    # The memory pass does not predict again, since the timing pass did.
    assert [cell.options["memory.predict"] for cell in plan.cells] == [True, True, False] * 2
    assert [job.cell.axes["pass"] for job in plan.jobs()] == passes * 2 + ["timing"] * 4
    # A sweep without passes keeps its runs when its file gets passes.
    without = make_plan("x", sweep_from(yaml.safe_load(text.replace(f", passes: [{', '.join(passes)}]", ""))))
    assert {cell.id for cell in without.cells} < {cell.id for cell in plan.cells}


def test_values_of_every_type_become_words():
    matrix = "{a.a: [true], a.b: [null], a.c: [-1.5], a.d: [[1, 2]], a.e: [{x: 1}], a.f: ['0']}"
    (cell,) = cells(f"{{matrix: {matrix}, modes: [train_step]}}")
    values = ["--a.a=true", "--a.b=null", "--a.c=-1.5", "--a.d=[1, 2]", '--a.e={"x": 1}', "--a.f=0"]
    assert cell.words() == ["fit", *values, "--measure.mode=train_step"]


def test_a_cells_id_names_its_values_and_depends_on_all_its_settings():
    text = "{base: {s.t: %s}, matrix: {model.size: [tiny, '2.7B'], a.b: [1, 2], e.f: [0]}}"
    ids = [cell.id for cell in cells(text % 5)]
    assert [cell_id.rpartition("-")[0] for cell_id in ids] == ["tiny-b-1", "tiny-b-2", "2.7B-b-1", "2.7B-b-2"]
    assert ids == [cell.id for cell in cells(text % 5)]
    assert not set(ids) & {cell.id for cell in cells(text % 6)}
    assert all(part.replace("-", "").replace(".", "").replace("_", "").isalnum() for part in ids)


def test_every_study_has_a_view_a_tiny_variant_and_cells():
    from lmbench.catalogue import make_catalogue

    studies = shipped_studies()
    assert {f"tiny_{name}" for name in studies if not name.startswith("tiny_")} <= set(studies)
    for name, path in studies.items():
        plan = make_plan(name, read_sweep_file(path)[0])
        assert make_catalogue().view(plan.file.view, plan.file.matrix).name == name.removeprefix("tiny_")
        assert len(plan.cells) > 1


#: A command with the text of its file, and a part of the message about each wrong line.
WRONG = yaml.safe_load(r"""
sweep:
  - "matrxi:\n  data.batch_size: [1]\nrepeats: x\nenvironments:\n  a:\n    pyhton: x\n"
  - {1: "unknown field 'matrxi'", 3: "expected a whole number", 6: "'pyhton'"}
sweep of options:
  - "base:\n  config: smoke\n  model.sise: 1\nmatrix:\n  data.batch_sizes: [1]\n"
  - {3: "--model.size?", 5: "--data.batch_size?"}
sweep of options and a view:
  - "base: {config: smoke, measure.stpes: 1}\nmatrix:\n  data.batch_size: [1]\nview:\n  title: T\n  tables:\n\
     \  - {title: T, columns: [step_sec]}\n  charts:\n  - {title: C, kind: bar}\n  baseline: {precison: 1}\n"
  - {1: "--measure.steps?", 7: "'step_sec' is unknown", 9: "chart kind 'bar'", 10: "did you mean precision?"}
# One after the other.
fit:
  - "model:\n  num_layers: 1\ntrainer:\n  accelerator: cpu\n  precision: bf17\n"
  - {5: "trainer.precision is 'bf17'"}
fit what is no YAML: ["a: b\n  c: d\n", {}]
sweep what is no YAML: ["a: b\n  c: d\n", {}]
""")


@cases("what", *WRONG)
def test_all_mistakes_of_a_file_are_reported_with_their_lines(what, here, refused):
    text, lines = WRONG[what]
    (here / "mine.yaml").write_text(text)
    error = refused(what.split()[0], "mine.yaml")
    messages = dict(re.findall(r"mine.yaml:(\d+): (.*?)(?=; mine|\n)", error))
    assert {int(number) for number in messages} == set(lines)
    assert all(part in messages[str(number)] for number, part in lines.items())
    assert error.count("\n") == 1
    assert lines or "no YAML: mapping values are not allowed in this context, line 2" in error


@cases("""
- [devices, ranks]
- [2, 2]
- ["3", 3]
- ["0,1", 2]
- ["5,", 1]
- [[0, 4], 2]
- [auto, 1]
""")
def test_a_cell_has_the_ranks_that_its_devices_name(devices, ranks):
    plan = make_plan("x", sweep_from({"base": {"trainer.devices": devices}, "modes": ["forward"]}))
    assert plan.ranks(plan.cells[0]) == (1, ranks)
