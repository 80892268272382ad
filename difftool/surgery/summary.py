"""A plan in a few lines: what is added, changed and removed, gathered over the layers."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from difftool.checkpoint import Computed, Output, TensorInfo
from difftool.surgery.plan import Plan


@dataclass(frozen=True)
class Change:
    """Tensors of one name pattern that all change alike; `nbytes` of what is written for them."""

    what: Literal["add", "change", "remove"]
    pattern: str
    count: int
    shapes: str
    nbytes: int


@dataclass(frozen=True)
class Summary:
    """The changes, the untouched tensors and the bytes of all weights before and after."""

    target: str
    architecture: str
    exactness: str
    changes: tuple[Change, ...]
    untouched: int
    bytes_before: int
    bytes_after: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(plan: Plan) -> Summary:
    """Gather a plan's changes by tensor pattern."""
    source, outputs = plan.source.tensors, plan.outputs
    added = [name for name in outputs if name not in source]
    changed = [n for n, out in outputs.items() if n in source and isinstance(out, Computed)]
    removed = [name for name in source if name not in outputs]
    changes = (
        *_gather("add", added, source, outputs),
        *_gather("change", changed, source, outputs),
        *_gather("remove", removed, source, outputs),
    )
    known = sum(tensor.nbytes for tensor in source.values())
    before = known
    if not plan.source.complete and plan.source.index:
        before = _stated_size(plan.source.index) or known
    growth = sum(output.nbytes for output in outputs.values()) - known
    names = len(plan.source.names) or len(source)
    return Summary(
        target=plan.target,
        architecture=plan.shim.architecture,
        exactness=plan.exactness,
        changes=changes,
        untouched=names - len(changed) - len(removed),
        bytes_before=before,
        bytes_after=before + growth,
    )


def _stated_size(index: dict[str, Any]) -> int | None:
    metadata = index.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return int(size) if isinstance(size, int | float) else None


def _gather(
    what: Literal["add", "change", "remove"],
    names: Iterable[str],
    source: dict[str, TensorInfo],
    outputs: dict[str, Output],
) -> list[Change]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        before, after = source.get(name), outputs.get(name)
        shapes = [tensor.shape for tensor in (before, after) if tensor is not None]
        key = re.sub(r"(?<=\.)\d+(?=\.)", "*", name), _describe(shapes)
        groups.setdefault(key, []).append(name)
    return [
        Change(
            what,
            pattern,
            len(members),
            shapes,
            sum(outputs[name].nbytes for name in members if name in outputs),
        )
        for (pattern, shapes), members in groups.items()
    ]


def _describe(shapes: list[tuple[int, ...]]) -> str:
    """Say a shape, or what becomes of it axis by axis: 4096→8192×4096."""
    axes = (dict.fromkeys(axis) for axis in zip(*shapes, strict=True))
    return "×".join("→".join(map(str, sizes)) for sizes in axes)
