"""What a checkpoint is: architecture, geometry, parameters by part, provenance, targets."""

import re
from collections import defaultdict
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from difftool.checkpoint import open_checkpoint
from difftool.provenance import Provenance, Step, read_provenance
from difftool.sources import open_source
from difftool.surgery.host import Host, read_host
from difftool.surgery.plan import find_refusal, imply_tensors
from difftool.surgery.targets import target_names

PARTS = (  # the first pattern that a tensor's name matches decides its part
    ("lambda projection", r"\.lambda_proj\."),
    ("depth queries", r"_res_(proj|norm)\."),
    ("embedding", r"(embed_tokens|embed_in|wte|wpe)\."),
    ("head", r"^(lm_head|embed_out|score)\."),
    ("norms", r"(norm|ln_\w+|layernorm)\w*\."),
    ("experts", r"\.(experts|block_sparse_moe)\."),
    ("attention", r"\.(self_attn|attn|attention)\."),
    ("MLP", r"\.(mlp|shared_mlp|feed_forward)\."),
)


@dataclass(frozen=True)
class Part:
    """Parameters and bytes of one part of the model; packed weights count their stored elements."""

    name: str
    parameters: int
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """What `inspect_source` found; `targets` gives None, or why a target cannot be had."""

    id: str
    host: Host
    parts: tuple[Part, ...]
    complete: bool
    targets: dict[str, str | None]
    provenance: Provenance

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "architecture": self.host.config.get("architectures") or [self.host.architecture],
            "family": self.host.model_type,
            "grafted": self.host.targets,
            "geometry": asdict(self.host.geometry),
            "dtype": self.host.dtype,
            "complete": self.complete,
            "parts": [asdict(part) for part in self.parts],
            "targets": self.targets,
            "provenance": self.provenance.model_dump(mode="json"),
        }

    @property
    def heading(self) -> str:
        named = (self.host.config.get("architectures") or [self.host.architecture])[0]
        grafted = f", {' and '.join(self.host.targets)}" if self.host.targets else ""
        missing = "" if self.complete else "; no weights beside it, sizes from config.json"
        if not self.complete and "quantization_config" in self.host.config:
            missing += ", packed experts counted unpacked"
        return f"{self.id}: {named} ({self.host.model_type}{grafted}), {self.host.dtype}{missing}"

    @property
    def geometry_in_words(self) -> str:
        """The sizes in one line, with what the targets made of them."""
        g = self.host.geometry
        words = f"{g.layers} layers, hidden {g.hidden_size}, {g.heads} query heads over "
        words += f"{g.kv_heads} KV heads of {g.head_dim}"
        if "diffv2" in self.host.targets:
            words += f"; {g.heads // 2} differential pairs"
        if "attnres" in self.host.targets:
            attnres = self.host.config["attnres"]
            blocks, size = attnres["blocks"], attnres["block_size"]
            words += f"; {blocks} block{'s' * (blocks > 1)} of {size} sublayer{'s' * (size > 1)}"
        return words

    @property
    def provenance_in_words(self) -> list[str]:
        """One line per step that made the checkpoint, and one per dtype it was verified in."""
        return [line for step in self.provenance.steps for line in describe_step(step)]


def inspect_source(source: str) -> Inspection:
    """Read config and headers of what `source` names, and its provenance.

    Raises:
        UserError: no such source, or one of no family that difftool knows.
    """
    with open_source(source) as opened:
        checkpoint = open_checkpoint(opened.path)
        host = read_host(checkpoint)
        tensors = (checkpoint if checkpoint.complete else imply_tensors(checkpoint, host)).tensors
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for name, info in tensors.items():
            part = next((part for part, pattern in PARTS if re.search(pattern, name)), "other")
            sums[part][0] += prod(info.shape)
            sums[part][1] += info.nbytes
        total = [sum(column) for column in zip(*sums.values(), strict=True)]
        parts = [Part(name, *counts) for name, counts in sums.items()]
        return Inspection(
            id=opened.id,
            host=host,
            parts=(*parts, Part("total", *total)),
            complete=checkpoint.complete,
            targets={target: find_refusal(host, target) for target in target_names()},
            provenance=read_provenance(opened.path),
        )


def describe_step(step: Step) -> list[str]:
    """Return a line on how a step was made and one per dtype it was verified in."""
    options = ", ".join(
        f"{key}={value}" for key, value in step.options.items() if value is not None
    )
    line = f"made by {step.stage} ({options}) from {step.source.id}"
    proofs = step.metrics.get("verification") or []
    verdicts = [f"  verified in {proof['dtype']}: {proof['verdict']}" for proof in proofs]
    return [line, *verdicts] if verdicts else [f"{line}, not verified"]
