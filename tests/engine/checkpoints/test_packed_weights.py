"""Packed weights that workers share: the same tokens as from a worker's own memory, and files that are wrong."""

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kvrelay.engine.checkpoints import loading, packed_weights
from kvrelay.engine.checkpoints.loading import load_model
from kvrelay.engine.checkpoints.tiny import TINY_CONFIGS, tiny_checkpoint
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.step.build import make_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.environment import cache_dir
from kvrelay.kernels.common.quant_scheme import Scheme
from kvrelay.kernels.cpu import linear
from kvrelay.kernels.cpu.backend import CpuBackend
from kvrelay.kernels.oracle.reference import ReferenceBackend
from kvrelay.plane.messages import Sampling, SequenceRequest

INT4, INT8 = Scheme(4), Scheme(8)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of this test, and no weight too small to be shared."""
    own, compiled = tmp_path / "cache", cache_dir() / "native"
    own.mkdir()
    (own / "native").symlink_to(compiled)  # kernels are not compiled anew
    monkeypatch.setenv("KVRELAY_CACHE", str(own))
    monkeypatch.setattr(loading, "LEAST_SHARED_BYTES", 0)
    return own / "packed"


@pytest.fixture
def backend():
    made = CpuBackend(1)
    if made.compiled_kernels is None:
        pytest.skip("no compiled kernels here")
    # whatever is fastest on this processor: weights of plain torch are not packed, and so not shared
    made._packers[torch.bfloat16] = ("native", made.compiled_kernels.pack_linear)
    return made


@pytest.fixture
def folder(tmp_path):
    return tiny_checkpoint("llama", tmp_path / "llama")


def greedy(model, backend, count=12):
    """Tokens of a prompt, computed in chunks and then decoded."""
    engine = make_engine(model, backend, EngineConfig(token_budget=24, max_running=8, kv_memory_bytes=4 << 20))
    prompt = [(13 * place) % 300 for place in range(60)]
    sampling = Sampling(max_tokens=count, temperature=0.0, ignore_eos=True)
    engine.add(
        SequenceRequest(
            request_id="a", token_ids=prompt, num_prompt_tokens=len(prompt), block_hashes=[], sampling=sampling
        )
    )
    tokens = []
    while engine.scheduler.has_work:
        tokens += [token for output in engine.step().outputs for token in output.token_ids]
    engine.close()
    assert len(tokens) == count
    return tokens


def is_mapped(model):
    """Whether the weights lie in a file of the cache folder, by the process's own table of mappings."""
    address = model._embedding.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, rest = line.partition("-")
        if int(first, 16) <= address < int(rest.split()[0], 16):
            assert ("/packed/" not in line) or rest.split()[1] == "r--s", line
            return "/packed/" in line
    raise AssertionError("no mapping")


@pytest.mark.parametrize(
    ("family", "dtype", "scheme"),
    [
        *((family, torch.float32, None) for family in ("llama", "gemma2", "qwen3_moe", "qwen2_moe", "deepseek_v3")),
        *((family, torch.bfloat16, scheme) for family in ("llama", "qwen3_moe") for scheme in (None, INT8, INT4)),
        ("deepseek_v3", torch.float32, INT8),
    ],
    ids=str,
)
def test_shared_weights_give_the_tokens_of_own_ones(cache, backend, tmp_path, family, dtype, scheme):
    assert family in TINY_CONFIGS
    folder = tiny_checkpoint(family, tmp_path / family)
    own = load_model(folder, backend, dtype, quantization=scheme)
    assert not cache.exists() and not is_mapped(own)
    models = [load_model(folder, backend, dtype, quantization=scheme, is_shared=True) for _ in range(2)]
    assert len(list(cache.glob("*.weights"))) == 1 and all(map(is_mapped, models))
    expected = greedy(own, backend)
    assert [greedy(model, backend) for model in models] == [expected, expected]
    assert [model.weight_error for model in models] == [own.weight_error] * 2


def test_a_worker_reads_no_weight_of_the_checkpoint_that_is_packed_already(cache, backend, folder, monkeypatch):
    load_model(folder, backend, torch.float32, is_shared=True)
    read, names = loading.WeightReader.read, []
    monkeypatch.setattr(
        loading.WeightReader, "read", lambda self, name, *rest: (names.append(name), read(self, name, *rest))[1]
    )
    load_model(folder, backend, torch.float32, is_shared=True)
    assert names and all("norm" in name for name in names)


def test_weights_that_onednn_packs_are_shared_too(cache, backend, folder):
    if not linear.can_place():
        pytest.skip("this torch cannot place them, or the processor has no bfloat16")
    backend._packers[torch.bfloat16] = ("onednn", linear.OneDnnLinear)
    expected = greedy(load_model(folder, backend, torch.bfloat16), backend)
    for _ in range(2):
        model = load_model(folder, backend, torch.bfloat16, is_shared=True)
        assert is_mapped(model) and greedy(model, backend) == expected


def damaged_in_the_middle(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.unlink()
    path.write_bytes(data)


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-100])


def another_models(path):
    other = tiny_checkpoint("qwen2", path.parents[2] / "other")
    load_model(other, CpuBackend(1), torch.float32, is_shared=True)
    [found] = set(path.parent.glob("*.weights")) - {path}
    path.write_bytes(found.read_bytes())


@pytest.mark.parametrize("damage", [damaged_in_the_middle, cut_off, another_models, Path.unlink])
def test_a_file_that_is_wrong_is_packed_again(cache, backend, folder, caplog, damage):
    expected = greedy(load_model(folder, backend, torch.float32, is_shared=True), backend)
    [path] = cache.glob("*.weights")
    right = path.read_bytes()
    damage(path)
    with caplog.at_level(logging.WARNING):
        model = load_model(folder, backend, torch.float32, is_shared=True)
    assert is_mapped(model) and greedy(model, backend) == expected and path.read_bytes() == right
    assert [record.getMessage().count("is packed again") for record in caplog.records] == [1] * (damage != Path.unlink)


def test_every_byte_is_compared_once_after_each_boot(cache, backend, folder, monkeypatch, tmp_path):
    checks, check = [], packed_weights.MappedWeights.check
    monkeypatch.setattr(packed_weights.MappedWeights, "check", lambda self: (checks.append(1), check(self)))
    for _ in range(3):
        load_model(folder, backend, torch.float32, is_shared=True)
    assert not checks, "whoever writes a file knows what is in it"
    boot = tmp_path / "boot"
    boot.write_text("another boot")
    monkeypatch.setattr(packed_weights, "_BOOT_ID", boot)
    for _ in range(3):
        load_model(folder, backend, torch.float32, is_shared=True)
    assert len(checks) == 1


def test_a_checkpoint_that_changes_in_place_is_packed_anew(cache, backend, folder):
    """Also where the digest's samples are the same."""
    before = greedy(load_model(folder, backend, torch.float32, is_shared=True), backend)
    path = folder / "model.safetensors"
    reader = loading.WeightReader(folder, ModelSpec.from_folder(folder))
    at = reader._where["layers.0.mlp.down_proj.weight"]
    data = bytearray(path.read_bytes())
    data[at.begin : at.end] = bytes(at.end - at.begin)
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "model_digest", lambda folder: "the same")
        own = greedy(load_model(folder, backend, torch.float32), backend)
        names = {loading.shared_name_of(folder, reader._spec, backend, torch.float32, None)}
        os.utime(path, ns=(1, 1))
        names.add(loading.shared_name_of(folder, reader._spec, backend, torch.float32, None))
    assert len(names) == 2
    assert greedy(load_model(folder, backend, torch.float32, is_shared=True), backend) == own != before


class FullDisk:
    """A file that takes so many bytes."""

    def __init__(self, file, room):
        self._file, self._room = file, room

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def write(self, data):
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(data)


def test_on_a_full_disk_a_worker_has_its_own_weights_and_says_so_once(cache, backend, folder, caplog, monkeypatch):
    opened = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda self, *how, **more: (
            FullDisk(opened(self, *how, **more), 50_000) if self.suffix == ".part" else opened(self, *how, **more)
        ),
    )
    with caplog.at_level(logging.WARNING):
        model = load_model(folder, backend, torch.float32, is_shared=True)
    assert not is_mapped(model) and greedy(model, backend)
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    assert {path.suffix for path in cache.iterdir()} == {".lock"}


def test_without_a_folder_to_write_to_a_worker_has_its_own_weights(cache, backend, folder, caplog):
    cache.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert not is_mapped(load_model(folder, backend, torch.float32, is_shared=True))
    assert len(caplog.records) == 1 and "not shared" in caplog.text


LOAD = """
import sys, torch
from pathlib import Path
from kvrelay.engine.checkpoints import loading
from kvrelay.kernels.cpu.backend import CpuBackend
loading.LEAST_SHARED_BYTES = 0
loading.load_model(Path(sys.argv[1]), CpuBackend(1), torch.float32, is_shared=True)
"""


def test_workers_that_start_together_write_one_file(cache, backend, folder, monkeypatch):
    packed, pack = [], packed_weights.WrittenWeights.finish
    monkeypatch.setattr(packed_weights.WrittenWeights, "finish", lambda self: (packed.append(1), pack(self)))
    threads = [
        threading.Thread(target=load_model, args=(folder, CpuBackend(1), torch.float32), kwargs={"is_shared": True})
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(packed) == 1
    subprocess.run([sys.executable, "-c", LOAD, str(folder)], check=True, timeout=120)
    assert len(list(cache.glob("*.weights"))) == 1 and not list(cache.glob("*.part"))


def test_files_that_were_not_used_for_a_week_go_when_another_is_written(cache, backend, folder, tmp_path):
    load_model(folder, backend, torch.float32, is_shared=True)
    [note], long_ago = cache.glob("*.checked"), time.time() - 8 * 86400
    parts = [cache / "killed.part", cache / "running.part"]
    for path in (note, *parts):
        path.touch()
    for path in (note, parts[0]):
        os.utime(path, (long_ago, long_ago))
    load_model(tiny_checkpoint("qwen2", tmp_path / "b"), backend, torch.float32, is_shared=True)
    assert not note.exists() and len(list(cache.glob("*.weights"))) == 1
    assert [path.exists() for path in parts] == [False, True]


def test_small_models_and_backends_without_such_packing_share_nothing(cache, backend, folder, monkeypatch):
    load_model(folder, ReferenceBackend("cpu"), torch.float32, is_shared=True)
    monkeypatch.setattr(loading, "LEAST_SHARED_BYTES", 32 << 20)
    load_model(folder, backend, torch.float32, is_shared=True)
    assert not cache.exists()
