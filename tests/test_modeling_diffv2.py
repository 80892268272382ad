"""The shipped differential attention: exact at the start, the paper's formula everywhere else."""

import copy
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import diffv2 as reference
from tiny_models import (
    TINY,
    assert_near,
    backward,
    export,
    graft,
    greedy,
    logits_of,
    make_batch,
    make_config,
    make_model,
    project,
    randomise,
    skip_if_missing,
    stepwise_logits,
)
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from difftool.surgery.families import FAMILIES
from difftool.surgery.targets.modeling_diffv2 import DifferentialOutput, tensor_parallel_plan

# Both sides round to float32 at each operation (1.2e-7); a few hundred of them in a row, and the
# cancellation of the subtraction, leave 1e-5 of the largest value with room for a factor of two.
ROUNDING = 2e-5

ALLOWED = [name for name, tiny in TINY.items() if FAMILIES[tiny.family].no_diffv2 is None]
LLAMAS = [
    "llama",
    "llama-full-multi-head",
    "llama-one-kv-head",
    "llama-wide-heads-and-biases",
    "llama-narrow-heads",
    "llama-tied",
]


@functools.cache
def source_of(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return make_model(name, dtype=dtype)


def build_random(name: str, **options: Any) -> PreTrainedModel:
    """A grafted model far from its start: all its weights, lambda's too, are random."""
    skip_if_missing(name)
    model = graft(source_of(name), "diffv2", **options)
    randomise(model, seed=1)
    return model


random_model = functools.cache(build_random)  # shared, never changed


def test_every_family_that_allows_diffv2_has_a_tiny_model() -> None:
    expected = {name for name, family in FAMILIES.items() if family.no_diffv2 is None}
    assert {TINY[name].family for name in ALLOWED} == expected


# -- the exact start


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ALLOWED)
def test_the_start_equals_the_source_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    skip_if_missing(name)
    source = copy.deepcopy(source_of(name, dtype))  # dynamic rope remembers the longest sequence
    model = graft(source, "diffv2")
    ids, mask = make_batch()
    expected = logits_of(source, ids, mask)[mask.bool()]
    actual = logits_of(model, ids, mask)[mask.bool()]
    if dtype == torch.float32:
        assert torch.equal(greedy(model, ids, mask), greedy(source, ids, mask))
    if FAMILIES[TINY[name].family].exact == "bits":
        assert torch.equal(actual, expected)
    else:  # one norm over twice as many heads adds in another order
        assert_near(actual, expected, ROUNDING if dtype == torch.float32 else 0.02)


def test_one_small_lambda_weight_is_seen() -> None:
    ids, mask = make_batch()
    model = graft(source_of("llama"), "diffv2")
    with torch.no_grad():
        model.model.layers[1].self_attn.differential.lambda_proj.weight[2, 3] = 1e-3
    changed = logits_of(model, ids, mask)[mask.bool()]
    assert not torch.equal(changed, logits_of(source_of("llama"), ids, mask)[mask.bool()])


@pytest.mark.parametrize("gate", [0.1, 0.5, 0.75])
def test_any_start_gate_gives_the_source_to_rounding(gate: float) -> None:
    ids, mask = make_batch()
    model = graft(source_of("llama-wide-heads-and-biases"), "diffv2", start_gate=gate)
    expected = logits_of(source_of("llama-wide-heads-and-biases"), ids, mask)
    assert_near(logits_of(model, ids, mask)[mask.bool()], expected[mask.bool()], ROUNDING)


def test_hidden_states_of_the_start_are_those_of_the_source() -> None:
    ids, mask = make_batch()
    source, model = source_of("gemma3_text"), graft(source_of("gemma3_text"), "diffv2")
    with torch.no_grad():
        expected = source(ids, attention_mask=mask, output_hidden_states=True).hidden_states
        actual = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    assert len(actual) == len(expected) == source.config.num_hidden_layers + 1
    assert all(
        torch.equal(a[mask.bool()], e[mask.bool()]) for a, e in zip(actual, expected, strict=True)
    )


@pytest.mark.parametrize("gate", [None, 0.25])
def test_every_new_parameter_has_a_live_gradient_at_the_start(gate: float | None) -> None:
    ids, mask = make_batch()
    model = graft(source_of("llama"), "diffv2", start_gate=gate)
    gradients = backward(model, model(ids, attention_mask=mask).logits, mask)
    head_dim = model.config.head_dim
    for layer in range(model.config.num_hidden_layers):
        attention = f"model.layers.{layer}.self_attn."
        gates = [n for n in gradients if n.startswith(f"{attention}differential.lambda_proj")]
        assert len(gates) == (1 if gate is None else 2)
        for name in gates:
            per_head = gradients[name].flatten(1) if "weight" in name else gradients[name][:, None]
            assert (per_head.abs().amax(1) > 1e-6).all(), name
        first, second = (
            gradients[f"{attention}q_proj.weight"].unflatten(0, (-1, 2, head_dim)).unbind(1)
        )
        assert (second.abs().amax((1, 2)) > 1e-6).all()
        assert_near(second, -(gate or 0.5) * first, ROUNDING, attention)  # y = a1 - gate * a2


# -- random weights against the reference


def reference_logits(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor,
    pairing: reference.Pairing = reference.neighbours,
) -> tuple[Tensor, dict[str, Tensor]]:
    state = {n: t.detach().double().requires_grad_() for n, t in model.state_dict().items()}
    rows = [
        reference.Llama(state, model.config, reference.causal_mask(row_mask), pairing).logits(row)
        for row, row_mask in zip(ids, mask, strict=True)
    ]
    return torch.stack(rows), state


@pytest.mark.parametrize(
    ("name", "gate"), [*((name, None) for name in LLAMAS), ("llama", 0.25), (LLAMAS[3], 0.25)]
)
def test_random_weights_equal_the_reference_in_logits_and_gradients(
    name: str, gate: float | None
) -> None:
    ids, mask = make_batch()
    model = build_random(name, start_gate=gate)
    logits = model(ids, attention_mask=mask).logits
    expected, state = reference_logits(model, ids, mask)
    assert_near(logits[mask.bool()], expected[mask.bool()], ROUNDING)
    gradients = backward(model, logits, mask)
    project(expected, mask).backward()
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for parameter, gradient in gradients.items():
        assert gradient.abs().max() > 0, parameter
        assert_near(gradient, state[parameter].grad, 5 * ROUNDING, parameter)  # one pass more


@pytest.mark.parametrize("name", ["llama", "llama-full-multi-head"])
def test_pairs_of_different_groups_are_told_apart(name: str) -> None:
    ids, mask = make_batch()
    model = random_model(name)
    wrong, _ = reference_logits(model, ids, mask, reference.halves)
    actual = logits_of(model, ids, mask).double()
    error = (actual - wrong)[mask.bool()].norm() / actual[mask.bool()].norm()
    assert error > 0.3


# -- the attention of every family

Recorded = list[dict[str, Any]]
_records: Recorded = []


def _record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any
):
    """Attention implementation "recorded": the host's own eager one, keeping what it was given."""
    host = sys.modules[
        next(c for c in type(module).__mro__ if c.__name__.endswith("Attention")).__module__
    ]
    output = host.eager_attention_forward(module, query, key, value, mask, **options)
    _records.append(
        {"module": module, "query": query, "key": key, "value": value, "mask": mask, **options}
    )
    return output


AttentionInterface.register("recorded", _record)
AttentionMaskInterface.register("recorded", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


@contextmanager
def seen_by(attentions: list[nn.Module]) -> Iterator[dict[nn.Module, dict[str, Tensor]]]:
    """What each attention's query projection read, and what the attention returned."""
    seen: dict[nn.Module, dict[str, Tensor]] = {attention: {} for attention in attentions}
    handles = []
    for attention in attentions:
        projection = getattr(attention, "q_proj", None) or attention.qkv_proj

        def keep_input(
            _: nn.Module, args: tuple[Tensor, ...], attention: nn.Module = attention
        ) -> None:
            seen[attention]["input"] = args[0]

        def keep_output(attention: nn.Module, _: Any, output: Any) -> None:
            seen[attention]["output"] = output[0] if isinstance(output, tuple) else output

        handles.append(projection.register_forward_pre_hook(keep_input))
        handles.append(attention.register_forward_hook(keep_output))
    yield seen
    for handle in handles:
        handle.remove()


def reference_attention(
    record: dict[str, Any], x: Tensor, row: int, pairing: reference.Pairing
) -> Tensor:
    """[T, D] of one sequence from the recorded query, key, value and mask of a host's attention."""
    differential = {n: p.double() for n, p in record["module"].differential.state_dict().items()}
    sinks = record.get("s_aux")
    heads = reference.heads_of_attention(
        record["query"][row].double(),
        record["key"][row].double(),
        record["value"][row].double(),
        record["mask"][row, 0].double(),
        scaling=record["scaling"],
        softcap=record.get("softcap"),
        sinks=None if sinks is None else sinks.double(),
    )
    y = reference.subtract(
        heads,
        x[row].double(),
        differential["lambda_proj.weight"],
        differential.get("lambda_proj.bias"),
        pairing,
    )
    return reference.linear(differential, "o_proj", y)


@pytest.mark.parametrize("name", ALLOWED)
@torch.no_grad()
def test_each_attention_equals_the_reference_on_its_own_heads(name: str) -> None:
    ids, mask = make_batch()
    model = build_random(name, _attn_implementation="recorded")
    _records.clear()
    with seen_by([layer.self_attn for layer in model.base_model.layers]) as seen:
        model(ids, attention_mask=mask, use_cache=False)
    assert len(_records) == model.config.num_hidden_layers
    row, first = 0, int((mask[0] == 0).sum())  # the padded sequence, from its first real token
    for record in _records:
        assert record["query"].shape[1] == 2 * source_of(name).config.num_attention_heads
        x, output = seen[record["module"]]["input"], seen[record["module"]]["output"]
        expected = reference_attention(record, x, row, reference.neighbours)[first:]
        assert_near(output[row, first:], expected, ROUNDING)
        wrong = reference_attention(record, x, row, reference.halves)[first:]
        assert (wrong - expected).norm() > 0.3 * expected.norm()


# -- what a user does with such a model


@pytest.mark.parametrize("name", [name for name in ALLOWED if TINY[name].prefix_stable])
def test_cached_decoding_matches_the_full_forward(name: str) -> None:
    ids, mask = make_batch()
    model = random_model(name)
    full = logits_of(model, ids, mask)[mask.bool()]
    assert_near(stepwise_logits(model, ids, mask, prefill=13)[mask.bool()], full, ROUNDING)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "exaone4", "starcoder2"])
def test_eager_and_sdpa_attention_agree(name: str) -> None:
    ids, mask = make_batch()
    model = build_random(name)
    results = []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        results.append(logits_of(model, ids, mask)[mask.bool()])
    assert_near(results[0], results[1], ROUNDING)


def test_attentions_are_those_of_all_heads() -> None:
    ids, mask = make_batch()
    model = build_random("llama", _attn_implementation="eager")
    with torch.no_grad():
        output = model(ids, attention_mask=mask, output_attentions=True)
    assert len(output.attentions) == model.config.num_hidden_layers
    for weights in output.attentions:
        assert weights.shape == (2, model.config.num_attention_heads, ids.shape[1], ids.shape[1])
        assert_near(weights[1].sum(-1), torch.ones(weights[1].shape[:-1]), ROUNDING)
    assert torch.equal(output.logits, logits_of(model, ids, mask))


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    ids, mask = make_batch()
    model = build_random("llama").train()
    expected = backward(model, model(ids, attention_mask=mask).logits, mask)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        actual = backward(model, model(ids, attention_mask=mask, use_cache=False).logits, mask)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_compiles_as_one_graph_to_the_same_numbers() -> None:
    ids, mask = make_batch()
    model = graft(make_model("llama", num_hidden_layers=1), "diffv2")
    randomise(model, seed=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    actual = logits_of(compiled, ids, mask, use_cache=False)
    assert_near(actual[mask.bool()], logits_of(model, ids, mask)[mask.bool()], ROUNDING)


def test_exports_with_dynamic_batch_and_length() -> None:
    model = graft(make_model("llama", num_hidden_layers=1), "diffv2")
    randomise(model, seed=1)
    exported = export(model)
    for batch, length in ((2, 20), (3, 11)):
        ids, mask = make_batch(batch=batch, length=length, padding=2)
        actual = exported(input_ids=ids, attention_mask=mask, use_cache=False).logits
        assert_near(actual[mask.bool()], logits_of(model, ids, mask)[mask.bool()], ROUNDING)


def test_a_copy_is_independent() -> None:
    ids, mask = make_batch()
    model = build_random("llama")
    before = logits_of(model, ids, mask)
    twin = copy.deepcopy(model)
    assert torch.equal(logits_of(twin, ids, mask), before)
    randomise(twin, seed=2)
    assert not torch.equal(logits_of(twin, ids, mask), before)
    assert torch.equal(logits_of(model, ids, mask), before)


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_oss", "mixtral", "phimoe"])
def test_saved_and_loaded_again_it_is_the_same_model(name: str, tmp_path: Path) -> None:
    ids, mask = make_batch()
    model = random_model(name)
    model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits_of(again.eval(), ids, mask), logits_of(model, ids, mask))


@pytest.mark.parametrize("mapping", [MODEL_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING])
def test_other_heads_start_as_their_source(mapping: Any) -> None:
    ids, mask = make_batch()
    config = make_config("llama", num_labels=3)
    source = mapping[type(config)](config).eval()
    randomise(source)
    model = graft(source, "diffv2")
    with torch.no_grad():
        expected, actual = (m(ids, attention_mask=mask)[0] for m in (source, model))
    if mapping is MODEL_MAPPING:
        expected, actual = expected[mask.bool()], actual[mask.bool()]
    assert torch.equal(actual, expected)


def test_heads_of_several_widths_are_subtracted_in_place() -> None:
    """The module by itself: [..., 2h * d] in, pairs next to each other, any leading axes."""
    module = DifferentialOutput(48, 3, 4, bias=True, lambda_bias=True)
    randomise(module)
    hidden, heads = torch.randn(2, 5, 7, 48), torch.randn(2, 5, 7, 24)
    pieces = heads.split(4, -1)
    gates = module.lambda_proj(hidden).sigmoid()
    rows = [pieces[2 * i] - gates[..., i : i + 1] * pieces[2 * i + 1] for i in range(3)]
    torch.testing.assert_close(module(hidden, heads), module.o_proj(torch.cat(rows, -1)))


def test_tensor_parallel_plan_moves_the_output_projection() -> None:
    plan = tensor_parallel_plan(
        {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}
    )
    assert plan == {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.differential.lambda_proj": "colwise",
        "layers.*.self_attn.differential.o_proj": "rowwise",
    }
    assert tensor_parallel_plan(None) is None
