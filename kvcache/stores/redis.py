"""Blocks in a Redis or Valkey server: pipelined, in envelopes that verify namespace and content.

A block that the server does not have, or does not return in time, is a miss. After a failure the client backs off, so
that a dead server costs its timeout once and not per request. Capacity is the server's to manage (maxmemory and its
policy), or a TTL's.
"""

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

from kvrelay.errors import ConfigError, StoreError
from kvrelay.kvcache.stores.codecs import Codec, CodecError, NoCodec
from kvrelay.kvcache.stores.envelope import BadEnvelope, seal, unseal
from kvrelay.kvcache.stores.store import BackOff, BlockMeta, StoreCounters, StoreStats
from kvrelay.types import BlockHash

logger = logging.getLogger(__name__)

_BATCH_BYTES = 16 << 20  # of one pipeline, during which the server answers no other client
_PREFIX = b"kvrelay/1/"


class RedisStore:
    """A BlockStore in Redis. 14 attributes: seven parameters, two of the interface, and the connection's state."""

    def __init__(
        self,
        url: str,
        block_bytes: int,
        namespace: bytes,
        *,
        codec: Codec | None = None,
        timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`url`: redis://, rediss:// (TLS), valkey://, valkeys:// or unix://; `?ttl_s=3600` lets blocks expire.

        Raises ConfigError: an invalid URL.
        """
        self._url, self._ttl_s = _without_ttl(url)
        self._block_bytes, self._namespace = block_bytes, namespace
        self._codec = codec or NoCodec()
        self._timeout_s, self._clock = timeout_s, clock
        self._client: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._lock = threading.Lock()
        self._back_off = BackOff()  # under the lock
        self._counters = StoreCounters()
        self.name, self.keeps_checksums = "redis", False  # its envelopes have checksums of their own

    # ---- life

    def start(self) -> None:
        """Connect. Raises StoreError: the package is missing, or the server does not answer."""
        library = _library()
        self._errors = (library.exceptions.RedisError, OSError)
        try:
            self._client = library.Redis.from_url(
                self._url,
                socket_timeout=self._timeout_s,
                socket_connect_timeout=self._timeout_s,
                health_check_interval=30,
            )
            self._client.ping()
        except (*self._errors, ValueError) as error:
            self.close()
            raise StoreError(
                self.name, f"{_without_password(self._url)}: {error}; check that it runs and that cache.remote is right"
            ) from error

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    # ---- BlockStore

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        answers = self._run([("EXISTS", self._key(digest)) for digest in hashes])
        return [bool(answer) for answer in answers] if answers is not None else [False] * len(hashes)

    def load(self, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> list[bool]:
        began = self._clock()
        loaded: list[bool] = []
        for some in self._batches(len(hashes)):
            answers = self._run([("MGET", *(self._key(digest) for digest in hashes[some]))])
            values = answers[0] if answers is not None else [None] * (some.stop - some.start)
            for digest, view, value in zip(hashes[some], into[some], values, strict=True):
                loaded.append(value is not None and self._open(digest, view, value))
        num_bytes = sum(view.nbytes for view, good in zip(into, loaded, strict=True) if good)
        self._counters.add(loaded_blocks=sum(loaded), loaded_bytes=num_bytes, load_s=self._clock() - began)
        return loaded

    def _open(self, digest: BlockHash, view: memoryview, value: bytes) -> bool:
        try:
            most_bytes = self._codec.most_bytes(self._block_bytes)
            self._codec.decode(unseal(value, self._namespace, digest, most_bytes), view.cast("B"))
        except (BadEnvelope, CodecError) as error:
            logger.warning("a block in %s is discarded: %s", self.name, error)
            self._counters.add(corrupt_blocks=1)
            self._run([("DEL", self._key(digest))])
            return False
        return True

    def store(
        self, hashes: Sequence[BlockHash], blocks: Sequence[memoryview], metas: Sequence[BlockMeta]
    ) -> list[bool]:
        began = self._clock()
        kept = {digest for digest, here in zip(hashes, self.contains(hashes), strict=True) if here}
        new = {digest: block for digest, block in zip(hashes, blocks, strict=True) if digest not in kept}
        if self._ttl_s:
            self._run([("PEXPIRE", self._key(digest), self._ttl_ms) for digest in kept])
        stored = self._set(list(new), list(new.values()))
        self._counters.add(
            stored_blocks=len(stored),
            stored_bytes=sum(new[digest].nbytes for digest in stored),
            store_s=self._clock() - began,
            rejected_blocks=len(new) - len(stored),
        )
        return [digest in kept or digest in stored for digest in hashes]

    def _set(self, hashes: Sequence[BlockHash], blocks: Sequence[memoryview]) -> set[BlockHash]:
        """The blocks that the server stored."""
        expiry = ("PX", self._ttl_ms) if self._ttl_s else ()
        stored: set[BlockHash] = set()
        for some in self._batches(len(hashes)):
            values = {
                digest: self._value(digest, block) for digest, block in zip(hashes[some], blocks[some], strict=True)
            }
            commands = [("SET", self._key(digest), value, *expiry) for digest, value in values.items() if value]
            answers = self._run(commands) or [False] * len(commands)
            sent = [digest for digest, value in values.items() if value]
            stored |= {
                digest
                for digest, answer in zip(sent, answers, strict=True)
                if answer and not isinstance(answer, Exception)
            }
        return stored

    def _value(self, digest: BlockHash, block: memoryview) -> bytes | None:
        """None: the codec cannot encode it."""
        try:
            return seal(self._namespace, digest, self._codec.encode(block.cast("B")))
        except CodecError as error:
            logger.warning("a block is not sent to %s: %s", self.name, error)
            return None

    @property
    def _ttl_ms(self) -> int:
        return int(self._ttl_s * 1000)

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        if hashes:
            self._run([("DEL", *(self._key(digest) for digest in hashes))])

    def stats(self) -> StoreStats:
        return self._counters.read()

    # ---- internals

    def _key(self, digest: BlockHash) -> bytes:
        return _PREFIX + self._namespace + digest

    def _batches(self, count: int) -> Iterator[slice]:
        step = max(_BATCH_BYTES // self._block_bytes, 1)
        for first in range(0, count, step):
            yield slice(first, min(first + step, count))

    def _run(self, commands: Sequence[tuple[Any, ...]]) -> list[Any] | None:
        """The answers of one pipeline, an exception for each refused command; None: the server cannot be reached."""
        if not commands:
            return []
        client = self._client
        if client is None or self._back_off.is_backing_off(self._clock()):
            return None
        try:
            with client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                answers: list[Any] = pipeline.execute(raise_on_error=False)
        except self._errors as error:
            self._failed(error)
            return None
        refused = [answer for answer in answers if isinstance(answer, Exception)]
        if refused:
            logger.warning("%s refused %d of %d commands: %s", self.name, len(refused), len(answers), refused[0])
        with self._lock:
            self._back_off.succeeded()
        return None if len(refused) == len(answers) else answers

    def _failed(self, error: Exception) -> None:
        with self._lock:
            back_off_s = self._back_off.failed(self._clock())
        self._counters.add(failures=1)
        logger.warning("backing off from %s for %.0f s: %s", self.name, back_off_s, error)


def _library() -> Any:
    """The client package, redis-py or its fork. Raises StoreError."""
    for name in ("redis", "valkey"):
        try:
            found: Any = importlib.import_module(name)
        except ImportError:
            continue
        if not hasattr(found, "Redis"):
            found.Redis = found.Valkey
        if not hasattr(found.exceptions, "RedisError"):
            found.exceptions.RedisError = found.exceptions.ValkeyError
        return found
    raise StoreError("redis", "the package redis is not installed: pip install 'kvrelay[redis]'")


def _without_ttl(url: str) -> tuple[str, float]:
    """(URL for the client, TTL of blocks in seconds or 0). Raises ConfigError."""
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    try:
        ttl_s = float(query.pop("ttl_s", ["0"])[0])
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"cache.remote: {_without_password(url)}: {error}") from error
    if ttl_s < 0 or not (parts.hostname or (parts.scheme == "unix" and parts.path)) or port == 0:
        raise ConfigError(f"cache.remote: {_without_password(url)}: write for example redis://host:6379/0?ttl_s=3600")
    scheme = parts.scheme.replace("valkey", "redis")
    return urlunsplit((scheme, parts.netloc, parts.path, urlencode(query, doseq=True), "")), ttl_s


def _without_password(url: str) -> str:
    """The URL without its password."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
