"""Keep lm-evaluation-harness quiet and its templates harmless for as long as a context lasts."""

import io
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any


class _Kept(logging.Handler):
    """Keeps the harness's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def quiet(show: Callable[[int, int], None] = lambda done, total: None) -> Iterator[list[str]]:
    """Keep the harness out of stdout, stderr and the log; yield what it warned of.

    Its bars have no switch that reaches all of them, so tqdm itself is changed for as long as the
    context lasts; `show` gets what the bars of running requests would have drawn.
    """
    from tqdm import tqdm

    def begin(bar: Any, *args: Any, **kwargs: Any) -> None:
        original(bar, *args, **{**kwargs, "disable": True})
        bar.shown = str(kwargs.get("desc")).startswith("Running")

    def update(bar: Any, n: float | None = 1) -> None:
        bar.n += n or 0
        if bar.shown:
            show(int(bar.n), int(bar.total or 1))

    original, kept = tqdm.__init__, _Kept()
    harness, datasets = logging.getLogger("lm_eval"), logging.getLogger("datasets")
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(io.StringIO()))
        for target, name, value in (
            (tqdm, "__init__", begin),
            (tqdm, "update", update),
            (harness, "propagate", False),
            (harness, "handlers", [kept]),
            (datasets, "propagate", False),
            (datasets, "handlers", [logging.NullHandler()]),
        ):
            stack.enter_context(_set(target, name, value))
        stack.enter_context(_one_process())
        yield kept.messages


@contextmanager
def sandboxed_templates(trusted: bool) -> Iterator[None]:
    """Keep the templates of tasks from Python's insides, unless they are trusted.

    The harness renders them in an environment in which an expression can reach any function.
    """
    import lm_eval.utils
    from jinja2.sandbox import SandboxedEnvironment

    usual = lm_eval.utils.env
    safe = SandboxedEnvironment(
        undefined=usual.undefined, keep_trailing_newline=usual.keep_trailing_newline
    )
    safe.filters |= usual.filters
    with _set(lm_eval.utils, "env", usual if trusted else safe):
        yield


@contextmanager
def _one_process() -> Iterator[None]:
    """Have standard errors computed here: the harness would fork a process for every core."""
    name = "DISABLE_MULTIPROC"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def _set(target: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)
