"""Tiny random models as subjects of a bench, and a text for them."""

from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCABULARY
from transformers import PreTrainedModel

from difftool.bench.options import BenchOptions
from difftool.bench.subject import Subject, TorchModel

TEXT = "".join(chr(33 + (7 * i * i + 3 * i) % 90) for i in range(400))


class LetterTokenizer:
    """A token a letter; `start` is what it puts before a text."""

    def __init__(self, *start: int) -> None:
        self.start = list(start)

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        ids = [3 + ord(letter) % (VOCABULARY - 3) for letter in text]
        return {"input_ids": self.start + ids if add_special_tokens else ids}


def subject_of(model: PreTrainedModel, *start: int) -> Subject:
    """Return a subject that runs this model; its texts begin with the tokens `start`."""
    return Subject(
        name="tiny",
        id="tiny",
        folder=Path(),
        family=model.config.model_type,
        targets=(),
        model=TorchModel(model),
        tokenizer=LetterTokenizer(*start),
    )


def options_for(folder: Path, **changes: Any) -> BenchOptions:
    """Return options for a few short windows of TEXT, which is written into `folder`."""
    text = folder / "letters.txt"
    text.write_text(TEXT)
    few: dict[str, Any] = {"limit": 3, "seq_len": 12, "batch_size": 2}
    return BenchOptions(measures=(), text=text, **{**few, **changes})


def windows_of(count: int, seq_len: int, *start: int) -> torch.Tensor:
    """Return the token ids [count, seq_len] that a measure gets to see."""
    ids = LetterTokenizer()(TEXT)["input_ids"]
    room = seq_len - len(start)
    rows = [[*start, *ids[room * row : room * (row + 1)]] for row in range(count)]
    return torch.tensor(rows)


def silent(what: str, done: int, total: int) -> None:
    """Report no progress."""
