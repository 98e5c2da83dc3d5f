"""Any fsspec URL as a tier: a folder, memory, and S3 over HTTP against a server of this machine."""

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import pytest

from kvrelay.errors import ConfigError, StoreError
from kvrelay.kvcache.stores.fsspec import FsspecStore
from kvrelay.kvcache.stores.namespace import Namespace
from kvrelay.kvcache.stores.remote import make_store
from kvrelay.kvcache.stores.store import HEADER_BYTES
from kvrelay.types import BlockMeta
from tests.kvcache.stores.sealed_contract import NAMESPACE as SEALED_NAMESPACE
from tests.kvcache.stores.sealed_contract import SealedContract, StoredPayloads
from tests.kvcache.stores.store_contract import BLOCK_BYTES

BLOCK, NAMESPACE = 4096, b"n" * 16
META = BlockMeta(None, 16)
S3_KEY = ("tester", "a-secret-of-the-tests")


@pytest.fixture(params=["file", "memory", "s3"])
def url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/kv"
    if request.param == "memory":
        return f"memory://{secrets.token_hex(4)}/kv"
    return request.getfixturevalue("s3_url")


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory):
    """Address of `rclone serve s3`, which keeps the buckets as folders and checks every request's signature."""
    pytest.importorskip("s3fs", reason="pip install 'kvrelay[dev]': without s3fs S3 is NOT tested")
    rclone = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if rclone is None:
        pytest.skip("pip install 'kvrelay[dev]': without rclone S3 is NOT tested")
    command = [rclone, "serve", "s3", str(tmp_path_factory.mktemp("buckets")), "--addr", "127.0.0.1:0"]
    command += ["--auth-key", ",".join(S3_KEY), "--config", "", "--vfs-cache-mode", "off"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        lines = []
        for line in server.stderr:
            lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        assert lines and found, f"rclone did not serve: {lines}"
        drain = threading.Thread(target=server.stderr.read)  # or its messages would fill the pipe and stop it
        drain.start()
        yield found[0]
        server.terminate()
        drain.join()


@pytest.fixture
def s3_url(s3_server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", S3_KEY[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", S3_KEY[1])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return f"s3://bucket{secrets.token_hex(4)}/kv?endpoint_url={s3_server}"


@pytest.fixture
def open_store():
    made = []

    def open_store(url, namespace=NAMESPACE, **options):
        store = FsspecStore(url, BLOCK, namespace, **options)
        store.start()
        made.append(store)
        return store

    yield open_store
    for store in made:
        store.close()


def blocks(count):
    return [secrets.token_bytes(16) for _ in range(count)], [
        memoryview(secrets.token_bytes(BLOCK)) for _ in range(count)
    ]


def room(count):
    return [memoryview(bytearray(BLOCK)) for _ in range(count)]


def test_what_is_stored_comes_back_also_to_another_process(url, open_store):
    hashes, data = blocks(20)
    assert open_store(url).store(hashes, data, [META] * 20) == [True] * 20
    store, into = open_store(url), room(21)
    asked = [*hashes, b"unknown--unknown"]
    assert store.contains(asked) == [True] * 20 + [False]
    assert store.load(asked, into) == [True] * 20 + [False]
    assert into[:20] == data
    store.delete(hashes[:1])
    assert store.contains(hashes[:2]) == [False, True]
    assert open_store(url, namespace=b"m" * 16).load(hashes, room(20)) == [False] * 20
    assert store.stats().loaded_blocks == 20


def test_a_bucket_opened_with_another_secret_is_told_at_the_start(s3_url, open_store):
    with pytest.raises(StoreError, match="cannot be written"):
        FsspecStore(s3_url, BLOCK, NAMESPACE, key=S3_KEY[0], secret="another").start()
    open_store(s3_url, key=S3_KEY[0], secret=S3_KEY[1])  # the negative control


@pytest.fixture
def mute_url(s3_url, s3_server):
    """A server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        yield s3_url.replace(s3_server, f"http://127.0.0.1:{mute.getsockname()[1]}")


def test_a_server_that_does_not_answer_costs_one_timeout_at_the_start(mute_url):
    """Without ours s3fs tries for minutes, and the test would time out; so in the next one."""
    with pytest.raises(StoreError, match="cannot be written"):
        FsspecStore(mute_url, BLOCK, NAMESPACE, timeout_s=0.5).start()


@pytest.mark.parametrize("call", ["contains", "load", "store", "delete"])
def test_a_server_that_no_longer_answers_is_a_miss(call, s3_url, mute_url, open_store):
    store, (hashes, data) = open_store(s3_url, timeout_s=0.5), blocks(3)
    assert store.store(hashes, data, [META] * 3) == [True] * 3
    store._fs, _ = fsspec.core.url_to_fs(mute_url.partition("?")[0], **FsspecStore(mute_url, BLOCK, NAMESPACE)._options)
    if call == "store":
        assert store.store(*blocks(1), [META]) == [False]
    else:
        assert getattr(store, call)(hashes, *([room(3)] if call == "load" else [])) in ([False] * 3, None)
    assert store._is_backing_off()


def test_what_was_changed_there_is_refused_and_deleted(url, open_store):
    store = open_store(url)
    hashes, data = blocks(3)
    store.store(hashes, data, [META] * 3)
    paths = [store._path(digest) for digest in hashes]
    changed = bytearray(store._fs.cat_file(paths[0]))
    changed[-1] ^= 1
    store._fs.pipe_file(paths[0], bytes(changed))
    store._fs.pipe_file(paths[1], store._fs.cat_file(paths[1])[:-10])
    assert store.load(hashes, room(3)) == [False, False, True]
    assert store.stats().corrupt_blocks == 2
    assert store.contains(hashes) == [False, False, True]


def test_without_the_checksum_the_changed_block_would_have_been_served(tmp_path, open_store, monkeypatch):
    """The negative control of the test above."""
    store, (hashes, data), into = open_store(f"file://{tmp_path}"), blocks(1), room(1)
    store.store(hashes, data, [META])
    changed = bytearray(store._fs.cat_file(store._path(hashes[0])))
    changed[-1] ^= 1
    store._fs.pipe_file(store._path(hashes[0]), bytes(changed))
    monkeypatch.setattr(
        "kvrelay.kvcache.stores.store._checksum", lambda bare, data: int.from_bytes(changed[48:56], "little")
    )
    assert store.load(hashes, into) == [True]
    assert into != data


class Broken:
    """A file system that has gone away."""

    def __init__(self):
        self.num_calls = 0

    def __getattr__(self, name):
        def fail(*args, **kwargs):
            self.num_calls += 1
            raise ConnectionError("the bucket does not answer")

        return fail


def test_a_place_that_fails_is_a_miss_and_then_left_alone_until_it_is_back(tmp_path, open_store):
    now = [0.0]
    store = open_store(f"file://{tmp_path}", clock=lambda: now[0], num_threads=1)
    hashes, data = blocks(5)
    store.store(hashes, data, [META] * 5)
    whole, store._fs = store._fs, Broken()
    assert store.load(hashes, room(5)) == [False] * 5
    assert store.contains(hashes) == [False] * 5
    assert store._fs.num_calls == 1, "a place that fails was asked again"
    store._fs, now[0] = whole, 60.0
    assert store.load(hashes, room(5)) == [True] * 5


def test_calls_run_side_by_side_but_no_more_than_allowed(tmp_path, open_store):
    store = open_store(f"file://{tmp_path}", num_threads=3)
    meeting, running, most, lock = threading.Barrier(3), [0], [0], threading.Lock()

    class Slow:
        def exists(self, path):
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            meeting.wait(timeout=30.0)  # all three are inside
            with lock:
                running[0] -= 1
            return True

    store._fs = Slow()
    assert store.contains([secrets.token_bytes(16) for _ in range(9)]) == [True] * 9
    assert most[0] == 3


def test_a_place_that_cannot_be_written_is_told_at_the_start(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreError, match="cannot be written"):
        FsspecStore(f"file://{tmp_path}/file/kv", BLOCK, NAMESPACE).start()


def test_a_missing_package_is_told_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(StoreError, match=r"pip install 'kvrelay\[s3\]'"):
        FsspecStore("s3://bucket/kv", BLOCK, NAMESPACE).start()


@pytest.mark.parametrize("url", ["s3://", "bucket/kv", "", "cluster "])
def test_a_url_that_cannot_be_is_told(url):
    with pytest.raises(ConfigError, match=r"cache\.remote"):
        make_store(url, BLOCK, Namespace.of({}))


class ObjectPayloads(StoredPayloads):
    """Objects of an fsspec file system, without the envelope's header."""

    def __init__(self, url):
        import fsspec

        self._fs, self._root = fsspec.core.url_to_fs(url.partition("?")[0], **FsspecStore(url, 1, b"")._options)

    def _objects(self):
        self._fs.invalidate_cache()
        return {path: self._fs.cat_file(path) for path in self._fs.find(self._root)}

    def everything(self):
        return b"".join(path.encode() + data for path, data in self._objects().items())

    def read(self):
        return {path: data[HEADER_BYTES:] for path, data in self._objects().items()}

    def write(self, name, payload):
        self._fs.pipe_file(name, self._fs.cat_file(name)[:HEADER_BYTES] + payload)


class TestSealedFsspecStore(SealedContract):
    @pytest.fixture
    def open_sealed(self, url):
        stores = []

        def open_sealed(codec):
            stores.append(make_store(url, BLOCK_BYTES, SEALED_NAMESPACE, codec=codec))
            stores[-1].start()
            return stores[-1]

        yield open_sealed
        for store in stores:
            store.close()

    @pytest.fixture
    def payloads(self, url):
        return ObjectPayloads(url)
