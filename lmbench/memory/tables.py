"""A history's findings as people read them: labelled lines and tables, on the screen and as Markdown; blocks as CSV."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from rich.console import Console

from lmbench.memory.categories import CATEGORIES, CATEGORY_LABELS, Category
from lmbench.memory.history.findings import Allocation, Findings
from lmbench.records.guard import not_passed
from lmbench.report.chosen import Chosen, more, print_chosen
from lmbench.report.delimited import csv_field
from lmbench.report.markdown import parts_to_markdown
from lmbench.report.page import table_html
from lmbench.report.table import BLANK, Entry, Line, Part, Table, fact, numbers, paths, words
from lmbench.report.units import MISSING, gib, percent, whole
from lmbench.text import shown

#: Parts with less of the peak than this are together in one row.
_PART_FRACTION = 0.005
#: A category with less of the peak than this has no column of its own beside the model's parts.
_COLUMN_FRACTION = 0.03
#: A column with less in every row is left out.
_COLUMN_BYTES = 2**20


def print_findings(found: Findings, top: int, chosen: Chosen, console: Console) -> None:
    """Print the answer with what the peak is made of, or the tables that were chosen instead, or everything.

    Raises:
        UsageError: a table was chosen that there is none of.
    """
    made = tables(found, top)
    answer: list[Part] = [*head(found), made[0], BLANK, more(made)]
    print_chosen(chosen, made, _everything(found, made), answer, console, whole=("snapshot",))


def to_markdown(found: Findings, top: int) -> str:
    """The same as Markdown, ready to paste; ends in a line feed."""
    return parts_to_markdown(_everything(found, tables(found, top)))


def _everything(found: Findings, made: Sequence[Table]) -> list[Part]:
    return [*head(found), *made, BLANK, *closing(found)]


def answer_html(found: Findings) -> str:
    """What the peak is made of, as HTML."""
    return "\n".join(_facts_html(head(found)))


def tables_html(found: Findings, top: int = 40) -> str:
    """All tables, and the lines after them, as HTML."""
    parts = [table_html(table) for table in tables(found, top)]
    return "\n".join([*parts, *_facts_html(closing(found))])


def _facts_html(lines: Sequence[Line]) -> list[str]:
    items = (f"<li>{escape(shown(f'{label}: {text}' if label else text))}</li>" for label, text in lines)
    return ['<ul class="facts">', *items, "</ul>"]


def to_csv(found: Findings) -> str:
    """What is held at the peak, alike blocks in a row, in bytes."""
    stream = io.StringIO()
    names = ["total_bytes", "size_bytes", "count", "category", "owner", "phase", "step", "operator", "user_frame"]
    writer = csv.DictWriter(stream, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    for each in found.largest:
        row = {name: getattr(each, name) for name in names}
        writer.writerow({name: csv_field(value) for name, value in row.items()})
    return stream.getvalue()


def head(found: Findings) -> list[Line]:
    """What is missing in the history, what the peak is made of, in two sentences, what makes it smaller, and guards
    that did not pass."""
    lines = []
    if not found.is_complete:
        lines.append(("INCOMPLETE", "; ".join(found.cuts)))
    lines += [("peak", f"{_peak(found)}: {_largest_categories(found)}. {_largest_part(found)}")]
    lines.append(("reserved", _reserved(found)))
    if (remedy := _remedy(found)) is not None:
        lines.append(("do", remedy))
    if _is_compiled(found):
        lines.append(("compiled", _COMPILED))
    for guard in not_passed(found.guards):
        lines += [(guard.status.upper(), guard.message), ("", guard.advice)]
    return lines


#: What makes less of the largest category, each in a clause.
_REMEDIES: Mapping[Category, str] = {
    "parameters": "a lower precision of the weights (bf16-true), or fewer of them on each device",
    "gradients": "gradients set to none before the forward, a lower precision of the weights, or fewer on each device",
    "optimizer_state": "an optimizer with less state, or its state over several ranks; a smaller batch changes nothing",
    "logits": "a loss in pieces of the vocabulary or of the sequence, or a smaller batch accumulated",
    "temporaries": "a smaller batch accumulated, or compiling, which does without most of them",
    "inputs": "fewer batches on the device at a time",
}


def _remedy(found: Findings) -> str | None:
    """What makes the peak smaller, by what most of it is; nothing where that is unknown."""
    if not found.by_category:
        return None
    largest = max(found.by_category, key=found.by_category.__getitem__)
    if largest != "activations":
        return _REMEDIES.get(largest)
    saved = sum(each.each_bytes * each.count for each in found.saved)
    why = f"{gib(saved)} are saved for the backward: " if saved else ""
    if found.run is None:
        return f"{why}checkpoints (torch.utils.checkpoint), or a smaller batch accumulated"
    if found.run.model.checkpoint in (None, "none"):
        return f"{why}--model.checkpoint block or selective saves less, or a smaller batch accumulated"
    return f"{why}a smaller batch accumulated; blocks are checkpointed already"


#: Autograd's name of what saves for all of a compiled region.
_REGION = "CompiledFunction"
_COMPILED = (
    "each compiled region is one operator: what it makes and saves has its name, without the modules inside; "
    "an eager run tells them apart"
)


def _is_compiled(found: Findings) -> bool:
    is_asked_for = found.run is not None and bool(found.run.compile.is_enabled)
    return is_asked_for or any(name.startswith(_REGION) for name in found.attribution.operators)


def _peak(found: Findings) -> str:
    step = f" of step {found.peak_step}" if found.peak_step else ""
    where = f" in {found.peak_phase}{step}" if found.attribution.bands.is_own else ""
    return f"{gib(found.peak_bytes)}{where}"


def _share(size_bytes: int, found: Findings) -> str:
    return f"{gib(size_bytes)} ({percent(size_bytes / found.peak_bytes if found.peak_bytes else 0.0)})"


def _largest_categories(found: Findings) -> str:
    largest = sorted(found.by_category.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{CATEGORY_LABELS[name]} {_share(size, found)}" for name, size in largest) or "nothing"


def _largest_part(found: Findings) -> str:
    """The part with most, or where nobody knows parts, the allocations."""
    part = next((part for part in found.by_part if part), None)
    if part is not None:
        sizes = found.by_part[part]
        name, most = max(sizes.items(), key=lambda item: item[1])
        of_it = f"{gib(most) if len(sizes) > 1 else 'all'} of it {CATEGORY_LABELS[name]}"
        return f"Most is made by {_part(part, _common(found))}: {_share(sum(sizes.values()), found)}, {of_it}."
    if not found.largest:
        return ""
    first = found.largest[0]
    where = f" from {_frame(first.user_frame)}" if first.user_frame else ""
    return f"Most is in {whole(first.count)} x {_mib(first.size_bytes)} MiB{where}: {_share(first.total_bytes, found)}."


def _reserved(found: Findings) -> str:
    between = found.peak_reserved_bytes - found.peak_bytes
    if between < 0:
        return "not known: segments are missing in this snapshot"
    fraction = between / found.peak_reserved_bytes if found.peak_reserved_bytes else 0.0
    return f"{gib(found.peak_reserved_bytes)} at the peak, {gib(between)} ({percent(fraction)}) of it in no block"


def tables(found: Findings, top: int) -> list[Table]:
    """All tables that this history has something for."""
    made = [category_table(found)]
    if found.phases:
        made.append(phase_table(found))
    if any(found.by_part):
        made.append(part_table(found))
    made.append(largest_table(found, top))
    if found.saved:
        made += [saved_table(found), operator_table(found)]
    return made


def category_table(found: Findings) -> Table:
    """Bytes at the peak by category."""
    total = found.peak_bytes
    rows = [
        [fact(CATEGORY_LABELS[name]), Entry(_gib(size)), Entry(percent(size / total if total else 0.0))]
        for name, size in found.by_category.items()
    ]
    rows.append([fact("peak"), Entry(_gib(total)), Entry(percent(1.0))])
    headings = [*words("category"), *numbers("GiB", "share")]
    return Table("At the peak", "GiB", headings, rows, has_total=True, name="peak")


def _shown_categories(sizes: Sequence[Mapping[Category, int]]) -> list[Category]:
    """Those with something worth a column in any row."""
    return [name for name in CATEGORIES if any(own.get(name, 0) >= _COLUMN_BYTES for own in sizes)]


def _sizes(by_category: Mapping[Category, int], names: Sequence[Category]) -> list[Entry]:
    return [_size(by_category.get(name)) for name in names]


def _size(size_bytes: int | None) -> Entry:
    return Entry(MISSING if size_bytes is None else _gib(size_bytes))


#: Headings of narrow columns.
_SHORT: dict[Category, str] = {
    "parameters": "params", "gradients": "grads", "optimizer_state": "optim", "activations": "acts",
    "temporaries": "temps", "workspaces": "work",
}  # fmt: skip


def _short(names: Sequence[Category]) -> list[str]:
    return [_SHORT.get(name, name) for name in names]


def phase_table(found: Findings) -> Table:
    """The peak of each phase, and what it is made of."""
    names = _shown_categories([phase.by_category for phase in found.phases])
    rows = [
        [fact(phase.phase), Entry(_gib(phase.allocated_bytes)), *_sizes(phase.by_category, names)]
        for phase in found.phases
    ]
    headings = [*words("phase"), *numbers("peak", *_short(names))]
    caption = "GiB; the most that was allocated in a phase, over all steps"
    return Table("Each phase's peak", caption, headings, rows, name="phases")


def part_table(found: Findings) -> Table:
    """Bytes at the peak by part of the model; small categories are together in one column."""
    known = _shown_categories([found.by_category])
    small = [name for name in known if found.by_category[name] < _COLUMN_FRACTION * found.peak_bytes]
    names = known if len(small) < 2 else [name for name in known if name not in small]
    has_rest = names != known

    def row(label: str, sizes: Mapping[Category, int]) -> list[Entry]:
        together = sum(size for name, size in sizes.items() if name not in names)
        rest = [_size(together or None)] if has_rest else []
        return [fact(label), _size(sum(sizes.values())), *_sizes(sizes, names), *rest]

    rows, others, together = [], 0, dict[Category, int]()
    common = _common(found)
    for part, sizes in found.by_part.items():
        if sum(sizes.values()) < _PART_FRACTION * found.peak_bytes:
            others += 1
            for name, size in sizes.items():
                together[name] = together.get(name, 0) + size
        else:
            rows.append(row(_part(part, common), sizes))
    if others:
        rows.append(row(f"{others} more part{'s' if others > 1 else ''}", together))
    headings = [*paths("part"), *numbers("all", *_short(names), *(["rest"] if has_rest else []))]
    caption = (
        "GiB at the peak, by the module that made it (in the backward: whose output's gradient came last), or whose "
        "parameter it belongs to; * is any block"
    )
    return Table("By part of the model", f"{caption}{_beneath(common)}", headings, rows, name="parts")


def _beneath(common: str) -> str:
    return f"; all are in {common.removesuffix('.')}" if common else ""


def _part(owner: str, common: str) -> str:
    return owner.removeprefix(common) or "(none)"


def _common(found: Findings) -> str:
    """What every part's path begins with, such as `network.`: it tells nothing. Parts around it keep their names."""
    known = [part.split(".") for part in found.by_part if part]
    deepest = max(known, key=len, default=[])
    shared = 0
    for end in range(1, len(deepest)):
        # What is listed stays with its list: `blocks.*`.
        is_listed = "*" in deepest[: end + 1]
        if is_listed or any(part[:end] != deepest[:end][: len(part)] for part in known):
            break
        shared = end
    return "".join(f"{name}." for name in deepest[:shared])


def largest_table(found: Findings, top: int) -> Table:
    """The largest allocations at the peak, with the first frame of the user's code."""
    rows = []
    common = _common(found)
    shown_ones = found.largest[:top]
    alike = Counter(map(_looks, shown_ones))
    for each in shown_ones:
        # What saved them tells apart what would look alike.
        saved_by = f"saved by {each.operator}" if each.operator and alike[_looks(each)] > 1 else ""
        where = ", ".join(filter(None, (_part(each.owner, common), _frame(each.user_frame), saved_by)))
        figures = (_mib(each.size_bytes), whole(each.count), _gib(each.total_bytes))
        told = (CATEGORY_LABELS[each.category], each.phase or "before", where)
        rows.append([*map(Entry, figures), *map(fact, told)])
    if rest := found.largest[top:]:
        total = sum(each.total_bytes for each in rest)
        figures = (MISSING, whole(sum(each.count for each in rest)), _gib(total))
        rows.append([*map(Entry, figures), fact(f"{len(rest)} more kinds"), *map(fact, ("", ""))])
    caption = "each in MiB, n alike, together GiB; the first frame that is not PyTorch's or Lightning's"
    headings = [*numbers("MiB", "n", "GiB"), *words("category", "phase"), *paths("part, line")]
    return Table("Largest at the peak", caption, headings, rows, name="largest")


def _looks(each: Allocation) -> tuple[object, ...]:
    return each.size_bytes, each.count, each.category, each.phase, each.owner, each.user_frame


def _gib(size_bytes: int) -> str:
    """GiB with the digits that matter beside a whole peak: what is less than half a MiB is 0.000."""
    value = size_bytes / 2**30
    return f"{value:.{3 if abs(value) < 1 else 2}f}"


def _mib(size_bytes: int) -> str:
    value = size_bytes / 2**20
    return f"{value:,.{0 if value >= 100 else 1 if value >= 1 else 3}f}"


def _frame(text: str) -> str:
    path, _, name = text.rpartition(" ")
    return f"{path.rpartition('/')[2]} {name}".strip()


def saved_table(found: Findings) -> Table:
    """What the forward leaves for the backward, by block of the model."""
    rows, common = [], _common(found)
    for each in found.saved:
        first = _part(each.first, common)
        name = first if each.count == 1 else f"{first} .. {each.last.rpartition('.')[2]}"
        together = each.each_bytes * each.count
        rows.append([fact(name), Entry(whole(each.count)), Entry(_mib(each.each_bytes)), Entry(_gib(together))])
    headings = [*paths("block"), *numbers("n", "MiB each", "GiB")]
    caption = "storages made in the forward, each once, without parameters"
    return Table("Saved for the backward", caption, headings, rows, name="saved")


def operator_table(found: Findings) -> Table:
    """The operators that saved it."""
    sums: dict[str, int] = {}
    for each in found.saved:
        for operator, size in each.by_operator.items():
            sums[operator] = sums.get(operator, 0) + size * each.count
    total = sum(sums.values())
    rows = [
        [fact(operator), Entry(_gib(size)), Entry(percent(size / total if total else 0.0))]
        for operator, size in sorted(sums.items(), key=lambda item: -item[1])
    ]
    caption = "of several operators that save a storage, the one nearest to where it was made"
    headings = [*paths("operator"), *numbers("GiB", "share")]
    return Table("Saved by which operators", caption, headings, rows, name="operators")


def closing(found: Findings) -> list[Line]:
    """The stream between the blocks, and what was recorded and how it agrees."""
    lines = []
    if found.residual is not None:
        lines.append(("residual", _residual(found)))
    free = f"{gib(found.free.total_bytes)} at the end, the largest piece {gib(found.free.largest_bytes)}"
    return [*lines, ("free", free), *_recorded(found)]


def _recorded(found: Findings) -> list[Line]:
    played, pending = found.played, int(found.played.pending_bytes[found.peak])
    steps = len(found.attribution.bands.steps)
    of_steps = f", {steps} step{'s' if steps != 1 else ''}" if steps else ""
    whose = "" if found.notes is not None else ", without lmbench's notes: categories by stacks"
    waiting = f"; {gib(pending)} more wait for another stream at the peak" if pending else ""
    lines = [("history", f"device {played.device}, {played.entry_count:,} entries{of_steps}{whose}{waiting}")]
    if found.attribution.unmatched:
        lines.append(("notes", f"{found.attribution.unmatched:,} noted storages are in no block of the history"))
    if found.notes is not None and found.notes.peaks is not None:
        peaks = found.notes.peaks
        rest = peaks.allocated_bytes - found.peak_bytes
        lines.append((
            "allocator",
            f"its own peaks: {gib(peaks.allocated_bytes)} allocated, {gib(peaks.requested_bytes)} asked for "
            f"(replayed: {gib(found.peak_requested_bytes)}), {gib(peaks.reserved_bytes)} reserved; {gib(rest)} "
            "allocated are ends of blocks that it left whole",
        ))  # fmt: skip
    if found.run is not None and found.run.run_id:
        lines.append(("run", found.run.run_id))
    lines.append(("snapshot", str(found.path)))
    return lines


def _residual(found: Findings) -> str:
    residual = found.residual
    assert residual is not None
    computed = "not known" if residual.computed_bytes is None else f"{_mib(residual.computed_bytes)} MiB"
    seen = ", ".join(f"{count} of {_mib(size)} MiB" for size, count in residual.seen_bytes.items()) or "none"
    return (
        f"the stream between blocks, batch x context x d_model: {computed} by the shape; outputs of blocks in the "
        f"history: {seen}; {residual.at_peak} of them are held at the peak"
    )
