"""The architectures that a checkpoint can be converted to: one file each, found by its name.

A target `x` is `x.py`, what `convert` does, and `modeling_x.py`, the code that ships with the
weights. `x.py` has CLASS_PREFIX, TITLE, IMPORTS, MIXIN, CONFIG_BODY for the generated classes, an
`Options` model, the pure functions `refusal`, `exactness`, `configure` and `rewrite`, and
CONFIG_KEYS, what `configure` puts under the target's name.
"""

import importlib
from pathlib import Path
from types import ModuleType

from difftool.errors import UserError, did_you_mean


def target_names() -> tuple[str, ...]:
    """Return the targets there are, without importing them.

    Their order is that of the names and mixins where a model has several.
    """
    shipped = Path(__file__).parent.glob("modeling_*.py")
    return tuple(sorted((path.stem.removeprefix("modeling_") for path in shipped), reverse=True))


def load_target(name: str) -> ModuleType:
    """Import the target called `name`; a UserError says which there are."""
    if name not in target_names():
        raise UserError(
            f"unknown target {name!r}",
            f"one of {', '.join(target_names())}",
            did_you_mean(name, target_names()).strip(),
        )
    return importlib.import_module(f"{__name__}.{name}")


def modeling_file(name: str) -> Path:
    """Return the path of the code that ships with the weights of target `name`."""
    return Path(__file__).parent / f"modeling_{name}.py"
