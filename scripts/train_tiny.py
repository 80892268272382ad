"""Train `tiny`, the small Llama checkpoint that ships inside difftool.

The text is the Python standard library: its modules as they are and the topics of `pydoc_data`,
so any machine with Python has the data (PSF licence). One document in twenty, chosen by the hash
of its name, is held out. `python scripts/train_tiny.py` with no arguments makes the shipped
checkpoint again; the same bits need the same torch build, thread count and Python version.
Sinks and outliers are measured as in Xiao et al. (arXiv 2309.17453) and Sun et al. (2402.17762).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
import sysconfig
import time
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory, gettempdir

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

ASSETS = Path(__file__).resolve().parent.parent / "difftool" / "assets"
SHIPPED, HELDOUT = ASSETS / "tiny", ASSETS / "heldout.txt"
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
VOCABULARY = 2048
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
SKIPPED_FOLDERS |= {"encodings"}  # tables of characters, not text
SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")  # this machine
HELDOUT_BYTES = 200_000  # what ships of the held-out text
SINK_THRESHOLD = 0.3


@dataclass(frozen=True)
class Recipe:
    """How the checkpoint is trained.

    The learning rate is constant until its last, linear decay, so runs that differ in length alone
    share their beginning: `--resume --tokens N` may shorten a run that has not begun to decay.
    """

    tokens: int = 12_288_000
    window: int = 512
    batch: int = 4
    peak_rate: float = 3e-3
    warmup_steps: int = 200
    decay_fraction: float = 0.4
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0

    @property
    def steps(self) -> int:
        """Optimiser steps in the whole run."""
        return self.tokens // (self.window * self.batch)

    @property
    def trained_tokens(self) -> int:
        """Tokens in all steps."""
        return self.steps * self.window * self.batch

    def rate(self, step: int) -> float:
        """Learning rate at `step`: linear warm-up, constant, linear decay."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        decay_steps = self.decay_fraction * self.steps
        decayed = max(0.0, 1 - (self.steps - step) / decay_steps)
        return self.peak_rate * warm * (1 - (1 - self.final_fraction) * decayed)


@dataclass(frozen=True)
class Document:
    """One text and its name relative to the standard library."""

    name: str
    text: str

    @property
    def digest(self) -> int:
        """A number that depends on the name alone; orders and splits the documents."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "big")

    @property
    def held_out(self) -> bool:
        """Whether training must never see this document."""
        return self.digest % 20 == 0


@dataclass(frozen=True)
class Figures:
    """What the checkpoint does on the held-out text."""

    nats_per_token: float
    bits_per_byte: float
    sink_share: float
    residual_max: float
    residual_kurtosis: float


def is_text(name: Path) -> bool:
    """Whether a module of the standard library is text that every machine shares."""
    in_skipped_folder = not SKIPPED_FOLDERS.isdisjoint(name.parts)
    return not in_skipped_folder and not name.parts[0].startswith(SKIPPED_PREFIXES)


def read_source(path: Path) -> str:
    """Read a module in the encoding it declares."""
    with tokenize.open(path) as file:
        return file.read()


def read_corpus() -> list[Document]:
    """The standard library's modules and pydoc topics, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    modules = [Document(n.as_posix(), read_source(root / n)) for n in names if is_text(n)]
    prose = [Document(f"pydoc_data/topics/{name}", text) for name, text in topics.items()]
    documents = [document for document in modules + prose if document.text.strip()]
    return sorted(documents, key=lambda document: document.name)


def corpus_digest(documents: list[Document]) -> str:
    """sha256 of all names and texts in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.name}\0{document.text}\0".encode())
    return digest.hexdigest()


def select_heldout(documents: list[Document]) -> str:
    """Whole held-out documents, in the order of their digests, up to HELDOUT_BYTES."""
    texts: list[str] = []
    room = HELDOUT_BYTES
    for document in sorted(documents, key=lambda document: document.digest):
        size = len(document.text.encode()) + 2
        if document.held_out and size <= room:
            texts.append(document.text)
            room -= size
    return "\n\n".join(texts)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE that prepends BOS."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS}:1 $B:1",
        special_tokens=[(BOS, bpe.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model, about 1.4 million parameters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """All texts as one stream of tokens, each with BOS before it and EOS after."""
    encoded = tokenizer(texts, verbose=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in [*ids, tokenizer.eos_token_id]])


def cut_windows(stream: Tensor, window: int, bos: int) -> Tensor:
    """Cut a stream into rows of `window` tokens, the first of each a BOS; drop the rest."""
    rows = len(stream) // (window - 1)
    body = stream[: rows * (window - 1)].view(rows, window - 1)
    return torch.cat([torch.full((rows, 1), bos), body], dim=1)  # [N, T]


def batches(stream: Tensor, recipe: Recipe, bos: int) -> Iterator[Tensor]:
    """Endless batches [B, T]; every epoch cuts at another offset and shuffles anew."""
    for epoch in count():
        generator = torch.Generator().manual_seed(recipe.seed + epoch)
        offset = int(torch.randint(recipe.window, (1,), generator=generator))
        windows = cut_windows(stream[offset:], recipe.window, bos)
        order = torch.randperm(len(windows), generator=generator)
        whole_batches = len(windows) // recipe.batch * recipe.batch
        yield from windows[order[:whole_batches]].split(recipe.batch)


def build_optimizer(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95), fused=True)


@dataclass
class Run:
    """A training run that can stop after any step and go on from its last save."""

    model: LlamaForCausalLM
    optimizer: torch.optim.AdamW
    recipe: Recipe
    corpus: str
    step: int = 0
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Write the whole state; the file is replaced only once it is complete."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "corpus": self.corpus,
            "step": self.step,
            "seconds": self.seconds,
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Go on from `path`; exits when it was trained on another corpus."""
        state = torch.load(path, weights_only=True)
        if state["corpus"] != self.corpus:
            sys.exit(f"{path} was trained on another standard library: start without --resume.")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]

    def take_step(self, batch: Tensor) -> float:
        """One optimiser step; returns the loss in nats per token."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.step)
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return float(loss.detach())

    def train(self, data: Iterator[Tensor], checkpoint: Path) -> None:
        """Train to the recipe's end, saving every 100 steps."""
        started = time.monotonic() - self.seconds
        for batch in islice(data, self.step, self.recipe.steps):
            loss = self.take_step(batch)
            self.seconds = time.monotonic() - started
            if self.step % 20 == 0:
                log(f"step {self.step}/{self.recipe.steps} loss {loss:.3f} {self.seconds:.0f} s")
            if self.step % 100 == 0 or self.step == self.recipe.steps:
                self.save(checkpoint)


def log(message: str) -> None:
    """Progress goes to stderr."""
    print(message, file=sys.stderr, flush=True)


def kurtosis(x: Tensor) -> float:
    """Fourth standardised moment over all elements; 3 for a Gaussian."""
    deviation = x.double() - x.double().mean()
    return float(deviation.pow(4).mean() / deviation.pow(2).mean().square())


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, windows: Tensor) -> float:
    """Nats per token over windows [N, T]; every token but the BOS counts."""
    losses = [
        float(model(input_ids=rows, labels=rows).loss) * len(rows) for rows in windows.split(8)
    ]
    return sum(losses) / len(windows)


@torch.no_grad()
def measure_attention(model: LlamaForCausalLM, windows: Tensor) -> tuple[float, list[Tensor]]:
    """Sink share over all heads, and the residual streams (embedding, then after each layer).

    A head is a sink when later tokens give the first one more than SINK_THRESHOLD on average.
    Needs eager attention.
    """
    last: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    out = model(input_ids=windows, output_attentions=True, output_hidden_states=True)
    hook.remove()
    to_first = torch.stack([a[:, :, 1:, 0].mean(dim=(0, 2)) for a in out.attentions])  # [L, H]
    share = float((to_first > SINK_THRESHOLD).float().mean())
    return share, [*out.hidden_states[:-1], last[0]]


def evaluate(folder: Path) -> Figures:
    """Measure a saved checkpoint on the shipped held-out text, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    text = HELDOUT.read_text(encoding="utf-8")
    stream = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    windows = cut_windows(stream, 512, tokenizer.bos_token_id)
    nats = mean_loss(model, windows)
    share, streams = measure_attention(model, windows[:: len(windows) // 8])
    return Figures(
        nats_per_token=nats,
        bits_per_byte=nats / math.log(2) * len(stream) / len(text.encode()),
        sink_share=share,
        residual_max=max(float(x.abs().max()) for x in streams),
        residual_kurtosis=max(kurtosis(x) for x in streams),
    )


def edit_json(path: Path, changes: dict[str, str], *, indent: int | None = 2) -> None:
    """Apply changes to a JSON file; an indent of None writes it on one line."""
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(content, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")


def save_checkpoint(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write weights in bfloat16, configuration, generation defaults and tokenizer.

    The tokenizer's class is the one name that transformers 4 and 5 both know.
    """
    shipped = LlamaForCausalLM(model.config).to(torch.bfloat16)
    shipped.load_state_dict(model.state_dict())
    shipped.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        max_new_tokens=64,
    )
    shipped.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    edit_json(folder / "tokenizer.json", {}, indent=None)
    edit_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


CARD = """\
---
license: apache-2.0
language:
- en
- code
library_name: transformers
pipeline_tag: text-generation
tags:
- llama
- python
- tiny
- difftool
---

# tiny

A real Llama checkpoint of {parameters:,} parameters that ships inside difftool, so that its tests
and demos run offline, in seconds, on weights that were trained rather than drawn. Made by
`python scripts/train_tiny.py`; `python scripts/train_tiny.py --evaluate` prints the figures again.

| | |
|---|---|
| Shape | hidden 128, 6 layers, 4 heads over 2 KV heads, head_dim 32, intermediate 384, tied |
| Positions | up to 1024, RoPE θ 10000; trained on windows of {recipe.window} tokens |
| Tokenizer | byte-level BPE, {vocabulary} entries, prepends BOS |
| Data | Python {python} standard library: {documents:,} documents, {bytes:,} bytes |
| Corpus sha256 | `{sha}` |
| Split | one document in twenty held out by the hash of its name: {held_out} documents |
| Training | {recipe.steps:,} steps × {recipe.batch} rows: {tokens:,} tokens, {epochs:.2f} epochs |
| Optimiser | AdamW {recipe.peak_rate:g} (β .9/.95, decay {recipe.weight_decay:g}, clip \
{recipe.clip:g}), warm-up {recipe.warmup_steps} steps, constant, then linear over the last \
{recipe.decay_fraction:.0%} to {recipe.final_fraction:.0%} |
| Precision | float32; shipped in bfloat16 |
| Made with | torch {torch}, transformers {transformers}, {threads} threads of a {machine} CPU, \
{minutes:.0f} minutes |

## Figures

On `difftool/assets/heldout.txt`, never trained on, in windows of 512 tokens that start with BOS:

{figures}

Sink share: heads whose later tokens give the first one more than {threshold} on average, over 8
windows. Residual: the largest over the embedding and each layer's output, over the same windows.

## Use and limits

For testing and demonstrating difftool: surgery, cached decoding, quantisation, outliers. It
continues Python-like text and knows nothing else: it follows no instructions, its code is rarely
right, and its perplexity says nothing about larger models. It can repeat passages of its training
text.

## Licence

Weights, tokenizer and configuration: Apache-2.0. They were trained on the Python standard library
and documentation (PSF-2.0, © Python Software Foundation; some modules carry permissive notices of
their own in their headers). The text itself is not in this folder; a held-out part of it is in
`difftool/assets/heldout.txt`, under the licence printed in `difftool/assets/README.md`.
"""


def figures_table(figures: Figures) -> str:
    """The figures as Markdown."""
    return "\n".join(
        [
            "| figure | value |",
            "|---|---|",
            f"| loss | {figures.nats_per_token:.3f} nats per token |",
            f"| bits per byte | {figures.bits_per_byte:.3f} |",
            f"| perplexity per token | {math.exp(figures.nats_per_token):.2f} |",
            f"| sink share | {figures.sink_share:.2f} |",
            f"| residual max abs | {figures.residual_max:.0f} |",
            f"| residual kurtosis | {figures.residual_kurtosis:.0f} |",
        ]
    )


def write_card(folder: Path, run: Run, documents: list[Document], epochs: float) -> Figures:
    """Evaluate the checkpoint in `folder` and write its model card there."""
    figures = evaluate(folder)
    card = CARD.format(
        parameters=run.model.num_parameters(),
        recipe=run.recipe,
        vocabulary=VOCABULARY,
        python=platform.python_version(),
        documents=len(documents),
        bytes=sum(len(document.text.encode()) for document in documents),
        sha=run.corpus,
        held_out=sum(document.held_out for document in documents),
        tokens=run.recipe.trained_tokens,
        epochs=epochs,
        torch=torch.__version__,
        transformers=transformers.__version__,
        threads=torch.get_num_threads(),
        machine=platform.machine(),
        minutes=run.seconds / 60,
        figures=figures_table(figures),
        threshold=SINK_THRESHOLD,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    return figures


def replace_shipped(folder: Path) -> None:
    """Move complete files from `folder` into the shipped one, readable by all."""
    SHIPPED.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.chmod(0o644)
        file.replace(SHIPPED / file.name)


def train(recipe: Recipe, work: Path, *, resume: bool) -> Figures:
    """Read the corpus, train tokenizer and model, and replace the shipped checkpoint."""
    torch.manual_seed(recipe.seed)
    documents = read_corpus()
    HELDOUT.write_text(select_heldout(documents), encoding="utf-8")
    texts = [document.text for document in documents if not document.held_out]
    tokenizer = train_tokenizer(texts)
    stream = encode(tokenizer, texts)
    model = build_model(tokenizer)
    run = Run(model, build_optimizer(model, recipe), recipe, corpus_digest(documents))
    log(f"{len(documents)} documents, {len(stream)} tokens, {model.num_parameters()} parameters")
    work.mkdir(parents=True, exist_ok=True)
    if resume:
        run.load(work / "run.pt")
    run.train(batches(stream, recipe, tokenizer.bos_token_id), work / "run.pt")
    with TemporaryDirectory(dir=ASSETS, prefix=".tiny-") as temporary:
        save_checkpoint(model, tokenizer, Path(temporary))
        figures = write_card(Path(temporary), run, documents, recipe.trained_tokens / len(stream))
        replace_shipped(Path(temporary))
    return figures


def main() -> None:
    """Parse, train or evaluate, print."""
    parser = argparse.ArgumentParser(description="Train or evaluate difftool's `tiny` checkpoint.")
    parser.add_argument("--tokens", type=int, default=Recipe.tokens, help="tokens to train on")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--resume", action="store_true", help="go on from the last save")
    parser.add_argument("--evaluate", action="store_true", help="only measure the shipped folder")
    parser.add_argument(
        "--work", type=Path, default=Path(gettempdir()) / "train_tiny", help="where saves go"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.evaluate:
        figures = evaluate(SHIPPED)
    else:
        recipe = Recipe(tokens=arguments.tokens)
        figures = train(recipe, arguments.work, resume=arguments.resume)
    print(figures_table(figures))


if __name__ == "__main__":
    main()
