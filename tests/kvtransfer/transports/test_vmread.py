"""vmread: who may read whose memory, and that nobody else's is ever taken for it."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvrelay.kvtransfer.mover.process_memory import NotTheSource
from kvrelay.kvtransfer.plans.copy_plan import plan_copies
from kvrelay.kvtransfer.transports import vmread
from kvrelay.kvtransfer.transports.base import TransportError
from kvrelay.kvtransfer.transports.vmread import VMREAD


@pytest.fixture(params=[2, 40], ids=["small reads", "large reads"])
async def sides(kv, request):
    """`exporter(secret)`, `reader(secret)` over two pools of this process; closed at the end."""
    lib, made = kv.lib, []
    sources, targets = list(range(5, 5 + request.param)), list(range(request.param))[::-1]

    class Sides:
        source, target = lib.allocate(fill=1), lib.allocate()

        async def exporter(self, secret=lib.SECRET):
            made.append(exporter := VMREAD.make_exporter(self.source, secret, "127.0.0.1"))
            await exporter.start()
            return exporter

        def reader(self, secret=lib.SECRET):
            made.append(reader := VMREAD.make_reader(self.target, secret, "127.0.0.1"))
            return reader

        def copies(self):
            return plan_copies(lib.LAYOUT, lib.LAYOUT, sources, targets, lib.ALL_LAYERS)

        def assert_read(self):
            assert np.array_equal(lib.regions(self.target)[:, targets], lib.regions(self.source)[:, sources])

    yield Sides()
    for side in made:
        await side.aclose()


def changed(descriptor, **fields):
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(descriptor), **fields})


async def test_a_pool_is_read_where_it_lies(sides):
    reader = sides.reader()
    await reader.connect((await sides.exporter()).describe())
    await reader.read(sides.copies())
    sides.assert_read()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"host": "another"}, "another host"),
        ({"host": ""}, "another host"),
        ({"pid_namespace": 1}, "another PID namespace"),
        ({"pid": 0}, "another PID namespace"),  # would be this process
        ({"pid": -1}, "another PID namespace"),
        ({"pid": 2**22}, "is gone"),  # above the largest pid that there is
        ({"nonce": b"of somebody else"}, "is not the source"),
        ({"nonce_address": 8192}, "Bad address"),
        ({"nonce_address": "text"}, "malformed"),
    ],
)
async def test_a_descriptor_of_something_else_is_refused_with_the_reason(sides, fields, why):
    descriptor = (await sides.exporter()).describe()
    with pytest.raises(TransportError, match=why):
        await sides.reader().connect(changed(descriptor, **fields))


async def test_a_source_that_has_stopped_exporting_is_read_no_more(sides):
    exporter, reader = await sides.exporter(), sides.reader()
    descriptor = exporter.describe()
    await reader.connect(descriptor)
    await exporter.aclose()
    with pytest.raises(NotTheSource):
        await reader.read(sides.copies())
    with pytest.raises(NotTheSource):
        await sides.reader().connect(descriptor)
    assert reader.in_flight == 0


@pytest.mark.slow
async def test_a_killed_source_is_told_as_gone(kv, sides):
    peer = await kv.process("source", transport="vmread")
    target = await kv.target("vmread")
    descriptors = []
    reader_of = target.make_reader

    def remember(name, memory):
        reader = reader_of(name, memory)
        connect = reader.connect

        async def connect_and_tell(descriptor):
            descriptors.append(descriptor)
            await connect(descriptor)

        reader.connect = connect_and_tell
        return reader

    target.make_reader = remember
    peer.tell("open", request_id="r1", ticket=target.grant("r1", 0, [1], 1).hex())
    peer.tell("announce", request_id="r1", blocks=[1], layers=(0, 4))
    peer.tell("commit", request_id="r1")
    await target.event("commit", "r1")
    reader = sides.reader()
    await reader.connect(descriptors[0])
    await reader.read(sides.copies())  # a control: it can be read while it lives
    await peer.aclose()
    with pytest.raises(TransportError, match=f"process {peer.pid}, is gone"):
        await reader.read(sides.copies())


# ---- the source's consent (Yama)


@pytest.fixture
def yama(monkeypatch):
    """A kernel that asks for the source's consent: reads are refused until it is given. What was asked of it."""
    asked = []
    read_nonce = vmread._read_nonce

    def read(source):
        if asked[-1:] != [True]:
            raise PermissionError(1, "Operation not permitted")
        read_nonce(source)

    monkeypatch.setattr(vmread, "_yama_scope", lambda: 1)
    monkeypatch.setattr(vmread, "_read_nonce", read)
    monkeypatch.setattr(vmread, "set_ptracer", lambda *, is_anyone: asked.append(is_anyone))
    return asked


async def test_a_source_consents_to_whoever_proves_the_secret_and_withdraws_at_its_end(sides, yama):
    exporter = await sides.exporter()
    for _ in range(2):
        reader = sides.reader()
        await reader.connect(exporter.describe())
        await reader.read(sides.copies())
    sides.assert_read()
    assert yama == [True]
    await exporter.aclose()
    assert yama == [True, False]


async def test_without_the_secret_there_is_no_consent(sides, yama, caplog):
    exporter = await sides.exporter()
    with pytest.raises(TransportError, match="did not consent"):
        await sides.reader(b"another cluster's secret").connect(exporter.describe())
    assert yama == []
    assert "without the cluster's secret" in caplog.text


@pytest.mark.parametrize("scope", [0, 2, 3])
async def test_no_consent_is_given_where_it_does_not_help(sides, yama, monkeypatch, scope):
    monkeypatch.setattr(vmread, "_yama_scope", lambda: scope)
    exporter = await sides.exporter()
    with pytest.raises(TransportError, match=f"ptrace_scope is {scope}"):
        await sides.reader().connect(exporter.describe())
    assert yama == []


async def test_a_source_that_needs_no_asking_gives_no_consent(sides, monkeypatch):
    monkeypatch.setattr(vmread, "_yama_scope", lambda: 1)
    monkeypatch.setattr(vmread, "set_ptracer", lambda **_: pytest.fail("nobody asked"))
    reader = sides.reader()
    await reader.connect((await sides.exporter()).describe())
    await reader.read(sides.copies())
    sides.assert_read()


_ROOT = Path(__file__).resolve().parents[3]
_OTHER_USER = """
import asyncio, mmap, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from kvrelay.kvtransfer.transports import vmread
from kvrelay.types import KvLayout, KvMemory
layout = KvLayout(1, 1, 16, 2, 32, "bfloat16")
memory = KvMemory(layout, 0, "cpu", None, memoryview(mmap.mmap(-1, layout.num_bytes)), None)
reader = vmread.VMREAD.make_reader(memory, b"a secret of the test cluster", "")
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
try:
    asyncio.run(reader.connect(bytes.fromhex(sys.argv[2])))
except vmread.TransportError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="must become another user")
async def test_another_users_process_is_refused_with_the_kernels_rules(sides):
    descriptor = (await sides.exporter()).describe()
    command = [sys.executable, "-c", _OTHER_USER, str(_ROOT), descriptor.hex()]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert "Operation not permitted" in done.stdout, done.stdout + done.stderr
    assert "another user" in done.stdout


def test_a_pool_outside_host_memory_cannot_use_it(kv):
    memory = kv.lib.allocate()
    assert VMREAD.why_not(memory) is None
    on_gpu = type(memory)(memory.layout, memory.address, "cuda:0", None, None, None)
    assert "host memory" in VMREAD.why_not(on_gpu)


def test_a_system_without_the_call_is_told(kv, monkeypatch):
    monkeypatch.setattr("kvrelay.kvtransfer.mover.process_memory._libc", SimpleNamespace())
    assert "process_vm_readv" in VMREAD.why_not(kv.lib.allocate())
