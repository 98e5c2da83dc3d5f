"""Blocks in a Redis or Valkey server: pipelined, in envelopes that verify namespace and content.

A block that the server does not have, or does not return in time, is a miss. After a failure the client backs off, so
that a dead server costs its timeout once and not per request. Capacity is the server's to manage (maxmemory and its
policy), or a TTL's.
"""

import importlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

from kvrelay.errors import ConfigError, StoreError
from kvrelay.kvcache.stores.codecs import Codec
from kvrelay.kvcache.stores.store import EnvelopeStore
from kvrelay.types import BlockHash, BlockMeta

logger = logging.getLogger(__name__)

_BATCH_BYTES = 16 << 20  # of one pipeline, during which the server answers no other client
_PREFIX = b"kvrelay/1/"


class RedisStore(EnvelopeStore):
    """A BlockStore in Redis."""

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
        super().__init__("redis", block_bytes, namespace, codec, clock)
        self._url, ttl_s = _without_ttl(url)
        self._ttl_ms = int(ttl_s * 1000)  # 0: blocks do not expire
        self._timeout_s = timeout_s
        self._client: Any = None
        self._errors: tuple[type[Exception], ...] = ()

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

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        answers = self._run([("EXISTS", self._key(digest)) for digest in hashes])
        return [bool(answer) for answer in answers] if answers is not None else [False] * len(hashes)

    def _load(self, hashes: Sequence[BlockHash], into: Sequence[memoryview], metas: Sequence[BlockMeta]) -> list[bool]:
        loaded: list[bool] = []
        for some in self._batches(len(hashes)):
            answers = self._run([("MGET", *(self._key(digest) for digest in hashes[some]))])
            values = answers[0] if answers is not None else [None] * (some.stop - some.start)
            for digest, view, meta, value in zip(hashes[some], into[some], metas[some], values, strict=True):
                loaded.append(value is not None and self._opened(digest, view, value, meta))
        return loaded

    def _find(self, hashes: Sequence[BlockHash]) -> list[bool]:
        found = self.contains(hashes)
        if self._ttl_ms:  # what is offered again lives longer
            here = [digest for digest, is_here in zip(hashes, found, strict=True) if is_here]
            self._run([("PEXPIRE", self._key(digest), self._ttl_ms) for digest in here])
        return found

    def _store(self, new: Mapping[BlockHash, tuple[memoryview, BlockMeta]]) -> set[BlockHash]:
        expiry, hashes = ("PX", self._ttl_ms) if self._ttl_ms else (), list(new)
        stored: set[BlockHash] = set()
        for some in self._batches(len(hashes)):
            wrapped = [(digest, self._wrapped(digest, *new[digest])) for digest in hashes[some]]
            values = [(digest, value) for digest, value in wrapped if value]
            answers = self._run([("SET", self._key(digest), value, *expiry) for digest, value in values])
            for (digest, _), answer in zip(values, answers or [False] * len(values), strict=True):
                if answer and not isinstance(answer, Exception):
                    stored.add(digest)
        return stored

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        if hashes:
            self._run([("DEL", *(self._key(digest) for digest in hashes))])

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
        if client is None or self._is_backing_off():
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
        self._succeeded()
        return None if len(refused) == len(answers) else answers


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
