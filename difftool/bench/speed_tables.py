"""The tables of the measure of speed."""

from collections.abc import Mapping

from difftool.bench.result import Table
from difftool.bench.speed_result import CellResult, Result, Spread
from difftool.bench.summary import MISSING, format_number


def tables(results: Mapping[str, Result]) -> list[Table]:
    """Return every timed cell of every checkpoint, then how they were timed and their memory."""
    return [_times(results), _memory(results)]


def _times(results: Mapping[str, Result]) -> Table:
    cells = dict.fromkeys(cell.cell for result in results.values() for cell in result.cells)
    rows = [
        (str(cell), name, *_row(found))
        for cell in cells
        for name, result in results.items()
        for found in result.cells
        if found.cell == cell
    ]
    one = next(iter(results.values()))
    skipped = [f"{name}: {why}" for name, result in results.items() for why in result.skipped]
    note = (
        f"Medians of {one.repetitions} repetitions in turns, smallest to largest in brackets; × is "
        f"the median of the ratios to the first checkpoint in the same repetition. {one.steps} "
        "tokens decoded after each prompt."
    )
    figures = ("first token, ms", "prefill, tokens/s", "decode, tokens/s")
    columns = [column for figure in figures for column in (f"{figure}#", "×#")]
    left_out = f" Left out: {'; '.join(skipped)}." if skipped else ""
    return Table("Speed", ("batch × context", "checkpoint", *columns), tuple(rows), note + left_out)


def _row(cell: CellResult) -> tuple[str, ...]:
    return tuple(
        text for found in (cell.ttft_ms, cell.prefill, cell.decode) for text in _spread(found)
    )


def _spread(found: Spread) -> tuple[str, str]:
    low, median, high = (format_number(x, 3) for x in (found.low, found.median, found.high))
    ratio = MISSING if found.ratio is None else f"{found.ratio:.3f}"
    return f"{median} ({low}–{high})", ratio


def _memory(results: Mapping[str, Result]) -> Table:
    rows = [
        (
            name,
            f"{result.parameters:,}",
            format_number(result.weight_bytes / 1e6, 4),
            format_number(result.start_rss / 1e6, 4),
            format_number(max(cell.peak_rss for cell in result.cells) / 1e6, 4),
            _gpu(result),
            format_number(result.shown.kv_bytes_per_token, 6),
            ", ".join(map(_in_words, result.kernels)) or result.attention,
        )
        for name, result in results.items()
    ]
    one = next(iter(results.values()))
    compiled = ", torch.compile" if one.compiled else ""
    note = (
        "Peak memory is that of a process of the checkpoint's own; before loading it holds Python "
        f"and torch. {one.dtype} on {one.device}, {one.threads} threads{compiled}."
    )
    columns = ("checkpoint", "parameters#", "weights, MB#", "before loading, MB#", "peak RSS, MB#")
    return Table(
        "Memory", (*columns, "peak GPU, MB#", "KV bytes/token#", "attention"), tuple(rows), note
    )


def _gpu(result: Result) -> str:
    peaks = [cell.peak_gpu for cell in result.cells if cell.peak_gpu is not None]
    return format_number(max(peaks) / 1e6, 4) if peaks else MISSING


def _in_words(operator: str) -> str:
    """Return an operator's name for people: "aten::_flash_attention" is "flash attention"."""
    return operator.partition("::")[2].replace("_", " ").strip()
