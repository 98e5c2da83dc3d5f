"""Pairing: fingerprints are compared and paths are measured before the first request, with blocks taken for it."""

import asyncio
import dataclasses

import pytest

from kvrelay.errors import TransportError
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.kvtransfer.transports.memory import LOOPBACK, LoopbackReader
from kvrelay.prefill.source_link import TargetAddress


def address(target, **changes):
    return dataclasses.replace(TargetAddress("decode-0", "d1", "127.0.0.1", target.port), **changes)


async def lending_pair(kv, transport="auto", **options):
    source = await kv.source(transport, probe_buffers=kv.lib.FreeBlocks(1, 2, 3, 4))
    target = await kv.target(transport, probe_buffers=kv.lib.FreeBlocks(60, 61, 62, 63), **options)
    return source, target


def assert_all_given_back(*sides):
    for side in sides:
        assert side.probe_buffers.taken == [] and len(side.probe_buffers.free) == 4


async def test_every_path_is_measured_and_the_blocks_go_back(kv):
    source, target = await lending_pair(kv)
    report = await source.pair(address(target))
    assert report.ok
    assert len(report.paths) >= 2 and sum(path.is_chosen for path in report.paths) == 1
    assert all(path.bytes_per_s > 0 and path.latency_s > 0 for path in report.paths if not path.problem)
    assert_all_given_back(source, target)
    assert not kv.lib.regions(target.memory)[:, :60].any()
    assert source.stats().transfers == target.stats().transfers == 0  # a probe is no transfer


async def test_a_pair_serves_requests_over_the_path_that_was_chosen(kv):
    source, target = await lending_pair(kv)
    (chosen,) = [path.path for path in (await source.pair(address(target))).paths if path.is_chosen]
    assert (await kv.send(source, target, "r1", [7, 8], [9, 10]).commit(b"")).transport == chosen


async def test_a_path_that_corrupts_or_fails_shows_in_the_report_and_is_not_chosen(kv):
    class Lying(LoopbackReader):
        def copy(self, copies, landed=None):
            super().copy(copies)
            self._bytes[copies.target_offset] ^= 1
            if landed is not None:
                landed(copies.total_bytes)

    class Broken(LoopbackReader):
        async def connect(self, descriptor):
            raise TransportError("no route to host")

    kinds = {"lying": Lying, "broken": Broken, "good": LoopbackReader}
    table = {name: Transport(name, LOOPBACK.make_exporter, kind, LOOPBACK.why_not) for name, kind in kinds.items()}
    source = await kv.source(transports=table, probe_buffers=kv.lib.FreeBlocks(1, 2, 3, 4))
    target = await kv.target(transports=table, probe_buffers=kv.lib.FreeBlocks(60, 61, 62, 63))
    paths = {path.path: path for path in (await source.pair(address(target))).paths}
    assert "did not arrive" in paths["lying"].problem
    assert "no route to host" in paths["broken"].problem
    assert [name for name, path in paths.items() if path.is_chosen] == ["good"]
    assert_all_given_back(source, target)


async def test_a_stuck_probe_keeps_its_blocks_until_it_has_ended(kv, monkeypatch):
    reads = []

    class Stuck(LoopbackReader):
        def read(self, copies, landed=None):
            reads.append(asyncio.get_running_loop().create_future())
            return reads[-1]

    monkeypatch.setattr("kvrelay.kvtransfer.paths.probes._PATIENCE_S", 0.05)
    monkeypatch.setattr("kvrelay.kvtransfer.paths.probes._GRACE_S", 0.05)
    table = {"loopback": Transport("loopback", LOOPBACK.make_exporter, Stuck, LOOPBACK.why_not)}
    source = await kv.source(transports=table, probe_buffers=kv.lib.FreeBlocks(1, 2, 3, 4))
    target = await kv.target(transports=table, probe_buffers=kv.lib.FreeBlocks(60, 61, 62, 63))
    report = await source.pair(address(target))
    assert "did not end" in report.paths[0].problem
    assert len(target.probe_buffers.taken) == 4
    reads[0].set_result(None)
    while target.probe_buffers.taken:
        await asyncio.sleep(0)
    assert_all_given_back(source, target)


@pytest.mark.parametrize(
    ("field", "value"), [("model", "another"), ("hash_seed", "another"), ("head_dim", 64), ("num_layers", 5)]
)
async def test_a_misfit_names_the_field_and_the_remedy(kv, field, value):
    misfit = dataclasses.replace(kv.lib.FINGERPRINT, **{field: value})
    source, target = await kv.source(fingerprint=misfit), await kv.target()
    report = await source.pair(address(target))
    assert not report.ok
    assert report.reason == "fingerprint"
    assert field in report.detail
    assert report.remedy


async def test_a_pair_without_a_common_transport_or_with_unlike_checks_is_a_misfit(kv):
    source, target = await kv.source("tcp"), await kv.target("shm")
    assert (await source.pair(address(target))).reason == "transport"
    source, target = await kv.source(checks="off"), await kv.target()
    report = await source.pair(address(target))
    assert (report.reason, report.ok) == ("checksum", False)
    assert "transfer.checks" in report.remedy


async def test_a_restarted_or_dead_decode_worker_is_told_apart_from_a_misfit(kv):
    source, target = await kv.pair()
    assert (await source.pair(address(target, epoch="d0"))).reason == "stale_epoch"
    await target.aclose()
    gone = await source.pair(address(target))
    assert (gone.ok, gone.reason) == (False, "PeerLost")


async def test_a_busy_pool_lends_nothing_and_the_pair_is_good_all_the_same(kv):
    source = await kv.source("tcp", probe_buffers=kv.lib.FreeBlocks())
    target = await kv.target("tcp", probe_buffers=kv.lib.FreeBlocks())
    report = await source.pair(address(target))
    assert report.ok
    assert [(path.path, path.bytes_per_s) for path in report.paths] == [("tcp", 0.0)]
