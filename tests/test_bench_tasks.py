"""Tasks: the same figures as the harness's own command, from data and YAMLs that cannot do harm."""

import copy
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bench_subject import silent, subject_of
from tiny_models import VOCABULARY, make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from difftool.bench.charts import draw_charts
from difftool.bench.local_tasks import KINDS, TaskFolder, split_pair
from difftool.bench.measures import tasks
from difftool.bench.options import BenchOptions
from difftool.bench.subject import LanguageModel, Subject, open_subject
from difftool.errors import UserError

pytestmark = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason='pip install "difftool[eval]" for lm_eval'
)

ARC = [
    {"query": "Question: Which is a metal?", "choices": ["wood", "iron", "a leaf"], "gold": 1},
    {"query": "Question: What do bees make?", "choices": ["honey", "milk and tea"], "gold": 0},
    {"query": "Question: What is frozen water?", "choices": ["steam", "fire", "ice"], "gold": 2},
]
PIQA = [
    {"query": "Question: To dry a cup,\n", "choices": ["use a cloth.", "use a lake."], "gold": 0},
    {"query": "Question: To open a door,\n", "choices": ["paint it.", "turn the knob."], "gold": 1},
]
WINOGRANDE = [
    {
        "context_options": ["The cup fell off the shelf as the cup", "The cup fell as the shelf"],
        "continuation": "was tilted.",
        "gold": 1,
    },
    {
        "context_options": ["Ann thanked Eve because Ann", "Ann thanked Eve because Eve"],
        "continuation": "had helped.",
        "gold": 1,
    },
    {
        "context_options": ["Tom hid from Ben since Tom", "Tom hid from Ben since Ben"],
        "continuation": "was afraid.",
        "gold": 0,
    },
]
LAMBADA = [
    {"context": "def close(self):\n    self", "continuation": "file"},
    {"context": "He put the key into the lock and opened the", "continuation": "door"},
    {"context": "The cat sat on the mat. Then the", "continuation": "cat"},
]
HELLASWAG = [
    {
        "query": "A man cracks an egg. He",
        "choices": ["stirs it.", "paints it on a wall."],
        "gold": 0,
    },
    {"query": "A dog sees a ball. It", "choices": ["reads.", "runs after it."], "gold": 1},
]
DATA = {
    "arc_easy": ARC,
    "piqa": PIQA,
    "winogrande": WINOGRANDE,
    "lambada_openai": LAMBADA,
    "hellaswag": HELLASWAG,
}
SPLITS = ("train", "validation", "test")
UNSHOWN = "never to be shown"


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file of each kind; its name holds what is a pattern to datasets."""
    place = tmp_path / "tasks [1]"
    for name, rows in DATA.items():
        write_rows(place / f"{name}.jsonl", rows)
    return place


@pytest.fixture(scope="module")
def tiny_subject() -> Iterator[Subject]:
    options = BenchOptions(measures=("tasks",), dtype="float32", device="cpu")
    with open_subject("tiny", "tiny", options) as subject:
        yield subject


def run(subject: Subject, folder: Path, *names: str, **options: Any) -> tasks.Result:
    chosen = BenchOptions(measures=("tasks",), tasks=names, tasks_dir=folder, **options)
    return tasks.measure(subject, chosen, silent)


def values(result: tasks.Result) -> dict[tuple[str, str], float]:
    return {(figure.task, figure.metric): figure.value for figure in result.figures}


def log_likelihood(subject: Subject, context: str, answer: str, *, bos: bool = True) -> float:
    """Log-likelihood of an answer after a context, in one row, from the full softmax in float64."""
    tokenizer = subject.require_tokenizer()
    start = [tokenizer.bos_token_id] if bos else []
    before = start + tokenizer(context, add_special_tokens=False)["input_ids"]
    ids = start + tokenizer(context + answer, add_special_tokens=False)["input_ids"]
    scores = subject.model.logits(torch.tensor([ids]))[0].double().log_softmax(-1)
    return math.fsum(scores[i - 1, ids[i]].item() for i in range(len(before), len(ids)))


def share(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    return sum(one == other for one, other in zip(found, wanted, strict=True)) / len(wanted)


def test_every_kind_scores_what_a_softmax_by_hand_scores(
    tiny_subject: Subject, folder: Path
) -> None:
    found = values(run(tiny_subject, folder, *DATA))

    def best(contexts: list[str], answers: list[str], lengths: list[int]) -> int:
        scores = [
            log_likelihood(tiny_subject, context, f" {answer}") / length
            for context, answer, length in zip(contexts, answers, lengths, strict=True)
        ]
        return scores.index(max(scores))

    def choose(rows: list[dict[str, Any]], prompt: str, *, normed: bool) -> float:
        picks = []
        for row in rows:
            context = prompt.format(row["query"].rstrip())
            lengths = [len(choice) if normed else 1 for choice in row["choices"]]
            picks.append(best([context] * len(lengths), row["choices"], lengths))
        return share(picks, [row["gold"] for row in rows])

    for normed, metric in ((False, "acc"), (True, "acc_norm")):
        assert found["arc_easy", metric] == choose(ARC, "{}\nAnswer:", normed=normed)
        assert found["piqa", metric] == choose(PIQA, "{}\nAnswer:", normed=normed)
        assert found["hellaswag", metric] == choose(HELLASWAG, "{}", normed=normed)
    picks = [best(row["context_options"], [row["continuation"]] * 2, [1, 1]) for row in WINOGRANDE]
    assert found["winogrande", "acc"] == share(picks, [row["gold"] for row in WINOGRANDE])
    words = [log_likelihood(tiny_subject, x["context"], f" {x['continuation']}") for x in LAMBADA]
    perplexity = math.exp(-math.fsum(words) / len(words))
    assert found["lambada_openai", "perplexity"] == pytest.approx(perplexity, rel=1e-4)


UPSTREAM = {  # the first row of each kind in the columns of the published data
    "arc/arc_easy": {
        "question": "Which is a metal?",
        "choices": {"text": ["wood", "iron", "a leaf"], "label": ["A", "B", "C"]},
        "answerKey": "B",
    },
    "piqa/piqa": {
        "goal": "To dry a cup,",
        "sol1": "use a cloth.",
        "sol2": "use a lake.",
        "label": 0,
    },
    "winogrande/default": {
        "sentence": "Ann thanked Eve because _ had helped.",
        "option1": "Ann",
        "option2": "Eve",
        "answer": "2",
    },
    "lambada/lambada_openai": {"text": "He put the key into the lock and opened the door"},
    "hellaswag/hellaswag": {
        "ctx_a": "A man cracks an egg.",
        "ctx_b": "he",
        "activity_label": "Cooking",
        "endings": ["stirs it.", "paints it on a wall."],
        "label": "0",
    },
}


@pytest.mark.parametrize("path", UPSTREAM)
def test_requests_and_metrics_are_those_of_the_harness_own_task(path: str, tmp_path: Path) -> None:
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    name = "winogrande" if "winogrande" in path else path.partition("/")[2]
    ours = dict(DATA[name][{"winogrande": 1, "lambada_openai": 1}.get(name, 0)])
    if name == "hellaswag":
        ours["query"] = f"Cooking: {ours['query']}"
    write_rows(tmp_path / f"{name}.jsonl", [ours])
    write_rows(tmp_path / "upstream.jsonl", [UPSTREAM[path]])
    folder = TaskFolder(tmp_path, trusted=False, scratch=tmp_path / "scratch")
    (config,) = folder.configurations(name)
    home = Path(lm_eval.tasks.__file__).parent
    place = tmp_path / "upstream"
    shutil.copytree((home / path).parent, place)
    theirs = (place / f"{Path(path).name}.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = {
        "data_files": {split: str(tmp_path / "upstream.jsonl") for split in SPLITS}
    }
    data["cache_dir"] = str(tmp_path / "cache")
    theirs = re.sub("^dataset_(path|name).*$", "", theirs, flags=re.MULTILINE)
    theirs += f"dataset_path: json\ndataset_kwargs: {json.dumps(data)}\n"
    (place / f"{Path(path).name}.yaml").write_text(theirs, encoding="utf-8")
    manager = TaskManager(include_path=str(place), include_defaults=False)
    told = []
    for spec in (config, name):
        (task,) = manager.load([spec])["tasks"].values()
        task.set_config("num_fewshot", 0)
        task.build_all_requests(limit=1)
        told.append(
            (
                [request.args for request in task.instances],
                task.doc_to_text(task.task_docs[0]) if task.multiple_input else None,
                {metric: task.aggregation()[metric].__name__ for metric in task.aggregation()},
                task.higher_is_better(),
            )
        )
    assert told[0] == told[1]


def test_figures_equal_those_of_the_harness_command(
    tiny_subject: Subject, tiny: Path, folder: Path, tmp_path: Path
) -> None:
    names = ("arc_easy", "winogrande", "lambada_openai")
    ours = run(tiny_subject, folder, *names, limit=2, batch_size=1)
    theirs = run_command(tiny, write_plain_yamls(folder, names, tmp_path), names, tmp_path)
    for figure in ours.figures:
        assert figure.value == theirs[figure.task][f"{figure.metric},none"], figure
        stderr = theirs[figure.task][f"{figure.metric}_stderr,none"]
        # the bootstrap of a perplexity has 1,000 resamples here and 100,000 there
        exact = figure.metric != "perplexity"
        assert figure.stderr == (stderr if exact else pytest.approx(stderr, rel=0.1)), figure
    assert ours.add_bos
    assert {figure.documents for figure in ours.figures} == {2}


def write_plain_yamls(folder: Path, names: Sequence[str], tmp_path: Path) -> Path:
    """Write the kinds' YAMLs as the harness reads them by itself, with absolute paths."""
    place = tmp_path / "plain"
    place.mkdir()
    for name in names:
        config = yaml.safe_load((KINDS / f"{name}.yaml").read_text(encoding="utf-8"))
        write_rows(place / f"{name}.jsonl", DATA[name])
        config["dataset_kwargs"] = {"data_files": {"test": str(place / f"{name}.jsonl")}}
        (place / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return place


def run_command(
    checkpoint: Path, include: Path, names: Sequence[str], tmp_path: Path
) -> dict[str, dict[str, float]]:
    """Run `lm_eval run`, less the reading of its 13,000 own tasks; return its results."""
    program = (
        "from lm_eval.tasks import TaskManager as M; first = M.__init__; "
        "M.__init__ = lambda self, **given: first(self, **{**given, 'include_defaults': False}); "
        "from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    )
    arguments = {
        "model": "hf",
        "model_args": f"pretrained={checkpoint},add_bos_token=True,dtype=float32",
        "tasks": ",".join(names),
        "include_path": str(include),
        "limit": "2",
        "batch_size": "1",
        "device": "cpu",
        "output_path": str(tmp_path / "out"),
    }
    words = [word for name, value in arguments.items() for word in (f"--{name}", value)]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "DISABLE_MULTIPROC": "1"}
    subprocess.run(
        [sys.executable, "-c", program, "run", *words], check=True, env=environment, timeout=300
    )
    (written,) = (tmp_path / "out").rglob("results_*.json")
    return json.loads(written.read_text(encoding="utf-8"))["results"]


def test_a_figure_does_not_depend_on_batch_size_nor_on_other_tasks(
    tiny_subject: Subject, folder: Path
) -> None:
    alone = [
        run(tiny_subject, folder, name, batch_size=1) for name in ("arc_easy", "lambada_openai")
    ]
    together = values(run(tiny_subject, folder, "lambada_openai", "arc_easy", batch_size=3))
    for result in alone:
        for key, value in values(result).items():
            assert together[key] == pytest.approx(value, rel=1e-4)  # rounding of float32
    again = run(tiny_subject, folder, "lambada_openai", "arc_easy", batch_size=3)
    assert values(again) == together, "the same run gives the same bits"


def test_the_readme_example_runs(tiny_subject: Subject, tmp_path: Path) -> None:
    text = (KINDS / "README.md").read_text(encoding="utf-8")
    for language, name in (("json", "capitals.jsonl"), ("yaml", "capitals.yaml")):
        (block,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
        (tmp_path / name).write_text(block, encoding="utf-8")
        if language == "yaml":
            assert len(block.splitlines()) == 5
    result = run(tiny_subject, tmp_path, "capitals")
    assert [(figure.metric, figure.documents) for figure in result.figures] == [
        ("acc", 2),
        ("acc_norm", 2),
    ]
    for kind in KINDS.glob("*.yaml"):
        assert f"`{kind.stem}.jsonl`" in text
        example = re.search(
            r"^# +(\{.*?\})$",
            kind.read_text(encoding="utf-8").replace(",\n#   ", ","),
            re.MULTILINE,
        )
        assert example, f"{kind.name} shows a line of its data"
        assert json.loads(example[1]).keys() == DATA[kind.stem][0].keys()


def test_pairs_of_texts_are_told_apart_by_what_differs(
    tiny_subject: Subject, tmp_path: Path
) -> None:
    right = ["A man sits down. he eats an apple.", "A dog runs."]
    wrong = ["A man sits down. he eats a chair.", "A dog runs. It flies."]
    (tmp_path / "my-pairs").mkdir()
    for name, lines in (("correct", right), ("wrong", wrong)):
        (tmp_path / "my-pairs" / f"{name}.txt").write_text(
            "\n".join(lines) + "\n", encoding="utf-8"
        )
    assert split_pair(right[0], wrong[0]) == {
        "query": "A man sits down. he eats",
        "choices": ["an apple.", "a chair."],
        "gold": 0,
    }
    assert split_pair(right[1], wrong[1])["choices"] == ["runs.", "runs. It flies."]
    whole = [  # what two texts share counts for neither
        log_likelihood(tiny_subject, "A", one[1:]) > log_likelihood(tiny_subject, "A", other[1:])
        for one, other in zip(right, wrong, strict=True)
    ]
    found = values(run(tiny_subject, tmp_path, "my-pairs"))
    assert found["my-pairs", "acc"] == sum(whole) / 2


def word_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of words whose ids fit the random models; nothing is put before a text."""
    words = {word: index for index, word in enumerate(f"w{i}" for i in range(VOCABULARY - 4))}
    words |= {name: len(words) + place for place, name in enumerate(("<u>", "<b>", "<e>", "<p>"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<u>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def random_subject(tokenizer: PreTrainedTokenizerBase | None, **changes: Any) -> Subject:
    return replace(subject_of(make_model("llama", **changes)), tokenizer=tokenizer)


@pytest.mark.parametrize("special", [{}, {"eos_token": "<e>"}, {"bos_token": "<b>"}])
def test_a_tokenizer_without_bos_or_padding_works_and_is_left_as_it_was(
    special: dict[str, str], tmp_path: Path
) -> None:
    rows = [{"query": "w1 w2", "choices": ["w3 w4", "w5"], "gold": 1}] * 2
    rows += [{"query": "w7 w9 w11", "choices": ["w3", "w4", "w5 w1"], "gold": 0}]
    write_rows(tmp_path / "hellaswag.jsonl", rows)
    tokenizer = word_tokenizer(**special)
    subject = random_subject(tokenizer)
    result = run(subject, tmp_path, "hellaswag")
    assert not result.add_bos
    assert tokenizer.pad_token is None and len(tokenizer) == VOCABULARY
    picks = []
    for row in rows:
        scores = [log_likelihood(subject, row["query"], f" {x}", bos=False) for x in row["choices"]]
        picks.append(scores.index(max(scores)))
    assert values(result)["hellaswag", "acc"] == share(picks, [row["gold"] for row in rows])


def test_prompts_that_are_cut_are_counted(tmp_path: Path) -> None:
    long = " ".join(f"w{i % 99}" for i in range(50))
    write_rows(
        tmp_path / "lambada_openai.jsonl",
        [{"context": long, "continuation": "w3"}, {"context": "w1", "continuation": "w2"}],
    )
    result = run(
        random_subject(word_tokenizer(), max_position_embeddings=16), tmp_path, "lambada_openai"
    )
    assert result.max_length == 16
    assert result.figures[0].truncated == 1
    (table,) = tasks.tables({"random": result})
    assert "1 requests were cut to fit" in table.note


def test_a_model_that_gives_nan_has_no_accuracy(tmp_path: Path) -> None:
    write_rows(tmp_path / "hellaswag.jsonl", [{"query": "w1", "choices": ["w2", "w3"], "gold": 0}])
    subject = random_subject(word_tokenizer())
    with torch.no_grad():
        subject.module.lm_head.weight.fill_(math.nan)
    result = run(subject, tmp_path, "hellaswag")
    assert all(math.isnan(figure.value) and figure.not_finite == 2 for figure in result.figures)
    assert math.isnan(tasks.headline(result)[0].value)


def test_the_harness_is_silent_and_its_progress_is_forwarded(
    tiny_subject: Subject, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from tqdm import tqdm

    seen: list[tuple[str, int, int]] = []
    before = (copy.copy(logging.getLogger("lm_eval").handlers), tqdm.__init__, tqdm.update)
    options = BenchOptions(measures=("tasks",), tasks=("lambada_openai",), tasks_dir=folder)
    tasks.measure(tiny_subject, options, lambda *step: seen.append(step))
    assert capfd.readouterr() == ("", "")
    assert seen[-1] == ("lambada_openai", 3, 3)
    assert (logging.getLogger("lm_eval").handlers, tqdm.__init__, tqdm.update) == before
    assert "DISABLE_MULTIPROC" not in os.environ


def write_task(folder: Path, name: str, **settings: Any) -> None:
    """Write a YAML that adds settings to arc_easy, its data beside it."""
    folder.mkdir(exist_ok=True, parents=True)
    write_rows(folder / "rows.jsonl", ARC)
    config = {
        "include": "arc_easy.yaml",
        "task": name,
        "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
        **settings,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def test_groups_and_tags_stand_for_their_tasks(tiny_subject: Subject, tmp_path: Path) -> None:
    write_task(tmp_path, "one", tag="both")
    write_task(tmp_path / "below", "two", tag=["both"], description="Think.\n")
    write_rows(tmp_path / "rows.jsonl", ARC)
    (tmp_path / "all.yaml").write_text("group: all\ntask: [two, one]\n", encoding="utf-8")
    for name, order in (("both", ["two", "one"]), ("all", ["two", "one"])):
        result = run(tiny_subject, tmp_path, name)
        assert [figure.task for figure in result.figures if figure.main] == order
    (tmp_path / "all.yaml").write_text("group: all\ntask: [two, three]\n", encoding="utf-8")
    with pytest.raises(UserError, match="all names three, which is no task"):
        run(tiny_subject, tmp_path, "all")


def test_a_group_of_the_harness_heads_with_what_it_adds_up(
    tiny_subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager

    names = ("arc_easy", "piqa", "hellaswag")
    for name in names:
        write_rows(tmp_path / "data" / f"{name}.jsonl", DATA[name])
    plain = write_plain_yamls(tmp_path, names, tmp_path)
    mean = "aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]\n"
    (plain / "inner.yaml").write_text(f"group: inner\ntask: [arc_easy, piqa]\n{mean}")
    (plain / "outer.yaml").write_text(f"group: outer\ntask: [inner, hellaswag]\n{mean}")
    manager = TaskManager(include_path=str(plain), include_defaults=False)
    monkeypatch.setattr("difftool.bench.harness.default_tasks", lambda: manager)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    options = BenchOptions(measures=(), tasks=("outer",))
    result = tasks.measure(tiny_subject, options, silent)
    (main,) = tasks.headline(result)
    found = values(result)
    right = sum(found[name, "acc"] * len(DATA[name]) for name in names)
    total = sum(len(DATA[name]) for name in names)
    assert main.name == "outer, acc" and main.value == pytest.approx(right / total)
    documents = {figure.task: figure.documents for figure in result.figures}
    assert documents["outer"] == total
    assert documents["inner"] == len(ARC) + len(PIQA)


def test_shots_come_from_the_data_and_the_seed(tiny_subject: Subject, tmp_path: Path) -> None:
    write_task(tmp_path, "shots", num_fewshot=1, fewshot_split="test")
    first, again = (run(tiny_subject, tmp_path, "shots") for _ in range(2))
    assert first == again
    assert first.figures[0].shots == 1


FUNCTION = "doc_to_text: !function code.prompt\n"
CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
CODE += "def prompt(row):\n    return row['query'] + ' ->'\n"


def test_functions_run_only_when_they_are_trusted(tiny_subject: Subject, tmp_path: Path) -> None:
    write_task(tmp_path, "coded")
    with (tmp_path / "coded.yaml").open("a", encoding="utf-8") as file:
        file.write(FUNCTION)
    (tmp_path / "code.py").write_text(CODE, encoding="utf-8")
    with pytest.raises(UserError, match=r"runs Python code: doc_to_text.*--trust-remote-code"):
        run(tiny_subject, tmp_path, "coded")
    assert not (tmp_path / "ran").exists()
    result = run(tiny_subject, tmp_path, "coded", trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    write_task(tmp_path, "plain", doc_to_text="{{query}} ->")
    plain = run(tiny_subject, tmp_path, "plain")
    assert [figure.value for figure in result.figures] == [figure.value for figure in plain.figures]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_prompt": "other.yaml:name"}, "runs Python code: use_prompt"),
        ({"class": "os.system"}, "runs Python code: class"),
        ({"metric_list": [{"metric": "./metric.py"}]}, r"has the metric './metric.py'.*acc"),
        ({"metric_list": [{"metric": "acc", "hf_evaluate": True}]}, "has the metric 'acc'"),
        ({"doc_to_text": "{{query.__class__.__mro__}}"}, "cannot be run: .*unsafe"),
        ({"dataset_path": "./evil"}, r"has the dataset_path './evil'"),
        ({"dataset_path": "pandas"}, "has the dataset_path 'pandas'"),
        ({"dataset_path": "org/name"}, "has the dataset_path 'org/name'"),  # with local data_files
        ({"dataset_kwargs": {}}, "has no data_files"),
        ({"dataset_kwargs": {"data_dir": "/"}}, "has data_dir in dataset_kwargs"),
        ({"dataset_kwargs": {"data_files": "../secret.jsonl"}}, "leads outside"),
        ({"dataset_kwargs": {"data_files": {"test": ["/etc/hostname"]}}}, "leads outside"),
        ({"dataset_kwargs": {"data_files": "link.jsonl"}}, "leads outside"),
        ({"dataset_kwargs": {"data_files": "https://host/x.jsonl"}}, "does not exist"),
        ({"dataset_kwargs": {"data_files": "*.jsonl"}}, "does not exist"),
        ({"include": "../other.yaml"}, "leads outside"),
        ({"include": "none.yaml"}, "none.yaml, which does not exist"),
        ({"include": "task.yaml"}, "includes itself"),
        ({"test_split": "train"}, "there is no 'train'"),
        ({"output_type": "poetry"}, "cannot be run: .*poetry"),
        ({"doc_to_text": "{{question}}"}, "cannot be run: 'question' is undefined"),
        ({"no_such_setting": 1}, "cannot be run: .*no_such_setting"),
    ],
)
def test_a_yaml_that_leads_outside_or_does_not_fit_is_refused(
    tiny_subject: Subject, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "tasks"
    write_task(folder, "task", **settings)
    write_rows(tmp_path / "secret.jsonl", [{"query": UNSHOWN, "choices": ["a", "b"], "gold": 0}])
    (tmp_path / "other.yaml").write_text(f"description: {UNSHOWN}\n", encoding="utf-8")
    (folder / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    with pytest.raises(UserError, match=message) as raised:
        run(tiny_subject, folder, "task")
    assert UNSHOWN not in str(raised.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"query": "Question: ?", "choices": ["a", "b"]},
            "row 4 of the task arc_easy has no 'gold'",
        ),
        ({"choices": ["a", "b"], "gold": 1}, "has no 'query'"),
        ({"query": "?", "choices": ["a", "b"], "gold": 2}, "has 2 for its answer.* 2 choices"),
        ({"query": "?", "choices": ["a", "b"], "gold": -1}, "has -1 for its answer"),
        ({"query": "?", "choices": ["a", ""], "gold": 0}, "a choice that is not text, or empty"),
    ],
)
def test_a_row_that_lacks_something_is_told_not_scored(
    tiny_subject: Subject, folder: Path, row: dict[str, Any], message: str
) -> None:
    write_rows(folder / "arc_easy.jsonl", [*ARC, row])
    with pytest.raises(UserError, match=message):
        run(tiny_subject, folder, "arc_easy")
    assert run(tiny_subject, folder, "arc_easy", limit=3).figures[0].documents == 3


@pytest.mark.parametrize("content", ["", "not json\n", '{"query": "a"\n'])
def test_data_that_cannot_be_read_are_told(
    tiny_subject: Subject, folder: Path, content: str
) -> None:
    (folder / "arc_easy.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match="the task arc_easy cannot be run"):
        run(tiny_subject, folder, "arc_easy")


def test_an_unreadable_yaml_stops_only_who_asks_for_it(tiny_subject: Subject, folder: Path) -> None:
    (folder / "broken.yaml").write_text("task: [\n", encoding="utf-8")
    (folder / "list.yaml").write_text("- 1\n", encoding="utf-8")
    assert run(tiny_subject, folder, "lambada_openai").figures
    with pytest.raises(UserError, match=r"broken\.yaml cannot be read"):
        run(tiny_subject, folder, "broken")
    with pytest.raises(UserError, match=r"list\.yaml is not a task"):
        run(tiny_subject, folder, "list")


@pytest.fixture
def few_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the harness's own tasks, which take it many seconds to find."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(
        include_path=str(Path(sys.modules["lm_eval.tasks"].__file__).parent / "arc"),
        include_defaults=False,
    )
    monkeypatch.setattr("difftool.bench.harness.default_tasks", lambda: manager)


def test_an_unknown_task_is_told_with_the_closest_one(
    tiny_subject: Subject, folder: Path, few_defaults: None
) -> None:
    with pytest.raises(UserError, match=r"unknown task 'arc_eazy'.*Did you mean 'arc_easy'"):
        run(tiny_subject, folder, "arc_eazy")
    options = BenchOptions(measures=("tasks",), tasks=("arc_chalenge",), tasks_dir=folder)
    with pytest.raises(UserError, match=r"unknown task 'arc_chalenge'.*'arc_challenge'"):
        tasks.check(options)
    tasks.check(options.model_copy(update={"tasks": ("arc_challenge", "piqa")}))


def test_a_hub_task_without_a_network_says_so(
    tiny_subject: Subject, tmp_path: Path, few_defaults: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(UserError, match="the task arc_challenge cannot be run"):
        run(tiny_subject, tmp_path, "arc_challenge")


def test_no_task_no_folder_no_tokenizer_no_torch_and_no_harness_are_told(
    tiny_subject: Subject, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="no task is named.*there are arc_easy, hellaswag"):
        run(tiny_subject, folder)
    with pytest.raises(UserError, match="nowhere does not exist"):
        run(tiny_subject, folder / "nowhere", "arc_easy")
    with pytest.raises(UserError, match="has no tokenizer"):
        run(random_subject(None), folder, "arc_easy")

    class Elsewhere:
        vocab_size = 9

        def logits(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            raise AssertionError

    other: LanguageModel = Elsewhere()
    with pytest.raises(UserError, match="does not run in torch"):
        run(replace(tiny_subject, model=other), folder, "arc_easy")
    monkeypatch.setattr("difftool.bench.harness.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "difftool\[eval\]"'):
        run(tiny_subject, folder, "arc_easy")


def test_a_tokenizer_that_ends_every_text_is_refused(folder: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = word_tokenizer(eos_token="<e>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <e>", special_tokens=[("<e>", tokenizer.eos_token_id)]
    )
    with pytest.raises(UserError, match="ends every text with"):
        run(random_subject(tokenizer), folder, "arc_easy")


def test_the_report_tells_every_figure_and_heads_with_the_first_of_each_task(
    tiny_subject: Subject, folder: Path
) -> None:
    result = run(tiny_subject, folder, "hellaswag", "lambada_openai", limit=1)
    assert [(line.name, line.better) for line in tasks.headline(result)] == [
        ("hellaswag, acc_norm", "higher"),
        ("lambada_openai, perplexity", "lower"),
    ]
    assert all(figure.stderr is None for figure in result.figures), "one document has no spread"
    (table,) = tasks.tables({"a": result, "b": result})
    assert table.columns == ("task", "metric", "documents#", "a#", "b#")
    assert table.rows[0][:3] == ("hellaswag", "acc_norm", "1 of 2")
    assert "begin with BOS" in table.note
    assert tasks.Result.model_validate_json(result.model_dump_json()) == result


def test_the_chart_shows_accuracies_and_no_perplexity(tiny_subject: Subject, folder: Path) -> None:
    result = run(tiny_subject, folder, "hellaswag", "lambada_openai", "arc_easy", limit=2)
    (chart,) = draw_charts("tasks", {"one": result, "two": result})
    for label in ("hellaswag, acc_norm", "arc_easy", "one", "two"):
        assert label in chart.svg
    assert "lambada" not in chart.svg
    assert not draw_charts("tasks", {"one": run(tiny_subject, folder, "lambada_openai", limit=1)})


@pytest.mark.real
def test_real_tasks_run_from_their_folder(tiny_subject: Subject, shared_data: Path) -> None:
    names = ("arc_easy", "piqa", "winogrande", "lambada_openai", "hellaswag-800")
    result = run(tiny_subject, shared_data / "eval", *names, limit=4)
    mains = {figure.task: figure for figure in result.figures if figure.main}
    assert {name: mains[name].all_documents for name in names} == {
        "arc_easy": 2376,
        "piqa": 1838,
        "winogrande": 1267,
        "lambada_openai": 5153,
        "hellaswag-800": 800,
    }
    assert all(figure.documents == 4 for figure in result.figures)
