"""Outliers: streaming statistics against whole arrays, on random models that have every part."""

import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_subject import options_for, silent, subject_of, windows_of
from reference import activations as reference
from reference import attnres as depth_reference
from reference import diffv2 as llama_reference
from tiny_models import graft, make_model, randomise, skip_if_missing
from transformers import PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM

from difftool.bench import statistics
from difftool.bench.activations import watched
from difftool.bench.blocks import decoder_layers
from difftool.bench.charts.outliers import charts
from difftool.bench.measures import outliers
from difftool.bench.measures.outliers import Result
from difftool.bench.options import BenchOptions
from difftool.bench.outlier_result import RANKS, SHARES, SINK, Magnitudes
from difftool.bench.statistics import describe, describe_columns, merge_all, quantile
from difftool.bench.subject import open_subject
from difftool.bench.summary import format_number
from difftool.errors import UserError

ROUNDING = 2e-5  # float32, a few hundred operations in another order
IN_HISTOGRAM = 1 / 256 + 1e-6  # half a bin
LAYOUTS = [
    "llama-wide-heads-and-biases",
    "gemma2",
    "gpt_oss",
    "gpt2",
    "cohere2",
    "gpt_neox",
    "qwen2_moe",
    "olmo2",
]


# -- statistics


def awkward_numbers() -> np.ndarray:
    """Heavy tails, far from zero, some of them equal, some zero."""
    generator = np.random.default_rng(0)
    numbers = generator.standard_t(3, 5_000).astype(np.float32) + 4
    numbers[::17], numbers[::23] = 0, 5
    return numbers


@pytest.mark.parametrize("sizes", [(5000,), (1, 4999), (120, 3, 7, 4870), (50, 50, 4900)])
def test_parts_merge_into_the_statistics_of_the_whole(sizes: tuple[int, ...]) -> None:
    numbers = awkward_numbers()
    parts = np.split(numbers, list(itertools.accumulate(sizes))[:-1])
    found = merge_all(describe(torch.from_numpy(part)) for part in parts)
    assert found.moments.count == 5000
    assert found.moments.kurtosis == pytest.approx(reference.kurtosis(numbers), rel=1e-9)
    for rank in RANKS:
        assert found.top(rank) == reference.largest(numbers, rank)
    assert found.median == pytest.approx(reference.median(numbers), rel=IN_HISTOGRAM)


def test_a_tensor_is_described_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "CHUNK", 64)
    numbers = awkward_numbers()
    found = describe(torch.from_numpy(numbers).view(50, 100).T)  # not contiguous
    assert found.moments.kurtosis == pytest.approx(reference.kurtosis(numbers), rel=1e-9)
    assert [found.top(rank) for rank in RANKS] == [reference.largest(numbers, r) for r in RANKS]


def test_kurtosis_is_stable_far_from_zero() -> None:
    """Sums of plain fourth powers would lose all digits: 1e6 to the fourth is 1e24."""
    numbers = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).double() + 1e6
    found = merge_all(describe(part) for part in numbers.split(700))
    assert found.moments.kurtosis == pytest.approx(reference.kurtosis(numbers.numpy()), rel=1e-7)
    assert found.moments.kurtosis == pytest.approx(3, abs=0.15)  # normal


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 777.0, 1e30])
@pytest.mark.parametrize("count", [1, 2, 999, 1000])
def test_the_median_is_right_at_every_scale(count: int, scale: float) -> None:
    numbers = scale * torch.randn(count, generator=torch.Generator().manual_seed(1))
    expected = reference.median(numbers.numpy())
    assert describe(numbers).median == pytest.approx(expected, rel=IN_HISTOGRAM)


def test_statistics_at_the_edges() -> None:
    constant = describe(torch.full((5,), 2.0))
    assert math.isnan(constant.moments.kurtosis)
    assert constant.top(1) == constant.top(3) == 2 and math.isnan(constant.top(10))
    assert describe(torch.zeros(300)).median == 0
    infinite = describe(torch.tensor([1.0, -math.inf, 2.0]))
    assert infinite.top(1) == math.inf and math.isnan(infinite.moments.kurtosis)


@pytest.mark.parametrize("place", [0, 500, 2999])
def test_one_nan_among_thousands_is_not_lost(place: int) -> None:
    numbers = torch.arange(3000.0)
    numbers[place] = math.nan
    found = merge_all(describe(part) for part in numbers.split(1000))
    assert math.isnan(found.top(1)) and math.isnan(found.moments.kurtosis)
    assert found.top(2) == (2998 if place == 2999 else 2999)
    columns = describe_columns(numbers.view(1000, 3) / 3000, (0, 1))
    assert columns.means.isnan().tolist() == [place % 3 == column for column in range(3)]
    assert math.isnan(quantile([columns], 0.5))


def test_columns_merge_into_the_statistics_of_the_whole() -> None:
    numbers = np.random.default_rng(0).beta(0.5, 2, (3, 700, 4)) * 2 - 1
    parts = [describe_columns(torch.from_numpy(part), (-1, 1)) for part in numbers]
    whole = functools.reduce(statistics.ColumnStatistics.merge, parts)
    flat = numbers.reshape(-1, 4)
    np.testing.assert_allclose(whole.means, flat.mean(0), rtol=1e-12)
    np.testing.assert_allclose(whole.deviations, flat.std(0), rtol=1e-9)
    for share in SHARES:
        expected = np.quantile(flat, share, method="inverted_cdf")
        assert quantile(parts, share) == pytest.approx(expected, abs=1 / 4096)


# -- activations of random models


@functools.cache
def random_model(name: str, *targets: str) -> PreTrainedModel:
    """Attention that is sharp enough for some heads to be sinks, and not for others."""
    skip_if_missing(name)
    model = make_model(name)
    if targets:
        model = graft(model, *targets)
        randomise(model, seed=1)
    return model


def measured(model: PreTrainedModel, folder: Path, *start: int, **changes: object) -> Result:
    return outliers.measure(subject_of(model, *start), options_for(folder, **changes), silent)


def check_magnitudes(found: Magnitudes, values: np.ndarray) -> None:
    assert found.count == values.size
    assert found.kurtosis == pytest.approx(reference.kurtosis(values), rel=1e-3)
    expected = [reference.largest(values, rank) for rank in RANKS]
    assert found.top == pytest.approx(expected, rel=10 * ROUNDING)
    assert found.median == pytest.approx(reference.median(values), rel=IN_HISTOGRAM + 1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_model_is_described_as_its_collected_activations_are(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    found = measured(model, tmp_path, 1)
    expected = reference.collect(model, decoder_layers(model), windows_of(3, 12, 1))
    layers = model.config.num_hidden_layers
    assert len(found.stream) == len(expected.stream) == layers + 1
    for part, values in zip(found.stream, expected.stream, strict=True):
        check_magnitudes(part, values)
    check_magnitudes(found.hidden_states, np.stack(expected.stream[1:]))
    assert found.linears.keys() == expected.inputs.keys()
    for path, part in found.linears.items():
        check_magnitudes(part, expected.inputs[path])
    by_layer = [np.stack(expected.kernel.logits[layer]) for layer in range(layers)]
    allowed = [logits[~np.isnan(logits)] for logits in by_layer]
    for part, values in zip(found.logits.values(), allowed, strict=True):
        check_magnitudes(part, values)
    check_magnitudes(found.attention_logits, np.concatenate(allowed))
    check_maps(found, expected.kernel, layers)


def check_maps(found: Result, kernel: reference.Kernel, layers: int) -> None:
    """Sinks and context RMS from weights [H, T, S] of each window; logits are NaN where masked."""
    every = []
    for layer in range(layers):
        weights, logits = (np.stack(kept[layer]) for kept in (kernel.weights, kernel.logits))
        first, context = [], []
        for head in range(weights.shape[1]):
            may_look = ~np.isnan(logits[:, head, 1:, 0])
            first.append(weights[:, head, 1:, 0][may_look].mean())
            context.append(np.sqrt((weights[:, head] ** 2).sum(-1)).mean())
        np.testing.assert_allclose(found.sinks.first_token[layer], first, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(found.context_rms.means[layer], context, rtol=1e-4)
        every += first
    assert found.sinks.share == pytest.approx(np.mean([value > SINK for value in every]))
    assert 0 < found.sinks.share < 1, "a share that cannot be wrong shows nothing"


def test_fused_experts_are_told_to_be_unseen(tmp_path: Path) -> None:
    found = measured(random_model("mixtral"), tmp_path)
    assert found.unseen == {
        "mlp.gate.weight": 3 * 4 * 48,
        "mlp.experts.gate_up_proj": 3 * 4 * 128 * 48,
        "mlp.experts.down_proj": 3 * 4 * 48 * 64,
    }
    assert math.isnan(found.mlp_output(0))
    assert "mlp.experts.down_proj" in next(
        table.note for table in outliers.tables({"m": found}) if "Inputs" in table.title
    )
    assert not measured(random_model("llama"), tmp_path).unseen


def test_a_model_that_attends_in_some_layers_only_is_described_there(tmp_path: Path) -> None:
    config = Qwen3NextConfig(
        **{"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 16},
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    )
    found = measured(Qwen3NextForCausalLM(config).eval(), tmp_path)
    assert len(found.stream) == 3
    assert list(found.logits) == list(found.sinks.first_token) == [1]
    layers = outliers.tables({"hybrid": found})[1]
    assert [row[0] for row in layers.rows] == ["embedding", "0", "1"]
    assert layers.rows[1][4:] == ("–",) * 3 and "–" not in layers.rows[2]


def test_a_model_without_a_list_of_layers_is_told() -> None:
    model = make_model("llama")
    model.config.num_hidden_layers = 7
    with pytest.raises(UserError, match="7 decoder layers"):
        decoder_layers(model)


def test_pairs_of_heads_are_described_as_by_hand(tmp_path: Path) -> None:
    model = random_model("llama", "diffv2")
    found = measured(model, tmp_path, seq_len=5)  # so short that some pairs are sinks
    seen = reference.collect(model, model.model.layers, windows_of(3, 5))
    assert found.differential is not None
    for layer in range(3):
        gates, cosines, sinks, contexts = pairs_by_hand(model, layer, seen)
        pairs = found.differential
        np.testing.assert_allclose(pairs.gates.means[layer], gates.mean(0), rtol=1e-4)
        np.testing.assert_allclose(pairs.gates.deviations[layer], gates.std(0), rtol=1e-3)
        np.testing.assert_allclose(pairs.cosines.means[layer], cosines.mean(0), rtol=1e-3)
        np.testing.assert_allclose(pairs.sinks.first_token[layer], sinks, rtol=1e-3)
        np.testing.assert_allclose(pairs.context_rms.means[layer], contexts.mean(0), rtol=1e-4)
        assert gates.std() > 0.02 and contexts.min() > 0 and contexts.max() < math.sqrt(2)
    assert len(pairs.gates.means[0]) == 6 == len(found.sinks.first_token[0]) / 2
    every = np.concatenate([pairs.sinks.first_token[layer] for layer in range(3)])
    assert pairs.sinks.share == pytest.approx((every > SINK).mean())
    assert 0 < pairs.sinks.share < 1


def pairs_by_hand(
    model: PreTrainedModel, layer: int, seen: reference.Everything
) -> tuple[np.ndarray, ...]:
    """Gates and cosines [tokens, h], first-token shares [h] and context RMS [tokens, h]."""
    hidden = seen.inputs[f"{layer}.self_attn.q_proj"]  # [N, T, D]
    weight = model.state_dict()[f"model.layers.{layer}.self_attn.differential.lambda_proj.weight"]
    gates = 1 / (1 + np.exp(-(hidden @ weight.numpy().T)))  # [N, T, h]
    maps, outputs = (
        np.stack(kept[layer]) for kept in (seen.kernel.weights, seen.kernel.outputs)
    )  # [N, 2h, T, S], [N, 2h, T, d]
    cosines, contexts, shares = np.empty_like(gates), np.empty_like(gates), []
    for pair in range(gates.shape[-1]):
        one, two = outputs[:, 2 * pair], outputs[:, 2 * pair + 1]
        norms = np.linalg.norm(one, axis=-1) * np.linalg.norm(two, axis=-1)
        cosines[..., pair] = (one * two).sum(-1) / norms
        difference = maps[:, 2 * pair] - gates[..., pair, None] * maps[:, 2 * pair + 1]
        contexts[..., pair] = np.sqrt((difference**2).sum(-1))
        absolute = np.abs(difference[:, 1:])
        shares.append((absolute[..., 0] / absolute.sum(-1)).mean())
    flat = (x.reshape(-1, x.shape[-1]) for x in (gates, cosines, contexts))
    gates, cosines, contexts = flat
    return gates, cosines, np.array(shares), contexts


def test_a_conversion_starts_with_half_gates_equal_pairs_and_even_depth(tmp_path: Path) -> None:
    source = random_model("llama")
    found = measured(graft(source, "diffv2", "attnres"), tmp_path)
    before = measured(source, tmp_path)
    pairs = found.differential
    assert pairs is not None and pairs.gates.mean == 0.5
    assert pairs.gates.quantiles == pytest.approx([0.5] * len(SHARES), abs=1 / 4096)
    assert pairs.cosines.mean == pytest.approx(1, abs=1e-6)
    for layer in range(3):
        doubled = np.repeat(before.sinks.first_token[layer], 2)
        np.testing.assert_allclose(found.sinks.first_token[layer], doubled, rtol=1e-5)
        halved = np.array(before.context_rms.means[layer]) / 2
        np.testing.assert_allclose(pairs.context_rms.means[layer], halved, rtol=1e-5)
    assert pairs.sinks.share == before.sinks.share
    for weights in found.depth.values():
        assert weights == pytest.approx([1 / len(weights)] * len(weights))
    figures = {figure.name: figure.value for figure in outliers.headline(found)}
    assert figures["depth weights, distance from even"] == 0
    assert [part.top for part in found.stream] == [part.top for part in before.stream]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_depth_weights_are_the_softmax_over_sources(size: int, tmp_path: Path) -> None:
    model = graft(random_model("llama"), "attnres", block_size=size)
    randomise(model, seed=1)
    found = measured(model, tmp_path)
    names = [f"{layer}.{what}" for layer in range(3) for what in ("attention", "mlp")]
    assert list(found.depth) == [*names, "output"]
    for weights, expected in zip(found.depth.values(), depth_by_hand(model), strict=True):
        np.testing.assert_allclose(weights, expected, rtol=1e-3)
        assert sum(weights) == pytest.approx(1)
    assert max(abs(weights[0] - 1 / len(weights)) for weights in found.depth.values()) > 0.1
    distances = [
        0.5 * sum(abs(weight - 1 / len(weights)) for weight in weights)
        for weights in found.depth.values()
    ]
    figures = {figure.name: figure.value for figure in outliers.headline(found)}
    assert figures["depth weights, distance from even"] == pytest.approx(np.mean(distances))


def depth_by_hand(model: PreTrainedModel) -> Iterator[np.ndarray]:
    """Mean alpha of each read, from a Llama written by hand whose sources are kept at each read."""
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    reads = depth_reference.reads_of(state, "model.layers.", "model.", 3, per_layer=2)
    alphas: list[list[np.ndarray]] = [[] for _ in reads]
    for row in windows_of(3, 12):
        mask = llama_reference.causal_mask(torch.ones_like(row))
        llama = llama_reference.Llama(state, model.config, mask)
        sublayers = [
            functools.partial(sublayer, layer)
            for layer in range(3)
            for sublayer in (llama.attention, llama.mlp)
        ]
        kept: list[list[torch.Tensor]] = []

        def choose(
            outputs: list[torch.Tensor], size: int, kept: list[list[torch.Tensor]] = kept
        ) -> list[torch.Tensor]:
            kept.append(depth_reference.blocks(outputs, size))
            return kept[-1]

        size = model.config.attnres["block_size"]
        depth_reference.stream_before_head(llama.embed(row), sublayers, reads, size, choose)
        for number, (sources, (query, gain)) in enumerate(zip(kept, reads, strict=True)):
            scores = [
                (query * gain * s / (s.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()).sum(-1)
                for s in sources
            ]
            exponentials = torch.stack(scores).exp().numpy()  # [sources, T]
            alphas[number].append(exponentials / exponentials.sum(0))
    for parts in alphas:
        yield np.concatenate(parts, axis=1).mean(1)


@pytest.mark.parametrize("name", ["gpt_neox", "cohere", "olmo2"])
def test_every_read_is_counted_once_in_other_layouts(name: str, tmp_path: Path) -> None:
    found = measured(random_model(name, "attnres"), tmp_path)
    branches = 2 if name == "olmo2" else 1
    assert len(found.depth) == 3 * branches + 1
    for weights in found.depth.values():
        assert sum(weights) == pytest.approx(1)


# -- the measure


def test_batches_do_not_change_figures_and_a_rerun_repeats_them(tmp_path: Path) -> None:
    model = random_model("llama", "diffv2", "attnres")
    one, two = (measured(model, tmp_path, batch_size=size) for size in (1, 3))
    assert measured(model, tmp_path, batch_size=3) == two
    for a, b in zip(outliers.headline(one), outliers.headline(two), strict=True):
        assert a.value == pytest.approx(b.value, rel=ROUNDING, abs=1e-6), a.name
    assert one != two or one.windows == 3


def test_nothing_is_left_on_the_model_even_after_an_error(tmp_path: Path) -> None:
    model = graft(random_model("llama"), "diffv2", "attnres")
    before = count_hooks(model)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory, say")

    measured(model, tmp_path)
    assert count_hooks(model) == before
    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="say"):
        measured(model, tmp_path)
    hook.remove()
    assert count_hooks(model) == before
    assert model.config._attn_implementation == "sdpa"


def count_hooks(model: PreTrainedModel) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@torch.no_grad()
def test_memory_does_not_grow_with_tokens() -> None:
    model = random_model("llama", "diffv2", "attnres")
    sizes = []
    with watched(model) as found:
        for length in (8, 30, 60):
            model.model(torch.randint(3, 100, (2, length)), use_cache=False)
            streams = [*found.stream.values(), *found.linears.values(), *found.logits.values()]
            sizes.append((len(streams), sum(len(s.largest) + len(s.histogram) for s in streams)))
    assert sizes[1] == sizes[2]


def test_a_nan_in_the_weights_is_seen_in_the_figures(tmp_path: Path) -> None:
    model = make_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = math.nan
    found = measured(model, tmp_path)
    assert math.isfinite(found.stream[1].maximum) and math.isnan(found.stream[2].maximum)
    figures = {figure.name: figure.value for figure in outliers.headline(found)}
    assert math.isnan(figures["residual stream, max |x|"])
    assert math.isnan(figures["sink heads, share"])
    again = Result.model_validate_json(found.model_dump_json())
    assert again.model_dump_json() == found.model_dump_json()
    assert math.isnan(again.stream[2].maximum)
    assert charts({"spoilt": found})


def test_the_summary_is_the_largest_of_any_layer(tmp_path: Path) -> None:
    found = measured(random_model("llama"), tmp_path)
    figures = {figure.name: figure.value for figure in outliers.headline(found)}
    assert figures["residual stream, max |x|"] == max(part.top[0] for part in found.stream)
    assert figures["residual stream, kurtosis"] == max(part.kurtosis for part in found.stream)
    assert figures["input of a linear, max |x|"] == max(p.top[0] for p in found.linears.values())
    assert figures["attention logits, max |x|"] == max(
        part.top[0] for part in found.logits.values()
    )
    assert figures["sink heads, share"] == found.sinks.share


def test_table_5_has_the_papers_rows_and_columns(tmp_path: Path) -> None:
    results = {
        "source": measured(random_model("llama"), tmp_path),
        "differential": measured(random_model("llama", "diffv2", "attnres"), tmp_path),
    }
    table, *others = outliers.tables(results)
    assert table.columns[2:] == ("top-1#", "top-2#", "top-3#", "top-10#", "top-100#", "median#")
    assert [row[:2] for row in table.rows] == [
        ("source", "attention logits"),
        ("differential", "attention logits"),
        ("source", "hidden states"),
        ("differential", "hidden states"),
    ]
    assert table.rows[2][2] == format_number(results["source"].hidden_states.top[0], 4)
    titles = [other.title for other in others]
    assert [t for t in titles if "source" in t] == [
        "Layers of source",
        "Inputs of linears of source",
    ]
    assert titles[-2:] == ["Pairs of heads of differential", "Depth weights of differential"]
    for other in others:
        assert all(len(row) == len(other.columns) for row in other.rows), other.title


def test_charts_draw_what_was_found(tmp_path: Path) -> None:
    results = {
        "source": measured(random_model("mixtral"), tmp_path),  # without linears in its MLP
        "differential": measured(random_model("llama", "diffv2", "attnres"), tmp_path),
    }
    by_layer, gates, depth = (chart.drawing for chart in charts(results))
    lines = [axes.get_lines() for axes in by_layer.axes]
    for index, result in enumerate(results.values()):
        assert lines[0][index].get_ydata().tolist() == [part.top[0] for part in result.stream]
        assert lines[2][index].get_ydata().tolist() == [part.kurtosis for part in result.stream]
    down = lines[1][1].get_ydata()
    assert down[1:].tolist() == [
        results["differential"].linears[f"{layer}.mlp.down_proj"].maximum for layer in range(3)
    ]
    assert math.isnan(down[0]) and np.isnan(lines[1][0].get_ydata()).all()
    assert {line.get_linestyle() for line in lines[0]} == {"-", "--"}
    assert all(axes.get_yscale() == "log" for axes in by_layer.axes)
    differential = results["differential"]
    assert differential.differential is not None
    np.testing.assert_array_equal(
        gates.axes[0].images[0].get_array(), [*differential.differential.gates.means.values()]
    )
    rows = depth.axes[0].images[0].get_array()
    assert rows.shape == (7, 4)
    for row, weights in zip(rows, differential.depth.values(), strict=True):
        assert row.compressed().tolist() == list(weights)


@pytest.mark.real
def test_smollm2_has_the_outliers_that_are_known_of_it(
    smollm2_gguf: Path, shared_data: Path
) -> None:
    """Known figures are 27 600, 3 384 and 0.47; how large the largest is depends on the windows."""
    text = shared_data / "wikitext-2" / "test.txt"
    options = BenchOptions(measures=(), text=text, limit=2, dtype="float32")
    with open_subject("smollm2", str(smollm2_gguf), options) as subject:
        found = outliers.measure(subject, options, silent)
    figures = {figure.name: figure.value for figure in outliers.headline(found)}
    assert figures["residual stream, max |x|"] == pytest.approx(27_600, rel=0.15)
    assert figures["residual stream, kurtosis"] == pytest.approx(2.6e5, rel=0.15)
    assert found.linears["11.mlp.down_proj"].maximum == pytest.approx(3_384, rel=0.15)
    assert found.linears["28.mlp.down_proj"].maximum == pytest.approx(2_377, rel=0.15)
    assert figures["sink heads, share"] == pytest.approx(0.47, abs=0.05)
