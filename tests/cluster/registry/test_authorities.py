"""A rotation over real TLS: every link is accepted before, during and after it, and the old authority ends with it."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayError

from kvrelay.cluster.registry import authorities as module
from kvrelay.cluster.registry.authorities import AuthorityKeeper, hold_authorities
from kvrelay.config import settings_from
from kvrelay.errors import AuthenticationFailed, ConnectionLost
from kvrelay.plane import connection as plane
from kvrelay.plane.tls import ClusterTls, Identity, cluster_tls, issue

pytestmark = pytest.mark.pure

SECRET, HOST = b"the cluster's secret", "127.0.0.1"
DAY = timedelta(days=1)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Ray's key-value store, without Ray."""
    kept: dict[str, bytes] = {}

    def put(key: str, value: bytes, *, namespace: str) -> None:
        kept[key] = value

    monkeypatch.setattr(module, "_internal_kv_put", put)
    monkeypatch.setattr(module, "_internal_kv_get", lambda key, *, namespace: kept.get(key))
    monkeypatch.setattr(module, "_LOOK_S", 0.001)
    monkeypatch.setattr(module, "_RETRY_S", 0.001)
    return kept


@dataclass
class Registry:
    """The registry's actor, as far as processes call it: it can be killed, and starts again with what it has stored."""

    now_s: float = 0.0
    is_up: bool = True
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.authorities = self
        self.start()

    def start(self) -> None:
        self.keeper, self.is_up = AuthorityKeeper("registry", lambda: self.now_s), True

    async def remote(self, process: str, held: Any) -> Any:
        if not self.is_up:
            raise RayError("the registry has died")
        self.calls.append(process)
        return await self.keeper.exchange(process, held)


@dataclass
class Member:
    """One process: it serves and it connects."""

    tls: ClusterTls
    port: int


@contextlib.asynccontextmanager
async def member(registry: Registry, name: str) -> AsyncIterator[Member]:
    async def echo(connection: Any) -> None:
        while True:
            await connection.send(await connection.receive())

    tls = ClusterTls.derived(SECRET)
    holding = await hold_authorities(registry, name, HOST, tls)
    server = plane.Server(echo, SECRET, tls=tls)
    try:
        yield Member(tls, await server.start(HOST))
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        await server.aclose()


async def exchanged(port: int, tls: ClusterTls) -> bytes:
    """One frame there and back."""
    connection = await plane.connect(HOST, port, SECRET, tls=tls)
    try:
        await connection.send(b"a block")
        return await connection.receive()
    finally:
        await connection.aclose()


def stolen() -> ClusterTls:
    """A certificate of the first authority, just issued with its private key; it trusts whatever it meets."""
    now = datetime.now(UTC)
    identity = issue(SECRET, now - DAY, now + DAY)
    return ClusterTls(lambda _: identity)


async def ended(registry: Registry, *members: Member, during: Any = None) -> None:
    """Time passes until the rotation has ended. At every look all members talk to each other."""
    async with asyncio.timeout(60):
        while True:
            for one in members:
                for other in members:
                    assert await exchanged(one.port, other.tls) == b"a block"
            report = await registry.keeper.report()
            if during is not None:
                during(report)
            if report.number % 3 == 0 and not report.waiting_for:
                return
            registry.now_s += 2.0
            calls = len(registry.calls)
            while registry.is_up and len(registry.calls) < calls + len(members):
                await asyncio.sleep(0.001)


async def test_links_are_accepted_throughout_and_the_old_authority_is_refused_from_the_end_on(store: dict[str, bytes]):
    registry, numbers = Registry(), set[int]()
    async with member(registry, "a") as a, member(registry, "b") as b:
        standing = await plane.connect(HOST, a.port, SECRET, tls=b.tls)
        assert await exchanged(a.port, stolen()) == b"a block"  # without a rotation it is accepted
        assert await registry.keeper.rotate(has_files=False)
        await ended(registry, a, b, during=lambda report: numbers.add(report.number))
        assert numbers == {1, 2, 3}
        with pytest.raises((AuthenticationFailed, ConnectionLost)):
            await exchanged(a.port, stolen())
        async with member(registry, "late") as late:  # it starts with the new one
            assert await exchanged(a.port, late.tls) == await exchanged(late.port, b.tls) == b"a block"
        await standing.send(b"still here")  # its keys need no certificate any more
        assert await standing.receive() == b"still here"
        await standing.aclose()


async def test_a_server_with_an_old_certificate_is_not_trusted_afterwards(store: dict[str, bytes]):
    registry = Registry()
    async with member(registry, "a") as a:
        server = plane.Server(lambda connection: connection.receive(), SECRET, tls=stolen())
        port = await server.start(HOST)
        await (await plane.connect(HOST, port, SECRET, tls=a.tls)).aclose()
        await registry.keeper.rotate(has_files=False)
        await ended(registry, a)
        with pytest.raises(AuthenticationFailed, match="certificate"):
            await plane.connect(HOST, port, SECRET, tls=a.tls)
        await server.aclose()


async def test_a_rotation_outlives_the_registry_and_a_second_one_waits_for_its_end(store: dict[str, bytes]):
    registry = Registry()
    async with member(registry, "a") as a, member(registry, "b") as b:
        await registry.keeper.rotate(has_files=False)
        assert not await registry.keeper.rotate(has_files=False)

        def kill(report: Any) -> None:
            if report.number == 2 and report.waiting_for:
                registry.is_up = False
            elif not registry.is_up:
                registry.start()

        await ended(registry, a, b, during=kill)
        assert (await registry.keeper.report()).number == 3
        first = a.tls
        assert await registry.keeper.rotate(has_files=False)
        await ended(registry, a, b)
        assert (await registry.keeper.report()).number == 6 and first is a.tls


async def test_a_process_takes_part_only_once_the_registry_has_answered(
    store: dict[str, bytes], caplog: pytest.LogCaptureFixture
):
    registry = Registry()
    registry.is_up = False
    starting = asyncio.create_task(hold_authorities(registry, "a", HOST, ClusterTls.derived(SECRET)))
    with caplog.at_level(logging.WARNING):
        while "cannot take" not in caplog.text:
            await asyncio.sleep(0)
    assert not starting.done()
    registry.is_up = True
    (await starting).cancel()


# ---- the operator's own files


def written(folder: Path, identity: Identity) -> None:
    for name, content in (("tls.crt", identity.certificate), ("tls.key", identity.key), ("ca.crt", identity.authority)):
        (folder / name).write_bytes(content)


def of_operator(secret: bytes, days: float = 1) -> Identity:
    now = datetime.now(UTC)
    return issue(secret, now - 9 * DAY, now + days * DAY)


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[list[Path]]:
    """A folder for each of two hosts."""
    made = [tmp_path / "first", tmp_path / "second"]
    for folder in made:
        folder.mkdir()
        written(folder, of_operator(b"the operator's first authority"))
    yield made


async def test_with_files_of_the_operator_every_process_reads_them_again_and_says_what_it_holds(
    store: dict[str, bytes], folders: list[Path]
):
    from kvrelay.cluster.commands.status import rotation_faults

    registry, holding = Registry(), []
    for number, folder in enumerate(folders):
        tls = cluster_tls(settings_from({"cluster": {"tls": True, "tls_dir": str(folder)}}).cluster, SECRET)
        holding.append(await hold_authorities(registry, f"p{number}", f"10.0.0.{number}", tls))

    async def read() -> list[str]:
        assert await registry.keeper.rotate(has_files=True)
        while (report := await registry.keeper.report()).waiting_for:
            await asyncio.sleep(0.01)
        return rotation_faults(
            {
                name: {"host": one.host, "problem": one.problem, "authority": one.authority}
                for name, one in report.processes.items()
            }
        )

    before = (await registry.keeper.report()).processes["p0"].authority
    for folder in folders:
        written(folder, of_operator(b"the operator's second authority"))
    assert await read() == []
    assert (await registry.keeper.report()).processes["p0"].authority != before
    written(folders[1], of_operator(b"a third authority", days=-1))
    (fault,) = await read()
    assert fault.startswith("host 10.0.0.1: cluster.tls_dir: tls.crt in") and "expired on" in fault
    for task in holding:
        task.cancel()
