"""The text that is measured on, as windows of tokens that begin as the tokenizer begins a text."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from difftool.errors import UserError


@dataclass(frozen=True)
class Window:
    """Tokens [T] of which the last `scored` are asked for; the ones before are their context."""

    tokens: torch.Tensor
    scored: int


def read_text(path: Path | None) -> str:
    """Return the text in `path`, or the held-out text that ships with difftool.

    Raises:
        UserError: no such file, not UTF-8, or empty.
    """
    if path is None:
        return (files("difftool") / "assets" / "heldout.txt").read_text(encoding="utf-8")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the text {path} cannot be read: {error}", "a UTF-8 text file") from error
    if not text.strip():
        raise UserError(f"the text {path} is empty")
    return text


def text_name(path: Path | None) -> str:
    """Return what a report calls the text."""
    return path.name if path else "heldout.txt"


def encode(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return what the tokenizer puts before a text (a BOS, or nothing) and the text's own ids."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    marked = tokenizer("a", verbose=False)["input_ids"]
    bare = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    return marked[: _find(bare, marked)], ids


def _find(part: list[int], whole: list[int]) -> int:
    """Return where `part` begins in `whole`, 0 if nowhere."""
    places = range(len(whole) - len(part) + 1)
    return next((i for i in places if whole[i : i + len(part)] == part), 0)


def cut_windows(start: list[int], ids: list[int], seq_len: int, stride: int) -> Iterator[Window]:
    """Yield windows of at most `seq_len` tokens, each `stride` tokens further into the text.

    Every window begins with `start`. Each token of the text is scored once, with as much context
    as its window has; without a `start` the first token of all has none and is not scored. The last
    window may be short.
    """
    room = seq_len - len(start)
    done = 0 if start else 1  # tokens of the text that were scored, or cannot be
    for begin in range(0, len(ids), min(stride, room)):
        end = min(begin + room, len(ids))
        if end > done:
            yield Window(torch.tensor([*start, *ids[begin:end]]), end - done)
        done = end
        if end == len(ids):
            return


def whole_windows(start: list[int], ids: list[int], seq_len: int) -> torch.Tensor:
    """Return the text as rows [N, seq_len] that each begin with `start`; the rest is left out.

    Raises:
        UserError: the text is shorter than one row.
    """
    room = seq_len - len(start)
    rows = len(ids) // room
    if rows == 0:
        raise UserError(
            f"the text has {len(ids)} tokens, less than one window of {seq_len}",
            fix="Give a longer --text or a smaller --seq-len",
        )
    body = torch.tensor(ids[: rows * room]).view(rows, room)
    return torch.cat([torch.tensor(start, dtype=body.dtype).expand(rows, -1), body], dim=1)
