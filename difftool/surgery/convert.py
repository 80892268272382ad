"""Convert a checkpoint to a target: open, plan, stream, verify, record, publish."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from difftool.checkpoint import Computed, fingerprint, open_checkpoint, require_weights
from difftool.folder import new_folder
from difftool.header import torch_dtype
from difftool.provenance import (
    SourceRecord,
    Step,
    read_provenance,
    versions,
    write_provenance,
)
from difftool.shards import Way, plan_shards, write_shards
from difftool.sources import Source, open_source
from difftool.surgery.card import write_card
from difftool.surgery.host import read_host
from difftool.surgery.loading import load_tokenizer
from difftool.surgery.package import carry_files, keep_tokenizer_class, write_code, write_config
from difftool.surgery.plan import Plan, parse_options, plan_conversion
from difftool.surgery.verify import Comparison, verify
from difftool.transfer import explain_write_errors

Report = Callable[[str, int, int], None]  # what is done, how much of it, of how much
SMALL = 2 * 10**9  # bytes in float32 up to which a model is verified in float32 as well


@dataclass(frozen=True)
class ConvertOptions:
    """Options of `convert`; the command line's have the same names.

    Attributes:
        to: name of the target.
        settings: the target's options (`--set key=value`).
        dtype: of the floating weights ("float32", …); None keeps each tensor's own.
        shard_size: bytes per shard; None keeps the source's files.
        link: hard-link files that do not change instead of copying them.
        verify: load the result back and compare it with the source.
        force: replace an existing output.
        max_memory: bytes that weights may take while verifying.
        trust_remote_code: run the source's own tokenizer code while verifying.
        allow_network: whether a hub id may be fetched.
        command: what the model card names as the way it was made.
    """

    to: str
    settings: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    shard_size: int | None = None
    link: bool = False
    verify: bool = True
    force: bool = False
    max_memory: int | None = None
    trust_remote_code: bool = False
    allow_network: bool = True
    command: str = "difftool.surgery.convert.convert"


@dataclass(frozen=True)
class Converted:
    """What `convert` made."""

    path: Path
    source: SourceRecord
    plan: Plan
    ways: dict[str, Way]
    comparisons: list[Comparison]
    seconds: float


DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def plan_source(source: Source, options: ConvertOptions) -> Plan:
    """Decide a conversion from headers, or from config and index alone; writes nothing."""
    settings = parse_options(options.to, options.settings)
    checkpoint = open_checkpoint(source.path)
    dtype = DTYPES[options.dtype] if options.dtype else None
    return plan_conversion(checkpoint, read_host(checkpoint), options.to, settings, dtype=dtype)


def default_output(source: Source, target: str) -> Path:
    """Return the folder that a conversion makes unless told otherwise."""
    return Path(f"{source.name}-{target}")


def convert(
    source: str,
    out: Path | None,
    options: ConvertOptions,
    *,
    report: Report = lambda what, done, total: None,
) -> Converted:
    """Convert `source` into the new folder `out`, which appears only when all is done and proved.

    Args:
        source: what `open_source` understands.
        out: the new folder; None for `<name>-<target>` in the current one.
        options: see `ConvertOptions`.
        report: called as the work goes on.

    Raises:
        UserError: a source that cannot be converted, a fault in it, or a failed verification.
    """
    with open_source(source, dtype=options.dtype, allow_network=options.allow_network) as opened:
        plan = plan_source(opened, options)
        require_weights(plan.source)
        target = out or default_output(opened, options.to)
        with new_folder(target, force=options.force, sources=(opened.path,)) as folder:
            made = _write(folder, opened, plan, options, report)
    return replace(made, path=target)


def _write(
    folder: Path, source: Source, plan: Plan, options: ConvertOptions, report: Report
) -> Converted:
    started = time.perf_counter()
    record = SourceRecord(
        id=source.id, revision=source.revision, fingerprint=fingerprint(plan.source)
    )
    chain = read_provenance(source.path)
    needed = sum(output.nbytes for output in plan.outputs.values())
    with explain_write_errors(folder, needed):
        carry_files(source.path, folder)
        write_config(folder, plan.config)
        write_code(folder, plan.shim, plan.targets)
    tokenizer = load_tokenizer(source.path, options.trust_remote_code)
    if tokenizer is not None:
        with explain_write_errors(folder, needed):
            keep_tokenizer_class(folder, tokenizer)
    ways = _write_weights(folder, plan, options, report)
    comparisons = _verify(source.path, folder, plan, tokenizer, options, report)
    seconds = time.perf_counter() - started
    step = Step(
        stage="convert",
        options={"to": plan.target, **plan.options.model_dump(), "dtype": options.dtype},
        source=record,
        output_fingerprint=fingerprint(open_checkpoint(folder)),
        versions=versions(),
        seconds=round(seconds, 3),
        metrics={
            "exactness": plan.exactness,
            "verification": [comparison.as_dict() for comparison in comparisons],
        },
    )
    with explain_write_errors(folder, needed):
        write_card(folder, plan, record, options.command, comparisons)
        write_provenance(folder, chain.model_copy(update={"steps": (*chain.steps, step)}))
    return Converted(folder, record, plan, ways, comparisons, seconds)


def _write_weights(
    folder: Path, plan: Plan, options: ConvertOptions, report: Report
) -> dict[str, Way]:
    shards = plan_shards(
        plan.outputs,
        plan.source,
        shard_of=_new_shard(plan, options),
        shard_size=options.shard_size,
    )
    total, done = sum(file.nbytes for file in shards.files), 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        report("writing", done, total)

    return write_shards(
        folder, shards, how="link" if options.link else "reflink", progress=progress
    )


def _new_shard(plan: Plan, options: ConvertOptions) -> dict[str, str]:
    """Put new tensors into a file of their own where that leaves the source's files unchanged."""
    changed = [
        name
        for name, output in plan.outputs.items()
        if name in plan.source.tensors and isinstance(output, Computed)
    ]
    new = [name for name in plan.outputs if name not in plan.source.tensors]
    if changed or not new or not (plan.source.index or options.link):
        return {}
    if plan.source.index:
        return dict.fromkeys(new, f"model-{plan.target}.safetensors")
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    return dict.fromkeys(plan.source.tensors, first) | dict.fromkeys(new, second)


def _verify(
    source: Path,
    folder: Path,
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase | None,
    options: ConvertOptions,
    report: Report,
) -> list[Comparison]:
    if not options.verify:
        return []
    report("verifying", 0, 1)
    own = torch_dtype(DTYPES[options.dtype] if options.dtype else plan.host.dtype)
    parameters = sum(output.nbytes for output in plan.outputs.values()) / own.itemsize
    cast = own != torch_dtype(plan.host.dtype)  # what rounding took away, float32 would show
    alone = own == torch.float32 or cast or parameters * 4 > SMALL
    dtypes = (own,) if alone else (own, torch.float32)
    comparisons = verify(
        source, folder, plan.exactness, dtypes, tokenizer, max_memory=options.max_memory
    )
    report("verifying", 1, 1)
    return comparisons
