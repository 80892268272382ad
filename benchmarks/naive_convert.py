"""Convert a Llama to diffv2 without difftool: load it, change the weights in memory, save it.

What anyone would write first, for `bench_convert.py` to compare with. Config and code are left out.
"""

import sys

import torch
from transformers import AutoModelForCausalLM


def main(source: str, out: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    heads = model.config.num_attention_heads
    for layer in model.model.layers:
        attention = layer.self_attn
        rows = attention.q_proj.weight.data.unflatten(0, (heads, -1))
        doubled = rows.repeat_interleave(2, dim=0).flatten(0, 1)
        attention.q_proj.weight = torch.nn.Parameter(doubled)
        attention.o_proj.weight.data *= 2
        gate = torch.zeros(heads, model.config.hidden_size, dtype=doubled.dtype)
        attention.lambda_proj = torch.nn.Linear(gate.shape[1], heads, bias=False)
        attention.lambda_proj.weight = torch.nn.Parameter(gate)
    model.save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
