"""Reports of a bench made by hand, and a reader for the pages that show them."""

import math
from html.parser import HTMLParser
from typing import Any

from difftool.bench.measures.outliers import Result as Outliers
from difftool.bench.measures.perplexity import Result as Perplexity
from difftool.bench.options import BenchOptions
from difftool.bench.report import Environment, Report, SubjectReport
from difftool.provenance import Provenance, SourceRecord, Step

EVIL = "<script>alert('x')</script>|`$a$`*b*_c_"


def made_perplexity(value: float, stderr: float = 0.4) -> Perplexity:
    return Perplexity(
        perplexity=value,
        perplexity_stderr=stderr,
        nats_per_token=math.log(value),
        nats_stderr=stderr / value,
        bits_per_byte=math.log2(value) / 4,
        tokens=4096,
        bytes=16384,
        windows=16,
        seq_len=512,
        stride=256,
        text="heldout.txt",
    )


def made_outliers(scale: float, layers: int = 4, heads: int = 3) -> Outliers:
    """Return outliers of a diffv2 and attnres model, layer 2's the largest."""

    def magnitudes(layer: int) -> dict[str, Any]:
        top = [scale * (100.0 if layer == 2 else 1.0) / rank for rank in (1, 2, 3, 10, 100)]
        return {"count": 1000, "kurtosis": 3.0 * scale, "top": top, "median": 0.5}

    def columns(low: float) -> dict[str, Any]:
        means = {i: [low + 0.01 * (i + head) for head in range(heads)] for i in range(layers)}
        return {"means": means, "deviations": means, "mean": low, "quantiles": [low] * 7}

    sinks = {"first_token": {i: [0.1, 0.5, 0.2] for i in range(layers)}, "share": 1 / 3}
    linears = ("self_attn.q_proj", "mlp.down_proj")
    found = {
        "text": "heldout.txt",
        "windows": 4,
        "seq_len": 128,
        "stream": [magnitudes(layer) for layer in range(layers + 1)],
        "logits": {i: magnitudes(i) for i in range(layers)},
        "linears": {f"{i}.{name}": magnitudes(i) for i in range(layers) for name in linears},
        "hidden_states": magnitudes(2),
        "attention_logits": magnitudes(0),
        "sinks": sinks,
        "context_rms": columns(0.3),
        "differential": {
            "gates": columns(0.5),
            "cosines": columns(0.9),
            "context_rms": columns(0.2),
            "sinks": sinks,
        },
        "depth": {f"{i}.attention": [1 / (i + 1)] * (i + 1) for i in range(layers)},
        "unseen": {},
    }
    return Outliers.model_validate(found)


def made_step(target: str, source: str) -> Step:
    return Step(
        stage="convert",
        options={"to": target, "dtype": None},
        source=SourceRecord(id=source, revision="abc123", fingerprint="sha256:0f0f"),
        output_fingerprint="sha256:e1e1",
        versions={"difftool": "0.1.0", "torch": "2.13.0"},
        seconds=2.5,
        metrics={"verification": [{"dtype": "float32", "verdict": "bit-identical"}]},
    )


def made_subject(name: str, results: dict[str, Any], **changes: Any) -> SubjectReport:
    values: dict[str, Any] = {
        "name": name,
        "source": name,
        "architecture": "LlamaForCausalLM",
        "family": "llama",
        "targets": (),
        "parameters": 1_234_567,
        "weight_bytes": 2_469_134,
        "dtype": "float32",
        "attention": "sdpa",
        "device": "cpu",
        "provenance": Provenance(),
        "results": results,
        "problems": (),
    }
    return SubjectReport(**{**values, **changes})


def made_report(*subjects: SubjectReport, complete: bool = True) -> Report:
    return Report(
        created="2026-12-01T12:00:00Z",
        seconds=12.3,
        complete=complete,
        options=BenchOptions(measures=("perplexity", "outliers"), seed=7),
        environment=Environment(
            cpu="A CPU & more",
            cores=2,
            threads=2,
            memory_bytes=24 * 10**9,
            gpu=None,
            platform="Linux",
            versions={"torch": "2.13.0"},
        ),
        subjects=subjects,
    )


def made_pair() -> Report:
    """Two checkpoints, the second made from the first by two steps."""
    steps = (made_step("diffv2", "plain"), made_step("attnres", "plain-diffv2"))
    return made_report(
        made_subject("plain", {"perplexity": made_perplexity(20.0), "outliers": made_outliers(2)}),
        made_subject(
            "both",
            {"perplexity": made_perplexity(25.0), "outliers": made_outliers(1)},
            targets=("diffv2", "attnres"),
            provenance=Provenance(steps=steps),
        ),
    )


def made_hostile() -> Report:
    """A checkpoint whose every text would be markup if it were let through."""
    step = made_step(EVIL, EVIL)
    found = {
        "perplexity": made_perplexity(20.0).model_copy(update={"text": EVIL}),
        "outliers": made_outliers(1),
    }
    one = made_subject("plain", {"outliers": made_outliers(1)})
    two = made_subject(
        EVIL,
        found,
        source=EVIL,
        architecture=EVIL,
        targets=(EVIL,),
        provenance=Provenance(steps=(step,)),
        problems=(EVIL,),
    )
    return made_report(one, two, complete=False)


class Page(HTMLParser):
    """The elements of a page: each tag with its attributes, and all text outside style."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open != "style":
            self.text += data
