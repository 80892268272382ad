"""Low bits: fake quantisation against one number at a time, and whole models against slow ones."""

import copy
import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_subject import options_for, silent, subject_of, windows_of
from reference import activations as reference
from tiny_models import graft, make_model, randomise, skip_if_missing
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from difftool.bench.blocks import block_linears
from difftool.bench.charts.attention_bits import charts
from difftool.bench.fake_quant import Scheme, fake_quantise, quantise_logits, quantised_linears
from difftool.bench.measures import attention_bits
from difftool.bench.measures.attention_bits import LOGIT_BITS, SCHEMES, Result
from difftool.bench.options import BenchOptions
from difftool.bench.subject import open_subject

ROUNDING = 2e-5  # float32, a few hundred operations in another order
# A number halfway between two levels may fall to either side of them after that.
ONE_LEVEL_OFF = 5e-3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- rounding


@pytest.mark.parametrize("bits", [3, 4, 6, 8, 16])
def test_numbers_go_to_the_nearest_level(bits: int) -> None:
    values = normal(5, 7)
    rounded = fake_quantise(values, bits, (0, 1))
    expected = reference.round_to_levels(values.numpy(), bits)
    torch.testing.assert_close(rounded.double(), torch.from_numpy(expected))
    step = values.abs().max() / (2 ** (bits - 1) - 1)
    assert (rounded - values).abs().max() <= step / 2 * (1 + ROUNDING)
    assert rounded.flatten()[values.abs().argmax()] == pytest.approx(
        values.flatten()[values.abs().argmax()].item()
    )
    torch.testing.assert_close(fake_quantise(rounded, bits, (0, 1)), rounded)


def test_every_group_has_a_scale_of_its_own() -> None:
    values = normal(3, 4, 5) * torch.tensor([1.0, 1e3, 1e-3]).view(3, 1, 1)
    rounded = fake_quantise(values, 4, (1, 2))
    for group, found in zip(values, rounded, strict=True):
        expected = reference.round_to_levels(group.numpy(), 4)
        torch.testing.assert_close(found.double(), torch.from_numpy(expected))


def test_zeros_stay_and_a_nan_spoils_its_group_only() -> None:
    values = torch.stack([torch.zeros(4), torch.ones(4), torch.tensor([1.0, math.nan, 2, 3])])
    rounded = fake_quantise(values, 8, (1,))
    assert torch.equal(rounded[:2], values[:2])
    assert rounded[2].isnan().all()


def test_logits_round_by_sequence_and_forbidden_ones_do_not_count() -> None:
    logits = normal(2, 3, 4, 4) * torch.tensor([1.0, 50.0]).view(2, 1, 1, 1)
    allowed = torch.ones(4, 4, dtype=torch.bool).tril().expand(2, 1, 4, 4)
    spoilt = logits.masked_fill(~allowed, 1e6)
    rounded = quantise_logits(4)(spoilt, allowed)
    for row in range(2):
        seen = np.where(allowed[row].numpy(), logits[row].numpy(), math.nan)
        expected = reference.round_to_levels(seen, 4)
        places = ~np.isnan(expected)
        np.testing.assert_allclose(rounded[row].numpy()[places], expected[places], rtol=1e-5)


# -- linears


def slow_linear(weight: np.ndarray, x: np.ndarray, scheme: Scheme) -> np.ndarray:
    """Of weight [out, in] and one sequence [T, in], rounded one group at a time."""
    rows = np.stack([reference.round_to_levels(row, scheme.weight_bits) for row in weight])
    groups = x if scheme.granularity == "token" else [x]
    rounded = [reference.round_to_levels(group, scheme.activation_bits) for group in groups]
    return np.asarray(rounded).reshape(x.shape) @ rows.T


def make_linear(kind: type[nn.Module]) -> tuple[nn.Module, np.ndarray, np.ndarray]:
    """Return a module that is 6 wide and gives 5, its weight [5, 6] and its bias [5]."""
    linear = Conv1D(5, 6) if kind is Conv1D else nn.Linear(6, 5)
    weight, bias = normal(5, 6), normal(5, seed=1)
    linear.weight.data = weight.T.contiguous() if kind is Conv1D else weight
    linear.bias.data = bias
    return linear, weight.numpy(), bias.numpy()


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("scheme", [Scheme(4, 4, "tensor"), Scheme(4, 4, "token"), SCHEMES[3]])
def test_a_linear_computes_with_rounded_weights_and_inputs(
    kind: type[nn.Module], scheme: Scheme
) -> None:
    linear, weight, bias = make_linear(kind)
    x = normal(1, 7, 6, seed=2) * torch.logspace(-2, 1, 7).view(1, 7, 1)
    with torch.no_grad(), quantised_linears([linear], scheme):
        found = linear(x)
    expected = slow_linear(weight, x[0].numpy(), scheme) + bias
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-5)


def test_weights_and_code_are_as_they_were_even_after_an_error() -> None:
    model = make_model("llama")
    linears = block_linears(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = windows_of(1, 12)
    logits = model(tokens).logits
    with quantised_linears(linears.values(), SCHEMES[0]):
        changed = model(tokens).logits
    with pytest.raises(RuntimeError), quantised_linears(linears.values(), SCHEMES[5]):
        raise RuntimeError("out of memory, say")
    assert not torch.equal(changed, logits)
    assert torch.equal(model(tokens).logits, logits)
    assert all("forward" not in vars(linear) for linear in linears.values())
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_half_precision_is_rounded_once_at_the_end() -> None:
    linear, *_ = make_linear(nn.Linear)
    linear.bfloat16()
    x = normal(1, 7, 6).bfloat16()
    with torch.no_grad(), quantised_linears([linear], SCHEMES[0]):
        found = linear(x)
    weight, bias = (part.detach().float().numpy() for part in (linear.weight, linear.bias))
    expected = torch.from_numpy(slow_linear(weight, x[0].float().numpy(), SCHEMES[0]) + bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found[0].double(), expected, rtol=2**-8, atol=1e-6)


# -- the measure


@functools.cache
def random_model(name: str, *targets: str) -> PreTrainedModel:
    skip_if_missing(name)
    model = make_model(name)
    if targets:
        model = graft(model, *targets)
        randomise(model, seed=1)
    return model


def measured(model: PreTrainedModel, folder: Path, *start: int, **changes: object) -> Result:
    return attention_bits.measure(subject_of(model, *start), options_for(folder, **changes), silent)


@torch.no_grad()
def scores_of(model: PreTrainedModel, windows: Tensor, first: int = 1) -> tuple[float, float]:
    """Perplexity and accuracy, a window and a token at a time."""
    nats, hits = [], []
    for window in windows:
        logits = model(window[None], use_cache=False).logits[0].double().numpy()
        for place in range(first, len(window)):
            row = logits[place - 1]
            nats.append(math.log(np.exp(row - row.max()).sum()) + row.max() - row[window[place]])
            hits.append(row.argmax() == window[place].item())
    return math.exp(np.mean(nats)), float(np.mean(hits))


class SlowLinear(nn.Module):
    """Takes the place of a linear module in a copy of its model."""

    def __init__(self, linear: nn.Module, scheme: Scheme) -> None:
        super().__init__()
        weight = linear.weight.T if isinstance(linear, Conv1D) else linear.weight
        self.matrix, self.scheme = weight.detach().numpy(), scheme
        self.offset = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).numpy()
        y = torch.from_numpy(slow_linear(self.matrix, rows, self.scheme)).float()
        y = y if self.offset is None else y + self.offset
        return y.view(*x.shape[:-1], -1)


def slow_copy(model: PreTrainedModel, scheme: Scheme) -> PreTrainedModel:
    twin = copy.deepcopy(model)
    layers = twin.base_model.h if hasattr(twin.base_model, "h") else twin.base_model.layers
    for layer in layers:
        for path, module in list(layer.named_modules()):
            kept = path.endswith(("lambda_proj", "shared_expert_gate", "router"))
            if isinstance(module, nn.Linear | Conv1D) and not kept:
                parent, _, name = path.rpartition(".")
                setattr(layer.get_submodule(parent), name, SlowLinear(module, scheme))
    return twin


@pytest.mark.parametrize("name", ["llama-wide-heads-and-biases", "gpt2", "qwen2_moe", "diffv2"])
def test_quantised_linears_score_as_in_a_slow_copy_of_the_model(name: str, tmp_path: Path) -> None:
    model = random_model("llama", "diffv2", "attnres") if name == "diffv2" else random_model(name)
    found = measured(model, tmp_path, limit=2)
    full, _ = scores_of(model, windows_of(2, 12))
    assert [score.scheme for score in found.linears] == list(SCHEMES)
    for score in found.linears:
        expected = scores_of(slow_copy(model, score.scheme), windows_of(2, 12))
        assert score.perplexity == pytest.approx(expected[0], rel=ONE_LEVEL_OFF), score.scheme
        assert score.ratio == pytest.approx(expected[0] / full, rel=ONE_LEVEL_OFF)
        assert score.accuracy == pytest.approx(expected[1], abs=0.05)
        assert abs(score.ratio - 1) > 1e-5


@pytest.mark.parametrize("name", ["llama-wide-heads-and-biases", "gemma2", "gpt_oss", "gpt_neox"])
def test_quantised_attention_scores_as_with_a_slow_kernel(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    found = measured(model, tmp_path, 1)
    windows = windows_of(3, 12, 1)
    full = scores_of(model, windows)
    assert found.full.perplexity == pytest.approx(full[0], rel=ROUNDING)
    assert found.full.accuracy == pytest.approx(full[1]) and found.full.ratio == 1
    assert list(found.attention) == list(LOGIT_BITS) == [16, 8, 6, 4]
    for bits, score in found.attention.items():
        rounding = functools.partial(reference.round_to_levels, bits=bits)
        with reference.kernel_of(model, reference.Kernel(rounding)):
            expected = scores_of(model, windows)
        assert score.perplexity == pytest.approx(expected[0], rel=1e-3), bits
        assert score.accuracy == pytest.approx(expected[1], abs=0.05)
        assert score.ratio == pytest.approx(expected[0] / full[0], rel=1e-3)
    assert abs(found.attention[4].ratio - 1) > 10 * abs(found.attention[16].ratio - 1)


def test_what_a_tokenizer_puts_before_a_text_is_not_asked_for(tmp_path: Path) -> None:
    model = random_model("llama")
    found = measured(model, tmp_path, 1, 2)
    assert found.full.perplexity == pytest.approx(
        scores_of(model, windows_of(3, 12, 1, 2), first=2)[0], rel=ROUNDING
    )


def test_the_batch_size_changes_nothing_at_all(tmp_path: Path) -> None:
    model = random_model("llama", "diffv2", "attnres")
    assert measured(model, tmp_path, batch_size=1) == measured(model, tmp_path, batch_size=3)


def test_the_standard_error_is_that_of_windows(tmp_path: Path) -> None:
    model = random_model("llama")
    nats = [math.log(scores_of(model, window[None])[0]) for window in windows_of(3, 12)]
    found = measured(model, tmp_path).full
    expected = found.perplexity * np.std(nats, ddof=1) / math.sqrt(3)
    assert found.perplexity_stderr == pytest.approx(expected, rel=1e-3)
    assert measured(model, tmp_path, limit=1).full.perplexity_stderr is None


def test_what_is_left_in_floating_point_is_counted(tmp_path: Path) -> None:
    one = "self_attn."
    llama = measured(random_model("llama"), tmp_path)
    attention = 3 * 48 * (48 + 16 + 16 + 48)
    assert llama.quantised_parameters == attention + 3 * 3 * 48 * 64
    assert llama.left_parameters == {}
    pairs = measured(random_model("llama", "diffv2"), tmp_path)
    assert pairs.left_parameters == {f"{one}differential.lambda_proj.weight": 3 * 6 * 48}
    experts = measured(random_model("mixtral"), tmp_path)
    assert experts.quantised_parameters == attention
    assert experts.left_parameters["mlp.experts.gate_up_proj"] == 3 * 4 * 128 * 48
    note = attention_bits.tables({"experts": experts})[1].note
    assert f"experts {attention:,} (left as they are: " in note
    assert "mlp.experts.gate_up_proj 73,728" in note


def test_progress_ends_where_it_said_it_would(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    subject = subject_of(random_model("llama"))
    attention_bits.measure(
        subject, options_for(tmp_path, limit=2), lambda *report: told.append(report)
    )
    assert told[0] == ("attention-bits", 0, 22) and told[-1] == ("attention-bits", 22, 22)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_linears_that_are_quantised_already_are_not_rounded_again(tmp_path: Path) -> None:
    """A subclass of nn.Linear keeps its weights as it likes: bitsandbytes packs them."""

    class Packed(nn.Linear):
        pass

    model = make_model("llama")
    for linear in block_linears(model).values():
        linear.__class__ = Packed
    found = measured(model, tmp_path)
    assert found.linears == () and found.quantised_parameters == 0
    assert found.attention.keys() == {16, 8, 6, 4}
    assert attention_bits.headline(found) and attention_bits.tables({"m": found})
    assert charts({"m": found})


def test_nothing_is_left_on_the_model_after_an_error(tmp_path: Path) -> None:
    model = random_model("llama")
    before = copy.deepcopy(model.state_dict())
    calls = []

    @contextmanager
    def failing() -> Iterator[None]:
        def fail(*_: object) -> None:
            calls.append(1)
            if len(calls) > 20:  # among the linears
                raise RuntimeError("out of memory, say")

        hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
        yield
        hook.remove()

    with failing(), pytest.raises(RuntimeError, match="say"):
        measured(model, tmp_path)
    assert model.config._attn_implementation == "sdpa"
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def test_a_nan_is_in_every_figure(tmp_path: Path) -> None:
    model = make_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = math.nan
    found = measured(model, tmp_path)
    for score in (found.full, *found.attention.values(), *found.linears):
        assert math.isnan(score.perplexity) and math.isnan(score.accuracy)
    assert all(math.isnan(figure.value) for figure in attention_bits.headline(found))
    assert charts({"spoilt": found})
    again = Result.model_validate_json(found.model_dump_json())
    assert again.model_dump_json() == found.model_dump_json()


def test_summary_and_tables_say_what_was_found(tmp_path: Path) -> None:
    found = measured(random_model("gemma2"), tmp_path)
    figures = {figure.name: figure.value for figure in attention_bits.headline(found)}
    assert figures == {
        "accuracy, 4-bit attention logits": found.attention[4].accuracy,
        "perplexity, 4-bit attention logits": found.attention[4].perplexity,
        "perplexity, W8A8 per tensor": found.linears[0].perplexity,
        "perplexity, W8A8 per token": found.linears[1].perplexity,
        "perplexity, W4A4 per token": found.linears[5].perplexity,
    }
    attention, linears = attention_bits.tables({"a": found, "b": found})
    assert [row[:2] for row in attention.rows[:5]] == [
        ("a", bits) for bits in ("full", "16", "8", "6", "4")
    ]
    assert [row[1] for row in linears.rows[7:]] == ["full", *map(str, SCHEMES)]
    assert linears.rows[1][1] == "W8A8 per tensor"
    assert Result.model_validate_json(found.model_dump_json()) == found


def test_charts_draw_what_was_found(tmp_path: Path) -> None:
    results = {name: measured(random_model(name), tmp_path) for name in ("llama", "gemma2")}
    by_bits, by_scheme = (chart.drawing for chart in charts(results))
    accuracy, perplexity = by_bits.axes
    for index, result in enumerate(results.values()):
        scores = [result.full, *result.attention.values()]
        lines = [axes.get_lines()[index] for axes in (accuracy, perplexity, *by_scheme.axes)]
        assert lines[0].get_xdata().tolist() == ["full", "16", "8", "6", "4"]
        assert list(lines[0].get_ydata()) == [score.accuracy for score in scores]
        assert list(lines[1].get_ydata()) == [score.perplexity for score in scores]
        for line, granularity in zip(lines[2:], ("token", "tensor"), strict=True):
            assert line.get_xdata().tolist() == ["full", "W8A8", "W4A8", "W4A4"]
            scores = [result.full, *(s for s in result.linears if s.granularity == granularity)]
            assert list(line.get_ydata()) == [score.perplexity for score in scores]
    assert accuracy.get_ylim()[0] == 0
    assert {axes.get_yscale() for axes in (perplexity, *by_scheme.axes)} == {"log"}
    assert len({axes.get_ylim() for axes in by_scheme.axes}) == 1


@pytest.mark.real
def test_smollm2_suffers_from_low_bits_as_is_known_of_it(
    smollm2_gguf: Path, shared_data: Path
) -> None:
    """Known, of 8 windows: 27.6 in full; W8A8 per tensor 50.6, per token 28.5; W4A4 14 398."""
    text = shared_data / "wikitext-2" / "test.txt"
    options = BenchOptions(measures=(), text=text, limit=1, dtype="float32")
    with open_subject("smollm2", str(smollm2_gguf), options) as subject:
        found = attention_bits.measure(subject, options, silent)
    ratios = {str(score.scheme): score.ratio for score in found.linears}
    assert 15 < found.full.perplexity < 45
    assert 1.3 < ratios["W8A8 per tensor"] < 3
    assert 1.0 < ratios["W8A8 per token"] < 1.15
    assert 1.5 < ratios["W4A8 per token"] < 2.5
    assert ratios["W4A4 per token"] > 100
    assert abs(found.attention[16].ratio - 1) < 1e-3 < found.attention[4].ratio - 1
