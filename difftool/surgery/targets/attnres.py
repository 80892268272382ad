"""Attention Residuals, Full or Block: every sublayer reads a softmax mixture over depth.

Start: zero queries, so that every weight is exactly one and the read is the residual stream itself.
No tensor of the source changes; a query and a gain per read are added. Source: arXiv 2603.15031.
"""

from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from difftool.checkpoint import Checkpoint, Computed, Copied, Output
from difftool.errors import UserError
from difftool.header import torch_dtype
from difftool.surgery.host import Host
from difftool.surgery.targets.modeling_attnres import PREFIXES

CLASS_PREFIX = "AttnRes"
TITLE = "Attention Residuals"
IMPORTS = ("AttnResMixin",)
MIXIN = "AttnResMixin"
CONFIG_KEYS = ("block_size", "blocks", "layers", "readers", "final_norm")
CONFIG_BODY = ()


class Options(BaseModel):
    """Options of the attnres target.

    Attributes:
        blocks: number of blocks that the sublayers are divided into, or "full" for a source per
            sublayer. A block has ceil(sublayers / blocks) sublayers and the last may be shorter, so
            there can be fewer blocks than asked for. Unless asked for, there are 8, or a block per
            sublayer in a model of fewer.
        block_size: sublayers in a block, instead of `blocks`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    blocks: int | Literal["full"] = Field(8, union_mode="left_to_right")
    block_size: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.block_size is not None and "blocks" in self.model_fields_set:
            raise PydanticCustomError("both", "Either blocks or block_size, not both")
        return self


def refusal(host: Host) -> str | None:
    """Return why this model cannot read over depth, or None."""
    return None


def exactness(host: Host, options: Options, dtype: str | None = None) -> str:
    """Return how close the result must be: always to the bit."""
    return "bits"


def count_sublayers(host: Host) -> int:
    """Return the number of branches that add to the stream."""
    return host.geometry.layers * len(host.readers)


def find_block_size(host: Host, options: Options) -> int:
    """Return the sublayers in a block.

    Raises:
        UserError: fewer than one block, or more than there are sublayers.
    """
    sublayers = count_sublayers(host)
    if options.block_size is not None:
        wanted, found = options.block_size, f"block_size={options.block_size}"
    elif options.blocks == "full":
        return 1
    elif "blocks" in options.model_fields_set:
        wanted, found = options.blocks, f"blocks={options.blocks}"
    else:
        wanted, found = min(options.blocks, sublayers), "blocks"
    if not 1 <= wanted <= sublayers:
        raise UserError(
            f"{found} does not fit this model",
            f"1 to {sublayers}, its number of sublayers",
            f"Choose another, as with --set blocks={max(1, sublayers // 2)} or --set blocks=full",
        )
    return wanted if options.block_size is not None else -(-sublayers // wanted)


def configure(host: Host, options: Options) -> dict[str, Any]:
    """Return the config key that tells the modelling code where the stream is read."""
    size = find_block_size(host, options)
    return {
        "attnres": {
            "block_size": size,
            "blocks": -(-count_sublayers(host) // size),
            "layers": host.family.layers,
            "readers": [list(group) for group in host.readers],
            "final_norm": host.family.final_norm,
        }
    }


def rewrite(
    host: Host, options: Options, source: Checkpoint, dtype: str | None = None
) -> dict[str, Output]:
    """Return every tensor of the converted model: the source's copied, then the reads'."""
    outputs: dict[str, Output] = {
        name: Copied(info, source.path / info.file) for name, info in source.tensors.items()
    }
    for layer in range(host.geometry.layers):
        for prefix, _ in zip(PREFIXES, host.readers, strict=False):
            outputs |= _new_read(host, f"{host.layer_prefix}{layer}.{prefix}")
    return outputs | _new_read(host, f"{host.prefix}output_attn_res")


def _new_read(host: Host, name: str) -> dict[str, Output]:
    size, dtype = host.geometry.hidden_size, torch_dtype(host.dtype)
    return {
        f"{name}_norm.weight": Computed(host.dtype, (size,), lambda: torch.ones(size, dtype=dtype)),
        f"{name}_proj.weight": Computed(
            host.dtype, (1, size), lambda: torch.zeros(1, size, dtype=dtype)
        ),
    }
