"""What went wrong elsewhere with references to KV, on real workers: every one is refused and the request recovers.

vLLM #52234: blocks that are unknown, out of range, already used, stale after re-use or expired were read all the same,
and another prompt's text came with HTTP 200. CVE-2026-94622: incomplete parameters of a transfer ended the decode
engine.
"""

import asyncio

import msgspec
import pytest

from kvrelay.cluster.launch.local import local_cluster
from kvrelay.decode.target import KvTarget
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.kvtransfer.protocol.messages import NONCE_BYTES, open_ticket, seal
from kvrelay.plane import messages as wire
from tests.cluster.live.test_faults import collect, every_pool_adds_up, nothing_held, oracle, request, settings

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def changed(**fields):
    """The ticket with other content, sealed by the cluster itself: what a bug of ours would send."""

    def change(ticket, secret, _cluster):
        content = open_ticket(ticket, secret)
        return seal(msgspec.structs.replace(content, **fields), secret)

    return change


def out_of_range(ticket, secret, cluster):
    content = open_ticket(ticket, secret)
    beyond = cluster.inside[0].ends.target.plane.memory.layout.num_blocks
    blocks = [beyond + i for i in range(len(content.target_blocks))]
    return seal(msgspec.structs.replace(content, target_blocks=blocks), secret)


def stale(ticket, secret, cluster):
    """Another sequence has been given one of the blocks since the grant."""
    block = open_ticket(ticket, secret).target_blocks[0]
    cluster.inside[0].thread.engine.pool._ledger.generations[block] += 1
    return ticket


def partial(ticket, secret, _cluster):
    """Sealed, but with half of its fields."""
    whole = msgspec.msgpack.decode(ticket[32:])
    names = sorted(whole)[: len(whole) // 2]
    body = msgspec.msgpack.encode({name: whole[name] for name in names})
    from kvrelay.kvtransfer.protocol.messages import _mac

    return _mac(body, secret) + body


CASES = {
    "unknown": changed(nonce=b"\1" * NONCE_BYTES),
    "out of range": out_of_range,
    "another epoch": changed(target_epoch="0"),
    "another request's": changed(request_id="somebody"),
    "stale after re-use": stale,
    "foreign": lambda ticket, secret, _: seal(open_ticket(ticket, secret), b"another cluster's secret"),
    "partial": partial,
    "cut off": lambda ticket, secret, _: ticket[: len(ticket) // 2],
    "empty": lambda ticket, secret, _: b"",
    "garbage": lambda ticket, secret, _: bytes(range(256)),
}


def forge_first_ticket(monkeypatch, cluster, forge):
    """The first Prefill that the ingress sends carries what `forge` makes of its ticket. Returns what was sent."""
    forged, send, secret = [], cluster.dispatcher.links.send, cluster.secret

    def forging(worker_id, message):
        if isinstance(message, wire.Prefill) and message.ticket is not None and not forged:
            forged.append(forge(message.ticket, secret, cluster))
            message = msgspec.structs.replace(message, ticket=forged[0])
        return send(worker_id, message)

    monkeypatch.setattr(cluster.dispatcher.links, "send", forging)
    return forged


async def pids(cluster):
    return {info.worker_id: info.epoch for info, _ in cluster.dispatcher.workers.live_workers()}


async def test_every_bad_reference_is_refused_and_the_request_gets_its_own_tokens(folder, monkeypatch):
    async with local_cluster(settings(), folder) as cluster:
        lives = await pids(cluster)
        for number, (name, forge) in enumerate(CASES.items()):
            wanted = request(name, 60 + number, max_tokens=8)
            with monkeypatch.context() as patch:
                forged = forge_first_ticket(patch, cluster, forge)
                retries = cluster.dispatcher.stats.retries
                assert await collect(cluster, wanted) == oracle(folder, wanted), name
            assert forged, name
            assert cluster.dispatcher.stats.retries == retries + 1, name
        assert await pids(cluster) == lives  # nobody died of it
        await nothing_held(cluster)
        await every_pool_adds_up(cluster)


async def test_a_ticket_that_was_used_is_refused_for_another_prompt(folder, monkeypatch):
    """The very case of #52234: the blocks of one request under the name of another."""
    async with local_cluster(settings(), folder) as cluster:
        used = forge_first_ticket(monkeypatch, cluster, lambda ticket, secret, _: ticket)
        first = request("first", 70, max_tokens=8)
        assert await collect(cluster, first) == oracle(folder, first)
        monkeypatch.undo()

        def again(ticket, secret, _):
            old = open_ticket(used[0], secret)
            return seal(msgspec.structs.replace(old, request_id=open_ticket(ticket, secret).request_id), secret)

        forge_first_ticket(monkeypatch, cluster, again)
        second = request("second", 71, max_tokens=8)
        assert await collect(cluster, second) == oracle(folder, second)
        assert cluster.dispatcher.stats.retries == 1
        assert cluster.inside[0].ends.target.plane.stats().refusals_by_reason["used"] == 1
        await nothing_held(cluster)


async def test_a_ticket_that_expired_on_its_way_is_refused_and_recomputed(folder, monkeypatch):
    monkeypatch.setitem(KvTarget.__init__.__kwdefaults__, "lease_s", 2.0)
    async with local_cluster(settings(), folder) as cluster:
        target, send, held = cluster.inside[0].ends.target.plane, cluster.dispatcher.links.send, []

        def late(worker_id, message):
            if isinstance(message, wire.Prefill) and not held:
                held.append((worker_id, message))
                return cluster.dispatcher.links.get(worker_id)  # as if it had been sent
            return send(worker_id, message)

        monkeypatch.setattr(cluster.dispatcher.links, "send", late)
        wanted = request("late", 80, max_tokens=8)
        task = asyncio.create_task(collect(cluster, wanted))
        async with asyncio.timeout(60):
            while not target.stats().expired_leases:
                await asyncio.sleep(0.02)
        send(*held[0])  # now it comes
        assert await task == oracle(folder, wanted)
        assert target.stats().expired_leases == 1
        await nothing_held(cluster)
        await every_pool_adds_up(cluster)
