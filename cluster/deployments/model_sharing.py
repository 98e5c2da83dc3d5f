"""A checkpoint's files sent to another host: served from one folder, fetched into another one.

They travel over one authenticated connection of the request plane (TLS where the cluster has it), each with its size
and checksum.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import xxhash

from kvrelay.engine.checkpoints.checkpoint import Progress
from kvrelay.errors import ConnectionLost, ProtocolError
from kvrelay.plane.connection import Server, connect
from kvrelay.plane.framing import Connection
from kvrelay.plane.tls import ClusterTls

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
_SILENCE_S = 60.0  # without a chunk: the other host is gone
_LOG_S = 2.0


class ModelFile(msgspec.Struct, frozen=True):
    """One file of a checkpoint's folder. `checksum`: XXH3-128."""

    name: str
    num_bytes: int
    checksum: bytes


class ModelOffer(msgspec.Struct, frozen=True):
    """Where a checkpoint's files are served."""

    host: str
    port: int
    files: tuple[ModelFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def key(self, name: str) -> str:
        """The folder's name in the cache: of the same content, the same."""
        digest = hashlib.blake2b(digest_size=8)
        for file in self.files:
            digest.update(f"{file.name} {file.num_bytes} ".encode() + file.checksum)
        return f"{name.replace('/', '--')}-fetched-{digest.hexdigest()}"


# ---- the host that has the files


def files_of(folder: Path) -> tuple[ModelFile, ...]:
    """The folder's files with their checksums; reads all of them."""
    return tuple(
        ModelFile(path.name, path.stat().st_size, _checksum(path))
        for path in sorted(folder.iterdir())
        if path.is_file()
    )


def _checksum(path: Path) -> bytes:
    digest = xxhash.xxh3_128()
    for chunk in _chunks(path):
        digest.update(chunk)
    return bytes(digest.digest())


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


class ModelServer:
    """Serves the files of one folder: a frame names one, and as many frames as it takes bring its bytes."""

    def __init__(self, folder: Path, secret: bytes, tls: ClusterTls | None = None) -> None:
        self._folder, self._server = folder, Server(self._serve, secret, tls=tls)
        self._names: set[str] = set()

    async def start(self, host: str) -> ModelOffer:
        """Listen. Raises OSError."""
        files = await asyncio.to_thread(files_of, self._folder)
        self._names = {file.name for file in files}
        return ModelOffer(host, await self._server.start(host), files)

    async def aclose(self) -> None:
        await self._server.aclose()

    async def _serve(self, connection: Connection) -> None:
        while True:
            name = (await connection.receive()).decode(errors="replace")
            if name not in self._names:
                raise ProtocolError(f"it asked for {name!r}, which is no file of the model")
            with (self._folder / name).open("rb") as file:
                while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                    await connection.send(chunk)


# ---- the host that lacks them


async def fetch(
    offer: ModelOffer, folder: Path, secret: bytes, report: Progress, tls: ClusterTls | None = None
) -> None:
    """Bring every file into the folder, verified. Raises PlaneError, OSError, TimeoutError."""
    connection = await connect(offer.host, offer.port, secret, tls=tls)
    what, done = f"fetching {offer.num_bytes / 1e6:.0f} MB from {offer.host}", 0
    try:
        for wanted in offer.files:
            await connection.send(wanted.name.encode())
            digest, left = xxhash.xxh3_128(), wanted.num_bytes
            with (folder / wanted.name).open("xb") as file:
                while left > 0:
                    report(what, done / max(offer.num_bytes, 1))
                    async with asyncio.timeout(_SILENCE_S):
                        chunk = await connection.receive()
                    left, done = left - len(chunk), done + len(chunk)
                    digest.update(chunk)
                    await asyncio.to_thread(file.write, chunk)
            if left or digest.digest() != wanted.checksum:
                raise ConnectionLost(f"{wanted.name} from {offer.host} fails its checksum")
    finally:
        await connection.aclose()
    report(what, 1.0)


# ---- progress


def log_progress(model: str, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Logs what is done for the model and how far it is: at once when that changes, then every two seconds.

    `kvrelay deploy` shows the latest line of each replica that starts.
    """
    logged_s, logged = 0.0, ""

    def report(what: str, share: float) -> None:
        nonlocal logged_s, logged
        if what != logged or clock() - logged_s >= _LOG_S:
            logged_s, logged = clock(), what
            logger.info("model %s: %s: %.0f %%", model, what, 100 * share)

    return report
