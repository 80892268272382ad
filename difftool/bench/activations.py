"""Watch a model run and keep statistics of what flows through it, for the measure of outliers.

The residual stream is read from the decoder layers, the input of linears from the linears, and the
attention from its kernel, written out in the open. Of a model with Attention Residuals the stream
is the host's plain sum; the mixtures that its sublayers read instead differ by the depth weights.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from difftool.bench.attention import AttentionCall, observed_attention
from difftool.bench.blocks import block_linears, decoder_layers
from difftool.bench.result import Progress
from difftool.bench.statistics import (
    ColumnStatistics,
    Statistics,
    describe,
    describe_columns,
    merge_all,
)
from difftool.surgery.targets import modeling_attnres
from difftool.surgery.targets.modeling_attnres import PREFIXES, DepthRead, read_weights

READS = dict(zip(PREFIXES, ("attention", "mlp"), strict=True))
SQRT_2 = 2**0.5

Kept = TypeVar("Kept", Statistics, ColumnStatistics)


@dataclass
class Activations:
    """Statistics by layer; of linears by "<layer>.<path>", of reads by "<layer>.<what reads>".

    Attributes:
        stream: the residual stream, by how many layers it has passed.
        linears: what goes into each.
        logits: of the attention, where the mask allows to look.
        first: weight that later queries give to the first token; a column per head.
        context: of each query the context RMS sqrt(sum of squared weights), which is the RMS of its
            output if values are independent and of RMS 1; a column per head.
        gates: sigmoid(lambda); a column per pair of heads, as in the next three.
        cosines: between the outputs of the two heads of a pair.
        difference_first: of the absolute weight in a row of the pair's map a_1 - gate * a_2, the
            share of the first token: W_o may scale the map at will.
        difference_context: context RMS of the pair's map.
        depth: alpha of a read over depth; a column per source, the embedding first.
    """

    stream: dict[int, Statistics] = field(default_factory=dict)
    linears: dict[str, Statistics] = field(default_factory=dict)
    logits: dict[int, Statistics] = field(default_factory=dict)
    first: dict[int, ColumnStatistics] = field(default_factory=dict)
    context: dict[int, ColumnStatistics] = field(default_factory=dict)
    gates: dict[int, ColumnStatistics] = field(default_factory=dict)
    cosines: dict[int, ColumnStatistics] = field(default_factory=dict)
    difference_first: dict[int, ColumnStatistics] = field(default_factory=dict)
    difference_context: dict[int, ColumnStatistics] = field(default_factory=dict)
    depth: dict[str, ColumnStatistics] = field(default_factory=dict)


@torch.no_grad()
def observe(
    model: PreTrainedModel, windows: torch.Tensor, batch_size: int, progress: Progress
) -> Activations:
    """Run token ids [N, T] through the decoder and return what was seen, free of padding.

    Raises:
        UserError: the model's attention cannot be observed.
    """
    body: Any = model.base_model
    with watched(model) as found:
        for begin in range(0, len(windows), batch_size):
            progress("outliers", begin, len(windows))
            tokens = windows[begin : begin + batch_size].to(model.device)
            body(tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    progress("outliers", len(windows), len(windows))
    return found


@contextmanager
def watched(model: PreTrainedModel) -> Iterator[Activations]:
    """Yield statistics that grow with every forward pass until the context ends."""
    watch = _Watch()
    with ExitStack() as stack:
        for handle in watch.register(model):
            stack.callback(handle.remove)
        stack.enter_context(observed_attention(model, see=watch.see_attention))
        yield watch.found


def _keep(kept: dict[Any, Kept], key: int | str, new: Kept) -> None:
    kept[key] = kept[key].merge(new) if key in kept else new


class _Watch:
    """Hooks, and what they have to remember from one to the next within a layer."""

    def __init__(self) -> None:
        self.found = Activations()
        self.input: tuple[torch.Tensor, Statistics] | None = None  # q, k and v share theirs
        self.call: AttentionCall | None = None

    def register(self, model: PreTrainedModel) -> Iterator[RemovableHandle]:
        """Yield every hook as it is set."""
        layers = decoder_layers(model)
        yield layers[0].register_forward_pre_hook(self._see_embedding, with_kwargs=True)
        for number, layer in enumerate(layers):
            yield layer.register_forward_hook(partial(self._see_stream, number + 1))
        for name, linear in block_linears(model).items():
            yield linear.register_forward_pre_hook(partial(self._see_input, name))
            if name.endswith(".lambda_proj"):
                layer_number = int(name.partition(".")[0])
                yield linear.register_forward_hook(partial(self._see_gate, layer_number))
        for name, reader, read in _depth_reads(model):
            see = partial(self._see_depth, name, read)
            yield reader.register_forward_pre_hook(see, prepend=True, with_kwargs=True)

    def _see_embedding(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        _keep(self.found.stream, 0, describe(_stream(args, kwargs)))

    def _see_stream(self, passed: int, layer: nn.Module, args: Any, output: Any) -> None:
        stream = output[0] if isinstance(output, tuple) else output
        _keep(self.found.stream, passed, describe(stream))

    def _see_input(self, name: str, linear: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if self.input is None or self.input[0] is not args[0]:
            self.input = (args[0], describe(args[0]))
        _keep(self.found.linears, name, self.input[1])

    def see_attention(self, call: AttentionCall) -> None:
        """Take in one layer's attention."""
        self.call = call
        found, layer = self.found, call.layer
        _keep(found.logits, layer, merge_all(_allowed_logits(call)))
        _keep(found.first, layer, _first_token(call.weights[..., 0], call.allowed))
        _keep(found.context, layer, _context_rms(call.weights))

    def _see_gate(
        self, layer: int, lambda_proj: nn.Module, args: Any, output: torch.Tensor
    ) -> None:
        """Take in sigmoid(lambda) [B, T, h], and the pairs of the attention that ran before it."""
        call, found = self.call, self.found
        assert call is not None and call.layer == layer
        gate = output.float().sigmoid()
        _keep(found.gates, layer, describe_columns(gate, (0, 1)))
        one, two = (call.output[:, :, half::2].float() for half in (0, 1))  # [B, T, h, d]
        cosine = F.cosine_similarity(one, two, dim=-1)
        _keep(found.cosines, layer, describe_columns(cosine, (-1, 1)))
        subtracted = call.weights[:, 1::2] * gate.transpose(1, 2).unsqueeze(-1)
        weights = call.weights[:, 0::2] - subtracted  # [B, h, T, S]
        absolute = weights.abs()
        share = absolute[..., 0] / absolute.sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
        _keep(found.difference_first, layer, _first_token(share, call.allowed))
        _keep(found.difference_context, layer, _context_rms(weights))

    def _see_depth(
        self,
        name: str,
        read: DepthRead,
        reader: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        streams = modeling_attnres._streams()
        stream = _stream(args, kwargs)
        sources = streams[-1].read_sources(read.sublayer, read.block_size, stream)
        query = getattr(read.owner, f"{read.prefix}_proj").weight[0]
        gain = getattr(read.owner, f"{read.prefix}_norm").weight
        weights = read_weights(sources, query, gain)  # [sources, B, T, 1]
        alpha = weights.squeeze(-1).movedim(0, -1).double() / len(sources)
        _keep(self.found.depth, name, describe_columns(alpha, (0, 1)))


def _allowed_logits(call: AttentionCall) -> Iterator[Statistics]:
    """Describe each sequence's logits where its mask allows to look."""
    for logits, allowed in zip(call.logits, call.allowed, strict=True):
        places = allowed.flatten().nonzero().squeeze(-1)
        yield describe(logits.flatten(1).index_select(1, places))  # [H, places]


def _stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    stream: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return stream


def _first_token(weights: torch.Tensor, allowed: torch.Tensor) -> ColumnStatistics:
    """Describe what queries give the first token, [B, H, T], of those after it that may look."""
    may_look = allowed[:, 0, 1:, 0]  # [B, T - 1]
    return describe_columns(weights[..., 1:].transpose(1, 2)[may_look], (0, 1))


def _context_rms(weights: torch.Tensor) -> ColumnStatistics:
    """Describe the context RMS of maps [B, H, T, S]; differences of two reach sqrt(2)."""
    return describe_columns(weights.square().sum(-1).sqrt().transpose(1, 2), (0, SQRT_2))


def _depth_reads(model: PreTrainedModel) -> list[tuple[str, nn.Module, DepthRead]]:
    """Return each read over depth once, with its name and a module that reads it."""
    numbers = {id(layer): number for number, layer in enumerate(decoder_layers(model))}
    reads: dict[str, tuple[str, nn.Module, DepthRead]] = {}
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, DepthRead):
                number = numbers.get(id(hook.owner))
                name = "output" if number is None else f"{number}.{READS[hook.prefix]}"
                reads.setdefault(name, (name, module, hook))
    return list(reads.values())
