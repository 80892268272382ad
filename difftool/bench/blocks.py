"""The decoder layers of a transformers model and the weights inside them that multiply a vector."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from difftool.errors import UserError

Linear = nn.Linear | Conv1D  # the latter is GPT-2's, with its weight transposed


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers, in order: the first list of modules that has as many.

    Raises:
        UserError: there is no such list.
    """
    count = int(model.config.get_text_config().num_hidden_layers)
    body: Any = model.base_model
    for module in body.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(
        f"no list of {count} decoder layers was found in {type(model).__name__}, so nothing inside "
        "it can be measured"
    )


def block_linears(model: PreTrainedModel) -> dict[str, Linear]:
    """Return the linear modules inside the decoder layers by "<layer>.<path in the layer>"."""
    return {
        f"{number}.{path}": module
        for number, layer in enumerate(decoder_layers(model))
        for path, module in layer.named_modules()
        if isinstance(module, Linear)
    }


def other_matrices(model: PreTrainedModel, linears: Mapping[str, Linear]) -> dict[str, int]:
    """Return the parameters of all matrices in the layers that are not weights of `linears`.

    They are counted by their path in a layer: experts fused into one tensor, routers, and the like.
    """
    covered = {id(weight) for linear in linears.values() for weight in linear.parameters()}
    counts: dict[str, int] = {}
    for layer in decoder_layers(model):
        for path, parameter in layer.named_parameters():
            if min((*parameter.shape, parameter.dim())) > 1 and id(parameter) not in covered:
                counts[path] = counts.get(path, 0) + parameter.numel()
    return counts
