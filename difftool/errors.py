"""The one exception that a user's mistake raises: what was found, what was expected, what to do."""

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path


class UserError(Exception):
    """A mistake that the user can mend; printed without a traceback, exit status 1.

    Args:
        found: what difftool met, one sentence without its full stop.
        expected: what it needed instead, after the word "Expected"; or a sentence of its own.
        fix: what to do next.
    """

    def __init__(self, found: str, expected: str = "", fix: str = "") -> None:
        self.found, self.expected, self.fix = found, expected, fix
        wanted = (
            f"Expected {expected}" if expected[:1].islower() or expected[:1].isdigit() else expected
        )
        sentences = [
            part if part[-1] in ".?!" else f"{part}." for part in (found, wanted, fix) if part
        ]
        super().__init__(" ".join(sentences))


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest choice, or an empty string."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


def suggest_sibling(path: Path) -> str:
    """Return ``" Did you mean '…'?"`` for what lies beside the missing ``path``, or nothing."""
    parent = Path(os.path.expanduser(path.parent))
    return did_you_mean(path.name, os.listdir(parent)) if os.path.isdir(parent) else ""


def name_some(names: Sequence[str]) -> str:
    """Return up to three of the names, and how many more there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
