"""Shared memory is handed to processes that know the secret, and only the pool that was described is mapped."""

import msgspec
import pytest

from kvrelay.errors import TransportError
from kvrelay.kvtransfer.transports.memory import SHM


@pytest.fixture
async def exporter(kv):
    exporter = SHM.make_exporter(kv.lib.allocate(fill=1), kv.lib.SECRET, "")
    await exporter.start()
    yield exporter
    await exporter.aclose()


async def test_a_process_without_the_secret_gets_no_pool(kv, exporter):
    reader = SHM.make_reader(kv.lib.allocate(), b"another secret", "")
    with pytest.raises(TransportError, match="refused to hand over"):
        await reader.connect(exporter.describe())
    await reader.aclose()


async def test_another_memory_than_the_described_one_is_not_mapped(kv, exporter):
    told = msgspec.msgpack.decode(exporter.describe())
    told["inode"] += 1
    reader = SHM.make_reader(kv.lib.allocate(), kv.lib.SECRET, "")
    with pytest.raises(TransportError, match="something else"):
        await reader.connect(msgspec.msgpack.encode(told))
    await reader.aclose()
