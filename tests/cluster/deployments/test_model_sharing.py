"""A checkpoint's files from another host: whole and verified, or not there at all."""

import logging

import pytest

from kvrelay.cluster.deployments import model_sharing as sharing
from kvrelay.cluster.deployments.model_sharing import ModelServer, fetch, log_progress
from kvrelay.errors import AuthenticationFailed, ConnectionLost, PlaneError

SECRET = b"secret"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sharing, "_CHUNK_BYTES", 1000)
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(bytes(range(256)) * 50)
    (source / "empty.txt").touch()
    (tmp_path / "target").mkdir()
    return source


async def test_every_file_arrives_and_its_progress_is_reported(folder):
    server, seen = ModelServer(folder, SECRET), []
    offer = await server.start("127.0.0.1")
    target = folder.parent / "target"
    await fetch(offer, target, SECRET, lambda what, share: seen.append((what, share)))
    await server.aclose()
    assert {one.name: one.read_bytes() for one in target.iterdir()} == {
        one.name: one.read_bytes() for one in folder.iterdir()
    }
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) > 10
    assert "from 127.0.0.1" in seen[0][0]


async def test_a_file_that_has_changed_fails_its_checksum(folder):
    server = ModelServer(folder, SECRET)
    offer = await server.start("127.0.0.1")
    (folder / "model.safetensors").write_bytes(bytes(256) * 50)
    with pytest.raises(ConnectionLost, match=r"model.safetensors from 127.0.0.1 fails its checksum"):
        await fetch(offer, folder.parent / "target", SECRET, lambda what, share: None)
    await server.aclose()


async def test_no_other_file_is_served_and_no_stranger_gets_one(folder):
    (folder.parent / "private").write_text("secret")
    server = ModelServer(folder, SECRET)
    offer = await server.start("127.0.0.1")
    connection = await sharing.connect(offer.host, offer.port, SECRET)
    await connection.send(b"../private")
    with pytest.raises(PlaneError):
        await connection.receive()
    await connection.aclose()
    with pytest.raises((AuthenticationFailed, ConnectionLost)):
        await fetch(offer, folder.parent / "target", b"another", lambda what, share: None)
    await server.aclose()


async def test_the_same_files_have_one_folder_in_the_cache(folder):
    server = ModelServer(folder, SECRET)
    one = (await server.start("127.0.0.1")).key("org/name")
    await server.aclose()
    other = ModelServer(folder, SECRET)
    assert (await other.start("127.0.0.1")).key("org/name") == one
    await other.aclose()
    (folder / "config.json").write_text("{ }")
    changed = ModelServer(folder, SECRET)
    assert (await changed.start("127.0.0.1")).key("org/name") != one
    await changed.aclose()
    assert one.startswith("org--name-fetched-")


def test_progress_is_logged_when_it_changes_and_every_two_seconds(caplog):
    now_s = [0.0]
    with caplog.at_level(logging.INFO, logger=sharing.__name__):
        report = log_progress("tiny", lambda: now_s[0])
        for at_s, what, share in ((9, "downloading", 0), (10, "downloading", 0.2), (11, "downloading", 0.4)):
            now_s[0] = at_s
            report(what, share)
        report("converting", 0)
    assert [record.getMessage() for record in caplog.records] == [
        "model tiny: downloading: 0 %",
        "model tiny: downloading: 40 %",
        "model tiny: converting: 0 %",
    ]
