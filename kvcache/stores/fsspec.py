"""Blocks at any fsspec URL (S3, GCS, Azure, a shared folder): one object each, in an envelope that verifies it.

Object stores answer in tens of milliseconds and serve many requests at once, so blocks of one call are moved in
parallel on a bounded number of threads. Capacity and age are the bucket's to manage (lifecycle rules). A failure is a
miss, after which the store backs off.
"""

import importlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kvrelay.errors import ConfigError, StoreError
from kvrelay.kvcache.stores.codecs import Codec
from kvrelay.kvcache.stores.store import EnvelopeStore
from kvrelay.types import BlockHash, BlockMeta

logger = logging.getLogger(__name__)

_EXTRAS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
_OURS = {"s3": "s3", "s3a": "s3"}  # packages of kvrelay's own extras


class FsspecStore(EnvelopeStore):
    """A BlockStore at an fsspec URL."""

    def __init__(
        self,
        url: str,
        block_bytes: int,
        namespace: bytes,
        *,
        codec: Codec | None = None,
        num_threads: int = 8,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        """`url`: what follows `?` goes to the file system as options, e.g.
        s3://bucket/kv?endpoint_url=http://host:9000.

        `options`: the same, of any type. `timeout_s`: of one call over a network, its retries included.
        Raises ConfigError: an invalid URL.
        """
        parts = urlsplit(url)
        self._scheme = parts.scheme
        if not parts.scheme or not (parts.netloc or parts.path.strip("/")):
            raise ConfigError(f"cache.remote: {url!r} is not a location; write for example s3://bucket/kv")
        super().__init__(parts.scheme, block_bytes, namespace, codec, clock)
        self._url = url.partition("?")[0].rstrip("/")
        self._options = dict(parse_qsl(parts.query)) | options
        self._num_threads = num_threads
        self._limit = {"timeout": timeout_s}
        self._fs: Any = None
        self._root = ""
        self._threads: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Open the location and test a write. Raises StoreError: the package is missing, or it cannot be written."""
        try:
            fsspec: Any = importlib.import_module("fsspec")
            self._fs, root = fsspec.core.url_to_fs(self._url, **self._options)
        except ImportError as error:
            raise StoreError(self._url, f"{error}; {_remedy(self._scheme)}") from error
        except Exception as error:  # each file system has errors of its own
            raise StoreError(self._url, f"{error}; check that cache.remote is right") from error
        self._root = f"{root.rstrip('/')}/{self._namespace.hex()}"
        if not getattr(self._fs, "async_impl", False):  # not over a network: these know no timeout
            self._limit = {}
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="kv-fsspec")
        try:
            self._fs.makedirs(self._root, exist_ok=True, **self._limit)
            probe = f"{self._root}/probe"
            self._fs.pipe_file(probe, b"kvrelay", **self._limit)
            self._fs.rm_file(probe, **self._limit)
        except Exception as error:
            self.close()
            raise StoreError(
                self._url, f"it cannot be written: {error}; check its address, permissions and quota"
            ) from error

    def close(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True)
        self._fs = None

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        return self._each(self._exists, hashes)

    def _load(self, hashes: Sequence[BlockHash], into: Sequence[memoryview], metas: Sequence[BlockMeta]) -> list[bool]:
        return self._each(self._load_one, hashes, into, metas)

    def _store(self, new: Mapping[BlockHash, tuple[memoryview, BlockMeta]]) -> set[BlockHash]:
        done = self._each(self._store_one, list(new), *zip(*new.values(), strict=True))
        return {digest for digest, is_stored in zip(new, done, strict=True) if is_stored}

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        self._each(self._delete_one, hashes)

    def _path(self, digest: BlockHash) -> str:
        name = digest.hex()
        return f"{self._root}/{name[:2]}/{name}"

    def _exists(self, digest: BlockHash) -> bool:
        return bool(self._fs.exists(self._path(digest), **self._limit))

    def _load_one(self, digest: BlockHash, view: memoryview, meta: BlockMeta) -> bool:
        try:
            value = self._fs.cat_file(self._path(digest), **self._limit)
        except FileNotFoundError:
            return False
        return self._opened(digest, view, value, meta)

    def _store_one(self, digest: BlockHash, block: memoryview, meta: BlockMeta) -> bool:
        path = self._path(digest)
        if (value := self._wrapped(digest, block, meta)) is None:
            return False
        if self._scheme in ("file", "local"):  # only there folders must be made, and a torn file could be found
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            new = f"{path}.{uuid.uuid4().hex}.new"  # others may write the same block at once
            self._fs.pipe_file(new, value)
            self._fs.mv(new, path)
        else:
            self._fs.pipe_file(path, value, **self._limit)
        return True

    def _delete_one(self, digest: BlockHash) -> bool:
        try:
            self._fs.rm_file(self._path(digest), **self._limit)
        except FileNotFoundError:
            return False
        return True

    def _each(self, call: Callable[..., bool], *arguments: Sequence[Any]) -> list[bool]:
        """`call` for each item, in parallel; False where it fails. All calls have ended when this returns."""
        threads, count = self._threads, len(arguments[0])
        if threads is None or self._is_backing_off():
            return [False] * count
        is_failing = threading.Event()

        def one(*these: Any) -> bool:
            if is_failing.is_set():  # the others would only run into the same timeout
                return False
            try:
                return call(*these)
            except Exception as error:  # each file system has errors of its own
                if not is_failing.is_set():
                    is_failing.set()
                    self._failed(error)
                return False

        done = list(threads.map(one, *arguments))
        if not is_failing.is_set():
            self._succeeded()
        return done


def _remedy(scheme: str) -> str:
    if scheme in _OURS:
        return f"pip install 'kvrelay[{_OURS[scheme]}]'"
    return f"pip install {_EXTRAS.get(scheme, 'the package that fsspec names')}"
