"""Runs `difftool` inside the test's process, and looks at what it said and left behind."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from difftool.cli import main


@dataclass(frozen=True)
class Ran:
    """How a command ended and what it printed."""

    status: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """Stderr as one line, without the frame that a usage error stands in."""
        return re.sub(r"[│╭╮╰╯─\s]+", " ", self.err).strip()


@dataclass(frozen=True)
class Runner:
    """Call it with the words that follow `difftool`."""

    capture: pytest.CaptureFixture[str]

    def __call__(self, *words: object) -> Ran:
        self.capture.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        assert isinstance(end.value.code, int)
        return Ran(end.value.code, *self.capture.readouterr())

    def succeed(self, *words: object) -> str:
        """Run a command that must do its work in silence; return its stdout."""
        ran = self(*words)
        assert (ran.status, ran.err) == (0, ""), ran
        return ran.out


def contents(folder: Path) -> dict[str, bytes | None]:
    """Return every file below a folder with its bytes, and every folder with None."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON object; `...` removes one."""
    values = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    kept = {key: value for key, value in values.items() if value is not ...}
    path.write_text(json.dumps(kept), encoding="utf-8")


def write_tokenizer(folder: Path, words: int) -> None:
    """Save a tokenizer that knows the words w3, w4, … beside a model's weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
