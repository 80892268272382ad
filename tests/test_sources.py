"""What a user may name, against folders, a hub cache and a small hub built on disk."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from difftool.aliases import ALIASES
from difftool.errors import UserError
from difftool.sources import list_models, open_source

SMOLLM2 = Path(__file__).parents[1] / ".cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
WHOLE = {
    "config.json": '{"model_type": "llama"}',
    "model.safetensors": "weights",
    "tokenizer.json": "{}",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, an empty working folder, and a hub address where nobody listens."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "hub"


def fill_cache(cache: Path, hub_id: str, files: dict[str, str], *, ref: str = "main") -> Path:
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / ref).write_text(COMMIT)
    return write_files(repository / "snapshots" / COMMIT, files)


def write_files(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


def refusal(text: str, **options: object) -> str:
    with pytest.raises(UserError) as caught, open_source(text, **options):  # type: ignore[arg-type]
        pass
    return str(caught.value)


def test_a_folder_is_named_after_itself_and_leaves_no_path_in_its_id() -> None:
    folder = write_files(Path("base"), WHOLE)
    with open_source("./base/") as source:
        assert (source.name, source.id, source.kind) == ("base", "base", "folder")
        assert source.path == folder.resolve() and source.revision is None


def test_a_folder_wins_over_an_alias_but_not_over_tiny() -> None:
    for name in ("gpt2", "tiny"):
        write_files(Path(name), WHOLE)
    with open_source("gpt2") as source:
        assert source.kind == "folder"
    with open_source("./tiny") as source:
        assert source.kind == "folder"
    with open_source("tiny") as source:
        assert source.kind == "tiny"


def test_tiny_needs_no_network() -> None:
    with open_source("tiny", allow_network=False) as source:
        assert (source.path / "config.json").is_file()
        assert (source.name, source.id, source.kind) == ("tiny", "tiny", "tiny")


def test_a_missing_folder_is_refused_with_its_closest_neighbour() -> None:
    write_files(Path("models/base-model"), WHOLE)
    assert "Did you mean 'base-model'?" in refusal("./models/base-modle")
    assert "There is no folder ./nowhere/at/all" in refusal("./nowhere/at/all")
    assert "There is no folder ~nobody/x" in refusal("~nobody/x")


def test_a_misspelt_alias_is_refused_with_the_right_one() -> None:
    message = refusal("lama-8b")
    assert "'llama-8b'" in message and "difftool models" in message


@pytest.mark.parametrize("text", ["", "x" * 5000, "no such thing", "a--b/../c", "org/name@a..b"])
def test_nonsense_is_refused(text: str) -> None:
    assert refusal(text)


def test_a_weight_file_is_not_a_checkpoint() -> None:
    write_files(Path("base"), WHOLE | {"pytorch_model.bin": ""})
    assert "Name its folder: base" in refusal("base/model.safetensors")
    assert "pickle" in refusal("base/pytorch_model.bin")


def test_a_folder_of_gguf_files_is_refused_naming_one_of_them() -> None:
    write_files(Path("quants"), {"a.gguf": "", "b.gguf": ""})
    assert "Name one of them: quants/a.gguf" in refusal("quants")


def test_a_revision_of_a_folder_is_refused() -> None:
    write_files(Path("base"), WHOLE)
    assert "no revisions" in refusal("base", revision="main")


@pytest.mark.parametrize("text", ["qwen3-0.6b", "Qwen3-0.6B", "Qwen/Qwen3-0.6B"])
def test_a_cached_model_opens_without_a_network_under_each_of_its_names(
    text: str, cache: Path
) -> None:
    snapshot = fill_cache(cache, "Qwen/Qwen3-0.6B", WHOLE)
    with open_source(text) as source:
        assert (source.name, source.id) == ("Qwen3-0.6B", "Qwen/Qwen3-0.6B")
        assert (source.kind, source.revision, source.path) == ("hub", COMMIT, snapshot)


def test_a_revision_is_found_in_the_cache_by_branch_and_by_commit(cache: Path) -> None:
    snapshot = fill_cache(cache, "org/name", WHOLE, ref="step-1000")
    for text in ("org/name@step-1000", f"org/name@{COMMIT}"):
        with open_source(text) as source:
            assert source.path == snapshot
    with open_source("org/name", revision="step-1000") as source:
        assert source.path == snapshot
    assert "cannot be fetched" in refusal("org/name@main")
    assert "Two revisions" in refusal("org/name@main", revision="step-1000")


def test_the_cache_follows_hf_home_as_well(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_cache(cache, "org/name", WHOLE)
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(cache.parent))
    with open_source("org/name") as source:
        assert source.revision == COMMIT


def test_a_cached_model_without_a_shard_is_refused_naming_it(cache: Path) -> None:
    names = [f"model-{n}-of-2.safetensors" for n in (1, 2)]
    index = json.dumps({"weight_map": {"a": names[0], "b": names[1]}})
    files = {"config.json": "{}", "model.safetensors.index.json": index, names[0]: ""}
    fill_cache(cache, "org/name", files)
    assert "without model-2-of-2.safetensors" in refusal("org/name")


@pytest.mark.parametrize("index", ["{", "[]", "{}"])
def test_a_cached_model_with_a_broken_index_does_not_count(index: str, cache: Path) -> None:
    name = "model.safetensors.index.json"
    fill_cache(cache, "openai-community/gpt2", {"config.json": "{}", name: index})
    assert all(row.local is None for row in list_models())
    assert refusal("gpt2")


def test_cached_weights_without_a_tokenizer_are_used_when_the_hub_is_away(cache: Path) -> None:
    files = {name: text for name, text in WHOLE.items() if name != "tokenizer.json"}
    snapshot = fill_cache(cache, "org/name", files)
    with open_source("org/name") as source:
        assert source.path == snapshot


@pytest.mark.parametrize("reason", ["nobody listens", "offline mode", "network not allowed"])
def test_without_a_network_the_refusal_is_quick_and_says_what_to_run(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "offline mode":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    started = time.monotonic()
    message = refusal("llama-8b", allow_network=reason != "network not allowed")
    assert time.monotonic() - started < 10  # one attempt; three would each wait for a time limit
    assert "`hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B --include" in message


class Hub(BaseHTTPRequestHandler):
    """The four requests of the hub's protocol that a download makes, for one model."""

    def __init__(self, files: dict[str, str], refuse: dict[str, tuple[int, str]], *rest: object):
        self.files, self.refuse = files, refuse
        super().__init__(*rest)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        for part, (status, code) in self.refuse.items():
            if part in path:
                self.answer(status, b"{}", {"X-Error-Code": code})
                return
        if "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(text), "oid": f"{hash(text):x}"}
                for name, text in self.files.items()
            ]
            self.answer(200, json.dumps(tree).encode())
            return
        if path.startswith("/api/"):
            listing = [{"rfilename": name} for name in self.files]
            info = {"id": "org/name", "sha": COMMIT, "siblings": listing}
            self.answer(200, json.dumps(info).encode())
            return
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{name.replace("/", "-")}"'}
        self.answer(200, self.files[name].encode(), headers)

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


Serve = Callable[..., None]


@pytest.fixture
def serve(online: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    servers = []

    def start(files: dict[str, str], refuse: dict[str, tuple[int, str]] | None = None) -> None:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, files, refuse or {}))
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        servers.append(server)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_download_takes_safetensors_json_and_tokenizer_files_only(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = WHOLE | {"chat_template.jinja": "{{ 1 }}", "LICENSE.txt": "free"}
    other = ["pytorch_model.bin", "modeling_x.py", "original/model.safetensors"]
    other += ["consolidated.safetensors", "original/params.json", "README.md"]
    serve(wanted | dict.fromkeys(other, "x"))
    with open_source("org/name") as source:
        found = {str(p.relative_to(source.path)) for p in source.path.rglob("*") if p.is_file()}
        assert found == set(wanted)
        assert source.revision == COMMIT
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with open_source("org/name") as source:
        assert source.revision == COMMIT


def test_a_half_downloaded_model_is_completed(serve: Serve, cache: Path) -> None:
    fill_cache(cache, "org/name", {"config.json": WHOLE["config.json"]})
    serve(WHOLE)
    with open_source("org/name") as source:
        assert (source.path / "model.safetensors").read_text() == "weights"


@pytest.mark.parametrize(
    ("refuse", "expected"),
    [
        (
            {"/resolve/": (403, "GatedRepo")},
            ["licence", "huggingface.co/org/name", "hf auth login"],
        ),
        ({"/api/": (401, "GatedRepo")}, ["licence", "HF_TOKEN"]),
        ({"/api/": (404, "RepoNotFound")}, ["no such model on the hub", "private"]),
        ({"/revision/": (404, "RevisionNotFound")}, ["no revision 'v9'"]),
        ({"/api/": (403, "")}, ["refused", "HF_TOKEN"]),
    ],
)
def test_each_refusal_of_the_hub_says_what_to_do(
    refuse: dict[str, tuple[int, str]], expected: list[str], serve: Serve
) -> None:
    serve(WHOLE, refuse)
    message = refusal("org/name@v9")
    assert all(part in message for part in expected), message


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["pytorch_model.bin"], "pickles only"),
        (["small.Q4.gguf"], "hf download org/name small.Q4.gguf"),
        (["consolidated.safetensors"], "no model.safetensors"),
    ],
)
def test_a_repository_without_readable_weights_is_refused_before_any_download(
    names: list[str], expected: str, serve: Serve, cache: Path
) -> None:
    serve(dict.fromkeys(["config.json", *names], "{}"))
    assert expected in refusal("org/name")
    assert not list(cache.rglob("config.json"))


def test_the_list_says_which_models_are_on_this_machine(cache: Path) -> None:
    gpt2 = fill_cache(cache, "openai-community/gpt2", WHOLE)
    fill_cache(cache, "Qwen/Qwen3-0.6B", {"config.json": "{}"})
    mine = fill_cache(cache, "me/my--model", WHOLE)
    rows = list_models()
    assert [row.alias for row in rows] == [*ALIASES, ""]
    assert {row.hub_id: row.local for row in rows if row.local} == {
        "openai-community/gpt2": gpt2,
        "me/my--model": mine,
    }
    assert rows[-1].family == "llama"


def test_no_alias_hides_another_and_none_is_called_tiny() -> None:
    tails = [alias.hub_id.split("/")[1].casefold() for alias in ALIASES.values()]
    assert len(set(tails)) == len(tails)
    assert all(ALIASES[tail].hub_id.casefold().endswith(tail) for tail in tails if tail in ALIASES)
    assert "tiny" not in {*ALIASES, *tails}


def test_listing_and_the_cache_need_neither_torch_nor_huggingface_hub(cache: Path) -> None:
    fill_cache(cache, "openai-community/gpt2", WHOLE)
    program = (
        "import sys; from difftool.sources import list_models, open_source; list_models()\n"
        "with open_source('gpt2'): pass\n"
        "print({'torch', 'transformers', 'huggingface_hub'} & {*sys.modules})"
    )
    root = str(Path(__file__).parents[1])
    run = partial(subprocess.run, capture_output=True, text=True, check=True)
    done = run([sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r})\n{program}"])
    assert done.stdout.strip() == "set()"


def write_gguf(path: Path, *, without: str = "") -> Path:
    """Write a Llama of two layers with random float32 weights and a vocabulary of bytes."""
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(2)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    characters = [chr(code) for code in range(0x21, 0x7F)] + ["\u0120", "he"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<s>", "</s>", *characters])
    writer.add_token_types([3, 3, *[1] * len(characters)])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    shapes = {"token_embd": (len(characters) + 2, 16), "output_norm": (16,)}
    layer = {"attn_norm": (16,), "ffn_norm": (16,), "attn_q": (16, 16), "attn_k": (8, 16)}
    layer |= {"attn_v": (8, 16), "attn_output": (16, 16), "ffn_gate": (32, 16)}
    layer |= {"ffn_up": (32, 16), "ffn_down": (16, 32)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    generator = numpy.random.default_rng(0)
    for name, shape in shapes.items():
        if name != without:
            tensor = generator.standard_normal(shape, dtype=numpy.float32)
            writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("dtype", "stored"), [(None, "bfloat16"), ("float32", "float32")])
def test_a_gguf_file_becomes_a_clean_folder_that_lasts_as_long_as_the_source(
    dtype: str | None, stored: str
) -> None:
    path = write_gguf(Path("pocket.Q8.gguf"))
    with open_source(str(path), dtype=dtype) as source:
        assert (source.name, source.id, source.kind) == ("pocket.Q8", "pocket.Q8.gguf", "gguf")
        config = json.loads((source.path / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert (config["model_type"], config["dtype"]) == ("llama", stored)
        assert not {"quantization_config", "_name_or_path", "_model_name_or_path"} & {*config}
        assert (source.path / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"
        assert json.loads((source.path / "generation_config.json").read_text())["eos_token_id"] == 1
        modes = {file.stat().st_mode for file in source.path.iterdir()}
        assert len(modes) == 1
        assert not any(str(Path.cwd()) in file.read_text() for file in source.path.glob("*.json"))
    assert not source.path.exists()


def test_the_weights_of_a_gguf_file_arrive_unchanged() -> None:
    gguf = pytest.importorskip("gguf")
    from safetensors import safe_open

    path = write_gguf(Path("pocket.gguf"))
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    with (
        open_source(str(path), dtype="float32") as source,
        safe_open(source.path / "model.safetensors", "np") as weights,
    ):
        pairs = {"token_embd": "embed_tokens", "blk.1.attn_v": "layers.1.self_attn.v_proj"}
        for theirs, ours in pairs.items():
            found = weights.get_tensor(f"model.{ours}.weight")
            assert (found == stored[f"{theirs}.weight"]).all()


def test_the_temporary_folder_goes_when_the_work_fails() -> None:
    path = write_gguf(Path("pocket.gguf"))
    with pytest.raises(ZeroDivisionError), open_source(str(path)) as source:
        raise ZeroDivisionError
    assert not source.path.exists()


@pytest.mark.parametrize("damage", ["empty", "no magic", "cut header", "cut data", "text"])
def test_a_damaged_gguf_file_is_refused(damage: str) -> None:
    path = write_gguf(Path("pocket.gguf"))
    content = path.read_bytes()
    spoilt = {
        "empty": b"",
        "no magic": b"GGML" + content[4:],
        "cut header": content[:600],
        "cut data": content[: len(content) // 2],
        "text": content.replace(b"bos_token_id", b"bos\xfftoken_id"),
    }
    path.write_bytes(spoilt[damage])
    assert "pocket.gguf cannot be read as a GGUF model" in refusal(str(path))


def test_a_gguf_file_that_lacks_a_tensor_is_refused() -> None:
    path = write_gguf(Path("pocket.gguf"), without="blk.1.attn_q")
    assert "model.layers.1.self_attn.q_proj.weight" in refusal(str(path))


def test_a_gguf_file_without_the_gguf_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("pocket.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "`pip install gguf`" in refusal("pocket.gguf")


def test_a_missing_gguf_file_and_an_unknown_dtype_are_refused() -> None:
    Path("pocket.gguf").write_bytes(b"GGUF")
    assert "Did you mean 'pocket.gguf'?" in refusal("poket.gguf")
    assert "Did you mean 'bfloat16'?" in refusal("pocket.gguf", dtype="bfloat61")


@pytest.mark.real
@pytest.mark.skipif(not SMOLLM2.is_file(), reason="run `python scripts/fetch_smollm2.py` first")
def test_smollm2_from_its_gguf_file_knows_the_capital_of_france() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with open_source(str(SMOLLM2)) as source:
        model = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source.path)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        generated = model.generate(**prompt, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(generated[0, prompt["input_ids"].shape[1] :]) == " Paris."
    assert tokenizer.chat_template
