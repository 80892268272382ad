"""The attention that can be looked at and changed: the model's own, in every family."""

import numpy as np
import pytest
import torch
from reference import activations as reference
from tiny_models import (
    TINY,
    assert_near,
    graft,
    logits_of,
    make_batch,
    make_model,
    randomise,
    skip_if_missing,
)
from transformers import BloomConfig, BloomForCausalLM, PreTrainedModel

from difftool.bench.attention import AttentionCall, observed_attention
from difftool.errors import UserError

# Both round to float32 in each of a few hundred operations, in another order.
ROUNDING = 2e-5
FAMILIES = [name for name, tiny in TINY.items() if name == tiny.family]
LAYOUTS = ["llama", "gemma2", "gemma3_text", "gpt_oss", "cohere2", "gpt2", "gpt_neox", "mistral"]


def observe(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    with observed_attention(model, see=calls.append):
        logits_of(model, ids, mask)
    return calls


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_in_the_open_says_what_it_says_with_its_eager_kernel(name: str) -> None:
    skip_if_missing(name)
    ids, mask = make_batch()
    model = make_model(name)
    kernel = model.config._attn_implementation
    before = logits_of(model, ids, mask)
    with observed_attention(model):
        observed = logits_of(model, ids, mask)
    assert model.config._attn_implementation == kernel
    assert torch.equal(logits_of(model, ids, mask), before)
    model.config._attn_implementation = "eager"
    eager = logits_of(model, ids, mask)
    assert_near(observed[mask.bool()], eager[mask.bool()], ROUNDING)


@pytest.mark.parametrize("targets", [("diffv2",), ("attnres",), ("diffv2", "attnres")])
def test_a_grafted_model_in_the_open_says_the_same(targets: tuple[str, ...]) -> None:
    ids, mask = make_batch()
    model = graft(make_model("llama"), *targets)
    randomise(model, seed=1)
    with observed_attention(model):
        observed = logits_of(model, ids, mask)
    assert_near(observed[mask.bool()], logits_of(model, ids, mask)[mask.bool()], ROUNDING)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_seen_is_what_the_formula_gives(name: str) -> None:
    """Padded rows that may look nowhere are free to hold anything."""
    ids, mask = make_batch()
    model = make_model(name)
    kernel = reference.Kernel()
    with reference.kernel_of(model, kernel):
        logits_of(model, ids, mask)
    calls = observe(model, ids, mask)
    assert [call.layer for call in calls] == list(kernel.logits)
    for call in calls:
        expected = np.stack(kernel.logits[call.layer])  # [B, H, T, S], NaN where forbidden
        allowed = call.allowed.expand_as(call.logits).numpy()
        assert np.array_equal(allowed, ~np.isnan(expected))
        rows = torch.from_numpy(allowed.any(-1))
        assert_near(call.logits[allowed], torch.from_numpy(expected[allowed]), ROUNDING)
        weights = torch.from_numpy(np.stack(kernel.weights[call.layer]))
        assert_near(call.weights[rows], weights[rows], ROUNDING)
        output = torch.from_numpy(np.stack(kernel.outputs[call.layer]))  # [B, H, T, D]
        assert_near(call.output.transpose(1, 2)[rows], output[rows], ROUNDING)


def test_learned_sinks_take_a_part_of_the_weights() -> None:
    ids, mask = make_batch(padding=0)
    totals = [call.weights.sum(-1) for call in observe(make_model("gpt_oss"), ids, mask)]
    assert all((total < 0.99).any() and (total < 1 + 1e-6).all() for total in totals)


def test_logits_can_be_changed() -> None:
    """Of equal logits a query's output is the mean of the values that it may look at."""
    ids, mask = make_batch(padding=0)
    model = make_model("llama-one-kv-head")
    calls: list[AttentionCall] = []
    values: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(lambda *args: values.append(args[-1]))
        for layer in model.model.layers
    ]
    with observed_attention(model, see=calls.append, change=lambda logits, _: 0 * logits):
        logits_of(model, ids, mask)
    for hook in hooks:
        hook.remove()
    for call, value in zip(calls, values, strict=True):
        assert not call.logits.any()
        counts = torch.arange(1, ids.shape[1] + 1)[:, None]
        means = (value.cumsum(1) / counts)[:, :, None].expand_as(call.output)
        assert_near(call.output, means, ROUNDING)


def test_the_kernel_comes_back_after_an_error_and_after_each_of_two() -> None:
    ids, mask = make_batch()
    model = make_model("llama")
    before = logits_of(model, ids, mask)
    with pytest.raises(RuntimeError, match="say"), observed_attention(model):
        raise RuntimeError("out of memory, say")
    assert model.config._attn_implementation == "sdpa"
    calls: list[AttentionCall] = []
    with observed_attention(model, see=calls.append):
        with observed_attention(model):
            logits_of(model, ids, mask)
        assert not calls
        logits_of(model, ids, mask)
        assert len(calls) == 3
    assert torch.equal(logits_of(model, ids, mask), before)


def test_a_model_with_an_attention_of_its_own_is_told() -> None:
    config = BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)
    model = BloomForCausalLM(config).eval()
    with pytest.raises(UserError, match="BloomForCausalLM"), observed_attention(model):
        model(torch.tensor([[1, 2, 3]]))
