"""Attention Residuals, grafted onto a transformers model. Needs torch and transformers only.

Every sublayer reads a mixture over depth instead of the plain sum (arXiv 2603.15031, section 3):

    h_l = sum_i w_i s_i ,   w = exp(z) / mean(exp z) ,   z_i = q_l . RMSNorm(s_i)

s_0 is the embedding, then one source per completed block of sublayers, then the running block. This
is the paper's softmax mixture times the number of sources: with q = 0 every weight is exactly 1, so
the read is the host's own stream. The host keeps adding up its stream H; the sources are the
differences of H between block boundaries, and a reader of the stream (a pre-norm, or the sublayer
itself in post-norm hosts) sees  H + sum_i (w_i - 1) s_i , computed in float32.

In bfloat16 a source is therefore what its block really added to H, after H's own rounding.
Difftool writes this file beside the weights.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel as HostModel
else:
    HostModel = object  # a mixin, in front of the host's own class


EPSILON = 1e-6  # of the RMSNorm on the sources


class Source(NamedTuple):
    """One source: its value [..., D] in float32 and the reciprocal of its RMS [..., 1]."""

    value: torch.Tensor
    inverse_rms: torch.Tensor


class DepthStream:
    """The sources of one forward pass, by block, so that a recomputed layer finds its own past.

    Lives outside the modules: two threads may run one model, and torch.export may trace it.
    """

    def __init__(self) -> None:
        self.boundaries: dict[int, torch.Tensor] = {}  # H where block n begins
        self.sources: dict[int, Source] = {}  # 0: the embedding, n: the sum of block n - 1

    def read_sources(self, sublayer: int, block_size: int, stream: torch.Tensor) -> list[Source]:
        """Return what sublayer number `sublayer` attends to, when the host's stream is `stream`."""
        block, offset = divmod(sublayer, block_size)
        if offset == 0:
            closed = (
                stream.float() - self.boundaries[block - 1].float() if block else stream.float()
            )
            self.boundaries[block] = stream
            self.sources[block] = _source(closed)
        sources = [self.sources[i] for i in range(block + 1)]
        if offset > 0:
            sources.append(_source(stream.float() - self.boundaries[block].float()))
        return sources


def _source(value: torch.Tensor) -> Source:
    return Source(value, torch.rsqrt(value.square().mean(-1, keepdim=True) + EPSILON))


def read_weights(sources: list[Source], query: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Return exp(z)/mean(exp z), [sources, ..., 1] in float32; `query` and `gain` are [D]."""
    direction = (query.float() * gain.float()).unsqueeze(-1)  # [D, 1]
    logits = torch.stack([s.value @ direction * s.inverse_rms for s in sources])
    exponentials = (logits - logits.amax(0)).exp()
    return exponentials / exponentials.mean(0)


def mix(hidden_states: torch.Tensor, sources: list[Source], weights: torch.Tensor) -> torch.Tensor:
    """Return H + sum_i (w_i - 1) s_i in the dtype of H."""
    correction = torch.zeros_like(sources[0].value)
    for source, weight in zip(sources, weights - 1, strict=True):
        correction = torch.addcmul(correction, source.value, weight)
    return hidden_states + correction.to(hidden_states.dtype)


PREFIXES = ("self_attention_res", "mlp_res")  # the first and the second read of a layer


class _Running(threading.local):
    """The forward passes under way, one list per thread, there before a tracer looks for it."""

    def __init__(self) -> None:
        self.streams: list[DepthStream] = []


_running = _Running()


def _streams() -> list[DepthStream]:
    return _running.streams


def _begin_forward(body: nn.Module, args: tuple[Any, ...]) -> None:
    _streams().append(DepthStream())


def _end_forward(body: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    _streams().pop()


class DepthNorm(nn.Module):
    """Holds the learnable gain [D] of the RMSNorm on the sources of one read."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))


class DepthQuery(nn.Module):
    """Holds the pseudo-query [1, D] of one read; zero is the plain residual stream."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))


class DepthRead:
    """Forward pre-hook of a module that reads the stream: replaces it by the mixture over depth."""

    def __init__(self, owner: nn.Module, prefix: str, sublayer: int, block_size: int) -> None:
        self.owner, self.prefix = owner, prefix
        self.sublayer, self.block_size = sublayer, block_size

    def __call__(
        self, reader: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self.read(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.read(kwargs["hidden_states"])}

    def read(self, hidden_states: torch.Tensor) -> torch.Tensor:
        sources = _streams()[-1].read_sources(self.sublayer, self.block_size, hidden_states)
        query = getattr(self.owner, f"{self.prefix}_proj").weight[0]
        gain = getattr(self.owner, f"{self.prefix}_norm").weight
        return mix(hidden_states, sources, read_weights(sources, query, gain))


def _graft_read(
    owner: nn.Module, readers: list[str], prefix: str, sublayer: int, config: Any
) -> None:
    setattr(owner, f"{prefix}_norm", DepthNorm(config.hidden_size))
    setattr(owner, f"{prefix}_proj", DepthQuery(config.hidden_size))
    read = DepthRead(owner, prefix, sublayer, config.attnres["block_size"])
    for reader in readers:
        owner.get_submodule(reader).register_forward_pre_hook(read, with_kwargs=True)


def _init_weights(host: Callable[[nn.Module], None], module: nn.Module) -> None:
    """Start what a checkpoint lacks as the plain stream; the rest is the host's to start."""
    if isinstance(module, DepthQuery):
        nn.init.zeros_(module.weight)
    elif isinstance(module, DepthNorm):
        nn.init.ones_(module.weight)
    else:
        host(module)


def graft(body: Any, config: Any) -> None:
    """Add the reads to a base model: `config.attnres` says where its stream is read."""
    plan = config.attnres
    body._init_weights = partial(_init_weights, body._init_weights)
    body.register_forward_pre_hook(_begin_forward)
    body.register_forward_hook(_end_forward, always_call=True)
    sublayer = 0
    for layer in body.get_submodule(plan["layers"]):
        for prefix, readers in zip(PREFIXES, plan["readers"], strict=False):
            _graft_read(layer, readers, prefix, sublayer, config)
            sublayer += 1
    _graft_read(body, [plan["final_norm"]], "output_attn_res", sublayer, config)


def _carry_stream(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Let a layer that is recomputed in the backward pass find the stream it first ran with."""

    def carried(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stream = _streams()[-1]

        def with_stream(*inputs: Any, **named: Any) -> Any:
            _streams().append(stream)
            try:
                return function(*inputs, **named)
            finally:
                _streams().pop()

        return checkpoint(with_stream, *args, **kwargs)

    return carried


class AttnResMixin(HostModel):
    """A model class whose readers of the stream attend over depth.

    Reads `config.attnres`: {"block_size": sublayers in a block, "layers": path of the decoder
    layers, "readers": per sublayer of a layer the modules that read the stream, "final_norm": path
    of the last reader}.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        body: Any = self.base_model
        if body is self or not isinstance(body, AttnResMixin):  # else AutoModel grafted it already
            graft(body, config)

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        checkpoint = kwargs.get("gradient_checkpointing_func")
        if checkpoint is not None:
            if getattr(checkpoint, "keywords", {}).get("use_reentrant"):
                raise ValueError(
                    "Attention Residuals need use_reentrant=False: a reentrant checkpoint passes "
                    "no gradient to the sources, which a layer reads besides its own input."
                )
            kwargs["gradient_checkpointing_func"] = _carry_stream(checkpoint)
        super()._set_gradient_checkpointing(*args, **kwargs)
