"""Slow and obvious: likelihoods of whole sequences, and attention as transformers reports it."""

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def sequence_log_likelihood(model: PreTrainedModel, ids: list[int]) -> float:
    """Return log p of all tokens but the first, in the model's dtype, which should be float64."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    return sum(
        logits[place - 1].log_softmax(-1)[token].item() for place, token in enumerate(ids) if place
    )


@torch.no_grad()
def attention_by_part(
    model: PreTrainedModel, ids: list[int], answer: range, haystack_end: int, *, pairs: bool
) -> dict[str, float]:
    """Return the last query's attention to each part, over heads and layers one at a time.

    The maps are those of transformers' own eager attention; of a model of `pairs` of heads the gate
    is computed from the normed stream that the layer's attention reads.
    """
    model.config._attn_implementation = "eager"
    output = model(
        torch.tensor([ids]), output_attentions=True, output_hidden_states=True, use_cache=False
    )
    parts = {"answer": 0.0, "noise": 0.0, "question": 0.0, "first": 0.0}
    count = 0
    for number, layer in enumerate(model.base_model.layers):
        maps = output.attentions[number][0, :, -1]  # [H, T]
        if pairs:
            x = layer.input_layernorm(output.hidden_states[number])[0, -1]
            gate = torch.sigmoid(layer.self_attn.differential.lambda_proj(x))
            maps = [maps[2 * i] - gate[i] * maps[2 * i + 1] for i in range(len(gate))]
        for row in maps:
            count += 1
            size = [abs(weight) for weight in row.tolist()]
            for place, weight in enumerate(size):
                part = "question" if place >= haystack_end else "noise"
                part = "answer" if place in answer else part
                parts["first" if place == 0 else part] += weight / sum(size)
    return {name: total / count for name, total in parts.items()}
