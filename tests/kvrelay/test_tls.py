"""The cluster's TLS: members hear each other, the path in between reads nothing, and everybody else is told why not."""

import asyncio
import logging
import os
import ssl
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from kvrelay.config import settings_from
from kvrelay.errors import AuthenticationFailed, ConfigError, ConnectionLost, TlsMismatch
from kvrelay.plane import connection as plane
from kvrelay.plane import tls
from kvrelay.plane.tls import ClusterTls, cluster_tls, issue, tls_at

pytestmark = pytest.mark.pure


SECRET = b"the cluster's secret"
HOST, ANYWHERE = "127.0.0.1", "0.0.0.0"
DAY = timedelta(days=1)


def between(first, last, secret=SECRET):
    """A member whose certificate is valid from `first` to `last` days from now."""
    now = datetime.now(UTC)
    return issue(secret, now + first * DAY, now + last * DAY)


async def echo(connection):
    while True:
        await connection.send(await connection.receive())


@asynccontextmanager
async def serving(own, handler=echo):
    server = plane.Server(handler, SECRET, tls=own)
    port = await server.start(HOST)
    try:
        async with asyncio.timeout(60):
            yield port
    finally:
        await server.aclose()


@asynccontextmanager
async def tapped(port):
    """(port, bytes that came by so far): whoever connects there is passed on, and listened to."""
    heard, ended = bytearray(), []

    async def relay(source, target):
        while data := await source.read(1 << 16):
            heard.extend(data)
            target.write(data)
            await target.drain()
        target.close()

    async def pass_on(reader, writer):
        ended.append(asyncio.current_task())
        there, back = await asyncio.open_connection(HOST, port)
        await asyncio.gather(relay(reader, back), relay(there, writer), return_exceptions=True)

    proxy = await asyncio.start_server(pass_on, HOST, 0)
    try:
        yield proxy.sockets[0].getsockname()[1], heard
    finally:
        proxy.close()
        await asyncio.gather(*ended)


async def exchange(port, own):
    """One frame there and back."""
    connection = await plane.connect(HOST, port, SECRET, tls=own)
    try:
        await connection.send(b"the patient's name")
        return await connection.receive()
    finally:
        await connection.aclose()


@pytest.mark.parametrize("is_on", [True, False], ids=["tls", "plain"])
async def test_what_passes_by_can_be_read_only_without_tls(is_on):
    own = ClusterTls.derived(SECRET) if is_on else None
    async with serving(own) as port, tapped(port) as (door, heard):
        assert await exchange(door, own) == b"the patient's name"
    assert (b"patient" in heard) is not is_on


async def test_processes_with_one_secret_trust_each_other():
    async with serving(ClusterTls.derived(SECRET)) as port:
        assert await exchange(port, ClusterTls.derived(SECRET)) == b"the patient's name"


async def test_only_tls_1_3_is_spoken():
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode, old.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    async with serving(ClusterTls.derived(SECRET)) as port:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(HOST, port, ssl=old)


# ---- who is not let in


async def test_a_server_of_another_authority_is_not_trusted():
    async with serving(ClusterTls.derived(b"another secret")) as port:
        with pytest.raises(AuthenticationFailed, match="certificate"):
            await plane.connect(HOST, port, SECRET, tls=ClusterTls.derived(SECRET))


async def test_a_client_of_another_authority_is_refused_though_it_knows_the_secret(caplog):
    good, foreign = between(-1, 1), between(-1, 1, b"another secret")
    intruder = ClusterTls(lambda _: replace(foreign, authority=good.authority))
    await assert_refused(intruder, caplog)


async def test_a_client_without_a_certificate_is_refused(caplog):
    class Anonymous:
        is_everywhere = True

        def client(self):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return context

    await assert_refused(Anonymous(), caplog)


@pytest.mark.parametrize(("first", "last"), [(-2, -1), (1, 2)], ids=["expired", "not yet valid"])
async def test_a_client_outside_its_days_is_refused(first, last, caplog):
    await assert_refused(ClusterTls(lambda _: between(first, last)), caplog)


async def assert_refused(intruder, caplog):
    """It gets nowhere, is told, and the log says so; a member is served all the same."""
    heard = []

    async def listen(connection):
        heard.append(await connection.receive())
        await connection.send(heard[-1])

    with caplog.at_level(logging.WARNING):
        async with serving(ClusterTls.derived(SECRET), listen) as port:
            with pytest.raises((AuthenticationFailed, ConnectionLost)):
                await exchange(port, intruder)
            assert heard == []
            await exchange(port, ClusterTls.derived(SECRET))
    assert heard == [b"the patient's name"]
    assert "refused" in caplog.text


@pytest.mark.parametrize(("first", "last"), [(-2, -1), (1, 2)], ids=["expired", "not yet valid"])
async def test_a_server_outside_its_days_is_not_trusted(first, last):
    async with serving(ClusterTls(lambda _: between(first, last))) as port:
        with pytest.raises(AuthenticationFailed, match=r"expired|not yet valid"):
            await plane.connect(HOST, port, SECRET, tls=ClusterTls.derived(SECRET))


async def test_the_secret_is_still_asked_for_inside_tls():
    async with serving(ClusterTls.derived(SECRET)) as port:
        with pytest.raises((AuthenticationFailed, ConnectionLost)):
            await plane.connect(HOST, port, b"a guess", tls=ClusterTls.derived(SECRET))


# ---- on here and off there


@pytest.mark.parametrize("is_server_on", [True, False])
async def test_ends_that_differ_in_tls_are_told_the_setting(is_server_on, caplog):
    own = ClusterTls.derived(SECRET)
    with caplog.at_level(logging.WARNING):
        async with serving(own if is_server_on else None) as port:
            with pytest.raises(TlsMismatch, match=r"cluster\.tls"):
                await plane.connect(HOST, port, SECRET, tls=None if is_server_on else own)
    assert "cluster.tls" in caplog.text


async def test_a_client_that_says_nothing_is_dropped(monkeypatch):
    monkeypatch.setattr(plane, "_HANDSHAKE_S", 0.05)
    async with serving(ClusterTls.derived(SECRET)) as port:
        reader, writer = await asyncio.open_connection(HOST, port)
        assert await reader.read() == b""
        writer.close()


async def test_a_client_that_stops_in_its_handshake_is_dropped(monkeypatch):
    monkeypatch.setattr(plane, "_HANDSHAKE_S", 0.05)
    async with serving(ClusterTls.derived(SECRET)) as port:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"\x16\x03\x01\x02\x00\x01")
        assert await reader.read() == b""
        writer.close()


# ---- certificates


def open_files():
    return sorted(
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    )


def test_contexts_leave_no_file_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = open_files()
    ClusterTls.derived(SECRET)
    assert open_files() == before
    assert list(tmp_path.iterdir()) == []


async def test_a_certificate_is_renewed_while_the_server_runs():
    issued = []

    def identify(_):
        issued.append(between(-1, 1))
        return issued[-1]

    own = ClusterTls(identify, renew_s=0.0)
    async with serving(own) as port:
        for _ in range(2):
            assert await exchange(port, ClusterTls.derived(SECRET)) == b"the patient's name"
    assert len({identity.certificate for identity in issued}) >= 3  # at the start, and for each connection


def test_a_certificate_lasts_until_it_is_time_to_renew_it():
    own = ClusterTls.derived(SECRET)
    assert own.server() is own.server()
    assert timedelta(seconds=2 * tls._RENEW_S) < tls._LIFETIME


@pytest.fixture
def folder(tmp_path):
    """An operator's own files (of an authority that no secret makes)."""
    identity = between(-1, 1, b"the operator's own authority")
    for name, content in (("tls.crt", identity.certificate), ("tls.key", identity.key), ("ca.crt", identity.authority)):
        (tmp_path / name).write_bytes(content)
    return tmp_path


def configured(**cluster):
    cluster = {name: str(value) if name == "tls_dir" else value for name, value in cluster.items()}
    return cluster_tls(settings_from({"cluster": cluster}).cluster, SECRET)


async def test_the_operators_own_certificates_are_used_instead(folder):
    async with serving(configured(tls=True, tls_dir=folder)) as port:
        assert await exchange(port, configured(tls=True, tls_dir=folder)) == b"the patient's name"
        with pytest.raises(AuthenticationFailed, match="certificate"):
            await plane.connect(HOST, port, SECRET, tls=configured(tls=True))


def test_off_is_off():
    assert configured(tls="off") is None
    assert configured(tls="on").is_everywhere


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_by_default_a_server_that_only_its_own_host_reaches_has_no_tls(host):
    assert tls_at(configured(), host) is None
    assert tls_at(configured(tls=True), host) is not None


@pytest.mark.parametrize("host", ["10.0.0.7", "0.0.0.0", "2001:db8::7", "gpu-host"])
def test_by_default_any_other_server_has(host):
    assert tls_at(configured(), host) is not None
    assert tls_at(configured(tls=False), host) is None


async def test_by_default_what_comes_from_another_host_is_under_tls_and_what_stays_here_is_not(monkeypatch):
    """0.0.0.0 stands for an address that other hosts reach."""
    server = plane.Server(echo, SECRET, tls=configured())
    port = await server.start(ANYWHERE)
    try:
        here = await plane.connect(ANYWHERE, port, SECRET, tls=configured())
        assert plane.peer_uid(here._writer.get_extra_info("socket")) == os.getuid()  # on the Unix socket
        await here.aclose()
        monkeypatch.setattr(plane, "local_socket", lambda host, port: None)  # as on another host
        there = await plane.connect(ANYWHERE, port, SECRET, tls=configured())
        assert there._writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        await there.send(b"the patient's name")
        assert await there.receive() == b"the patient's name"
        await there.aclose()
        with pytest.raises(TlsMismatch, match=r"cluster\.tls"):
            await plane.connect(ANYWHERE, port, SECRET)
    finally:
        await server.aclose()


async def test_by_default_nothing_is_under_tls_at_a_loopback_address():
    async with serving(configured()) as port, tapped(port) as (door, heard):
        assert await exchange(door, configured()) == b"the patient's name"
    assert b"patient" in heard


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=rf"cluster\.tls_dir: {folder}/{name}: No such file"):
        configured(tls=True, tls_dir=folder)


def test_a_file_that_is_no_certificate_is_named(folder):
    (folder / "tls.crt").write_bytes((folder / "tls.key").read_bytes())
    with pytest.raises(ConfigError, match=r"tls\.crt in .* holds no certificate in PEM"):
        configured(tls=True, tls_dir=folder)


def test_files_that_do_not_fit_together_are_told(folder):
    (folder / "tls.key").write_bytes(between(-1, 1).key)
    with pytest.raises(ConfigError, match="do not fit together"):
        configured(tls=True, tls_dir=folder)


def test_an_expired_file_is_told_at_the_start(folder):
    (folder / "tls.crt").write_bytes(between(-9, -8).certificate)
    with pytest.raises(ConfigError, match="expired on"):
        configured(tls=True, tls_dir=folder)


def test_an_expired_authority_is_told_unless_another_one_beside_it_is_valid(folder):
    expired, valid = between(-9, -8).certificate, (folder / "ca.crt").read_bytes()
    (folder / "ca.crt").write_bytes(expired)
    with pytest.raises(ConfigError, match=r"ca\.crt in .* expired on"):
        configured(tls=True, tls_dir=folder)
    (folder / "ca.crt").write_bytes(expired + valid)
    assert configured(tls=True, tls_dir=folder) is not None


def test_all_connections_of_a_process_share_what_a_rotation_changes(folder):
    assert configured(tls=True) is configured(tls=True)
    assert configured(tls=True, tls_dir=folder) is not configured(tls=True)


def test_the_folder_needs_tls(folder):
    with pytest.raises(ConfigError, match=r"set cluster\.tls: on"):
        configured(tls=False, tls_dir=folder)
