"""The figures of retrieval as the summary and the report print them."""

import math
from collections import defaultdict
from collections.abc import Mapping

from difftool.bench.needles import DEPTHS, SETTINGS
from difftool.bench.result import Figure, Table
from difftool.bench.retrieval_result import Result, Score


def headline(result: Result) -> list[Figure]:
    """Accuracy and margin over all cells, and the attention that the answer gets."""
    overall, parts = result.overall, result.attention
    figures = [
        Figure("retrieval accuracy", overall.accuracy, overall.accuracy_stderr, "higher", 3),
        Figure("retrieval margin, nats", overall.margin, overall.margin_stderr, "higher", 3),
    ]
    if parts:
        answer = math.fsum(part.answer for part in parts) / len(parts)
        noise = math.fsum(part.noise for part in parts) / len(parts)
        figures.append(Figure("attention to answer", answer, None, "higher", 3))
        figures.append(Figure("attention to noise", noise, None, "lower", 3))
    return figures


def tables(results: Mapping[str, Result]) -> list[Table]:
    """Return accuracy by needles (Table 2 of the paper), by depth, and attention (Table 3)."""
    return [_by_needles(results), _by_depth(results), *_attention_table(results)]


def _by_needles(results: Mapping[str, Result]) -> Table:
    one = next(iter(results.values()))
    rows = [
        (
            name,
            *(_with_error(score.accuracy, score.accuracy_stderr) for score in result.settings),
            _with_error(result.overall.margin, result.overall.margin_stderr),
            f"{result.overall.confused:.2f}",
        )
        for name, result in results.items()
    ]
    left_out = "".join(f" No room in prompts of {length} tokens." for length in one.left_out)
    note = (
        f"Right digit the most likely of ten: a guess gets {one.chance:.2f}, one among the numbers "
        f"in the text 1/N. {one.overall.prompts} prompts of up to "
        f"{' and '.join(map(str, one.lengths))} tokens cut from {one.text}.{left_out} ± standard "
        "error. Margin: log-likelihood over the best wrong digit. "
        "Mixed up: another needle's number."
    )
    settings = (f"N={score.needles} R={score.asked}#" for score in one.settings)
    columns = ("checkpoint", *settings, "margin, nats#", "mixed up#")
    return Table(
        "Needles: accuracy by how many there are (N) and are asked (R)", columns, tuple(rows), note
    )


def _by_depth(results: Mapping[str, Result]) -> Table:
    rows = [
        (name, str(length), *(f"{by[length, depth]:.2f}" for depth in DEPTHS))
        for name, result in results.items()
        for by in [_accuracy_by_place(result)]
        for length in result.lengths
    ]
    columns = ("checkpoint", "tokens#", *(f"{depth:.0%}#" for depth in DEPTHS))
    return Table("Needles: accuracy by depth of the needle", columns, tuple(rows))


def _accuracy_by_place(result: Result) -> dict[tuple[int | None, float | None], float]:
    """Return the accuracy at each length and depth, over all settings."""
    cells: dict[tuple[int | None, float | None], list[Score]] = defaultdict(list)
    for cell in result.cells:
        cells[cell.length, cell.depth].append(cell)
    return {
        place: math.fsum(cell.accuracy * cell.questions for cell in some)
        / sum(cell.questions for cell in some)
        for place, some in cells.items()
    }


def _attention_table(results: Mapping[str, Result]) -> list[Table]:
    rows = [
        (name, label, *(f"{getattr(part, key):.3f}" for part in result.attention))
        for name, result in results.items()
        if result.attention
        for key, label in (
            ("answer", "answer"),
            ("noise", "noise"),
            ("question", "question"),
            ("first", "first token"),
        )
    ]
    notes = [f"{name}: {result.no_attention}" for name, result in results.items()]
    note = (
        "Of the last query before the number, mean over heads and layers, "
        f"{SETTINGS[-1][0]} needles. Pairs of differential heads: |a₁ − σ(λ)a₂|, normalised. "
    )
    columns = ("checkpoint", "attention to", *(f"{depth:.0%}#" for depth in DEPTHS))
    note += " ".join(x for x in notes if not x.endswith(": "))
    return (
        [Table("Needles: attention by depth of the needle", columns, tuple(rows), note.strip())]
        if rows
        else []
    )


def _with_error(value: float, stderr: float | None) -> str:
    return f"{value:.2f}" + ("" if stderr is None else f" ± {stderr:.2f}")
