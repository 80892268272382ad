"""What the measure of outliers finds, as it stands in report.json."""

import math

from pydantic import Field

from difftool.bench.result import MeasureResult

RANKS = (1, 2, 3, 10, 100)
SHARES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
SINK = 0.3  # a head that gives more to the first token is a sink
MLP_OUTPUTS = ("down_proj", "mlp.c_proj", "dense_4h_to_h", "output_linear")


class Magnitudes(MeasureResult):
    """A stream of activations, every element counted."""

    count: int
    kurtosis: float = Field(description="4th standardised moment, 3 for a normal distribution")
    top: tuple[float, ...] = Field(description="1st, 2nd, 3rd, 10th and 100th largest magnitude")
    median: float = Field(description="of the magnitudes, within 0.4 %")

    @property
    def maximum(self) -> float:
        return self.top[0]


class Columns(MeasureResult):
    """One number per token and head, or pair of heads: its distribution."""

    means: dict[int, tuple[float, ...]] = Field(description="by layer, by head")
    deviations: dict[int, tuple[float, ...]] = Field(description="standard, by layer, by head")
    mean: float = Field(description="over all")
    quantiles: tuple[float, ...] = Field(description=f"{SHARES} of all, to 1/8192 of the range")


class Sinks(MeasureResult):
    """How much later queries that may look at the first token give to it."""

    first_token: dict[int, tuple[float, ...]] = Field(description="mean, by layer, by head")
    share: float = Field(description=f"of heads whose mean exceeds {SINK}")


class Differential(MeasureResult):
    """What pairs of heads do in a diffv2 model; their map is a_1 - sigmoid(lambda) a_2."""

    gates: Columns = Field(description="sigmoid(lambda)")
    cosines: Columns = Field(description="between the outputs of a pair's two heads")
    context_rms: Columns = Field(description="of the pair's map, before W_o")
    sinks: Sinks = Field(
        description="of the pair's map, as shares of the absolute weight in a row, since W_o may "
        "scale the map at will"
    )


class Result(MeasureResult):
    """Largest activations, shapes of their distributions, attention sinks, and depth weights."""

    text: str = Field(description="name of the file, or heldout.txt for the built-in one")
    windows: int
    seq_len: int
    stream: tuple[Magnitudes, ...] = Field(
        description="residual stream: what enters the first layer, then what each layer gives"
    )
    logits: dict[int, Magnitudes] = Field(
        description="attention logits by layer, scaled and capped, where the mask allows to look"
    )
    linears: dict[str, Magnitudes] = Field(description="inputs, by <layer>.<path in the layer>")
    hidden_states: Magnitudes = Field(description="outputs of all layers together")
    attention_logits: Magnitudes = Field(description="of all layers together")
    sinks: Sinks = Field(description="of the softmax heads")
    context_rms: Columns = Field(
        description="sqrt(sum of squared weights) of a query, in [1/sqrt(n), 1] for a softmax of n"
    )
    differential: Differential | None = Field(description="of diffv2 models")
    depth: dict[str, tuple[float, ...]] = Field(
        description="of attnres models, by read: mean alpha of each source, the embedding first"
    )
    unseen: dict[str, int] = Field(
        description="parameters of matrices that are no linear modules, by path in a layer; their "
        "inputs are not measured"
    )

    @property
    def layers(self) -> int:
        return len(self.stream) - 1

    def inputs_of(self, layer: int) -> dict[str, Magnitudes]:
        """Return what goes into one layer's linears, by path."""
        prefix = f"{layer}."
        return {
            name.removeprefix(prefix): value
            for name, value in self.linears.items()
            if name.startswith(prefix)
        }

    def mlp_output(self, layer: int) -> float:
        """Return the largest input of a layer's last MLP linears; NaN where they are fused."""
        inputs = self.inputs_of(layer).items()
        found = [value.maximum for name, value in inputs if name.endswith(MLP_OUTPUTS)]
        return largest(found)


def largest(values: list[float]) -> float:
    """Return the largest value; NaN if one is NaN, or if there is none."""
    nan = any(math.isnan(value) for value in values)
    return math.nan if nan else max(values, default=math.nan)
