"""Attention Residuals from the paper's formulas (arXiv 2603.15031, section 3), every source kept.

    b_0 = embedding ,  b_n = sum of the sublayer outputs f_j in block n
    z_i = q . (g * s_i / RMS(s_i)) ,  alpha = softmax(z) ,  read = n * sum_i alpha_i s_i

over the n sources [b_0 ... b_{n-1}, running partial sum]. The factor n makes the read of a zero
query the plain sum; the paper's own read is the same without it.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

Read = tuple[Tensor, Tensor]  # query [D], gain [D]
Sublayer = Callable[[Tensor], Tensor]  # what it reads -> what it adds, both [..., D]
Choice = Callable[[Sequence[Tensor], int], list[Tensor]]
EPSILON = 1e-6


def blocks(outputs: Sequence[Tensor], size: int) -> list[Tensor]:
    """The sources after `outputs`, the embedding first: whole blocks, then the running block."""
    embedding, *branches = outputs
    chunks = [branches[start : start + size] for start in range(0, len(branches), size)]
    return [embedding, *(torch.stack(chunk).sum(0) for chunk in chunks)]


def cumulative(outputs: Sequence[Tensor], size: int) -> list[Tensor]:
    """A wrong choice: the hidden states at the block boundaries, no partition of the sum."""
    sources = blocks(outputs, size)
    return [torch.stack(sources[: i + 1]).sum(0) for i in range(len(sources))]


def embedding_twice(outputs: Sequence[Tensor], size: int) -> list[Tensor]:
    """A wrong choice, the paper's figure 2 taken literally: block 1 starts at the embedding."""
    sources = blocks(outputs, size)
    return [sources[0], *(s + sources[0] if i == 0 else s for i, s in enumerate(sources[1:]))]


def read(sources: Sequence[Tensor], query: Tensor, gain: Tensor) -> Tensor:
    """The sum-preserving mixture over sources [..., D]."""
    scores = []
    for source in sources:
        rms = (source.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()
        scores.append((query * gain * source / rms).sum(-1, keepdim=True))
    exponentials = [(score - torch.stack(scores).amax(0).detach()).exp() for score in scores]
    total = torch.stack(exponentials).sum(0)
    mixture = torch.zeros_like(sources[0])
    for source, exponential in zip(sources, exponentials, strict=True):
        mixture = mixture + (exponential / total) * source
    return len(sources) * mixture


def stream_before_head(
    embedding: Tensor,
    sublayers: Sequence[Sublayer],
    reads: Sequence[Read],
    size: int,
    choose: Choice = blocks,
) -> Tensor:
    """What the final norm sees: one read per sublayer, and a last one."""
    outputs = [embedding]
    for sublayer, (query, gain) in zip(sublayers, reads[:-1], strict=True):
        outputs.append(sublayer(read(choose(outputs, size), query, gain)))
    return read(choose(outputs, size), *reads[-1])


def reads_of(
    state: Mapping[str, Tensor], layers: str, body: str, count: int, per_layer: int
) -> list[Read]:
    """Query and gain of every read, in order; `layers` and `body` are name prefixes."""
    names = [
        f"{layers}{layer}.{prefix}"
        for layer in range(count)
        for prefix in ("self_attention_res", "mlp_res")[:per_layer]
    ]
    names.append(f"{body}output_attn_res")
    return [(state[f"{n}_proj.weight"][0], state[f"{n}_norm.weight"]) for n in names]


# What a decoder layer of transformers adds to its stream: per sublayer a sum of chains of modules.
_PRE_NORM = ("input_layernorm self_attn", "post_attention_layernorm mlp")
_POST_NORM = ("self_attn post_attention_layernorm", "mlp post_feedforward_layernorm")
_SANDWICH = (
    "input_layernorm self_attn post_attention_layernorm",
    "pre_feedforward_layernorm mlp post_feedforward_layernorm",
)
_ONE_BRANCH = ("input_layernorm self_attn + input_layernorm mlp",)
SUBLAYERS: dict[str, tuple[str, ...]] = {
    "apertus": ("attention_layernorm self_attn", "feedforward_layernorm mlp"),
    "cohere": _ONE_BRANCH,
    "cohere2": _ONE_BRANCH,
    "exaone4": _POST_NORM,
    "gemma2": _SANDWICH,
    "gemma3_text": _SANDWICH,
    "glm4": (
        "input_layernorm self_attn post_self_attn_layernorm",
        "post_attention_layernorm mlp post_mlp_layernorm",
    ),
    "gpt2": ("ln_1 attn", "ln_2 mlp"),
    "gpt_neox": ("input_layernorm attention", "post_attention_layernorm mlp"),
    "gpt_neox parallel": ("input_layernorm attention + post_attention_layernorm mlp",),
    "granitemoe": ("input_layernorm self_attn", "post_attention_layernorm block_sparse_moe"),
    "granitemoeshared": (
        "input_layernorm self_attn",
        "post_attention_layernorm block_sparse_moe + post_attention_layernorm shared_mlp",
    ),
    "olmo2": _POST_NORM,
    "olmo3": _POST_NORM,
    "stablelm parallel": _ONE_BRANCH,
}


class Host:
    """A plain transformers base model taken apart: its embedding and its sublayers, for one batch.

    Masks and positions do not depend on the stream, so they are taken from one plain run.
    """

    def __init__(self, body: nn.Module, ids: Tensor, mask: Tensor) -> None:
        config = body.config
        parallel = getattr(config, "use_parallel_residual", False)
        self.branches = SUBLAYERS.get(
            f"{config.model_type}{' parallel' if parallel else ''}", _PRE_NORM
        )
        self.layers = body.h if config.model_type == "gpt2" else body.layers
        names = ("norm", "final_layer_norm", "ln_f")
        self.final_norm = next(getattr(body, name) for name in names if hasattr(body, name))
        self.seen: dict[nn.Module, dict[str, object]] = {}
        self.embedding = torch.empty(0)
        handles = [self.layers[0].register_forward_pre_hook(self._keep_embedding, with_kwargs=True)]
        for module in body.modules():
            if type(module).__name__.endswith("Attention"):
                hook = module.register_forward_pre_hook(self._keep_arguments, with_kwargs=True)
                handles.append(hook)
        body(ids, attention_mask=mask, use_cache=False)
        for handle in handles:
            handle.remove()

    def _keep_embedding(self, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        self.embedding = args[0] if args else kwargs["hidden_states"]

    def _keep_arguments(self, attention: nn.Module, args: tuple, kwargs: dict) -> None:
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        self.seen[attention] = rest

    def _call(self, module: nn.Module, x: Tensor) -> Tensor:
        output = module(x, **self.seen.get(module, {}))
        return output[0] if isinstance(output, tuple) else output

    def _sublayer(self, layer: nn.Module, branch: str) -> Sublayer:
        def run(stream: Tensor) -> Tensor:
            total = torch.zeros_like(stream)
            for chain in branch.split(" + "):
                x = stream
                for name in chain.split():
                    x = self._call(layer.get_submodule(name), x)
                total = total + x
            return total * getattr(layer, "residual_multiplier", 1.0)

        return run

    def sublayers(self) -> list[Sublayer]:
        return [self._sublayer(layer, branch) for layer in self.layers for branch in self.branches]

    def last_hidden_state(
        self, reads: Sequence[Read], size: int, choose: Choice = blocks
    ) -> Tensor:
        return self.final_norm(
            stream_before_head(self.embedding, self.sublayers(), reads, size, choose)
        )
