"""The store below all others, by `cache.remote`: the cluster's own, Redis, or any fsspec URL."""

from typing import Protocol

from kvrelay.errors import ConfigError
from kvrelay.kvcache.stores.codecs import Codec, NoCodec
from kvrelay.kvcache.stores.namespace import Namespace
from kvrelay.kvcache.stores.store import BlockStore
from kvrelay.types import KvMemory

CLUSTER = "cluster"
_REDIS = ("redis", "rediss", "valkey", "valkeys", "unix")


class ClusterStore(Protocol):
    """Makes this worker process's client of the cluster's store."""

    def __call__(self, block_bytes: int, namespace: bytes, codec: Codec, memory: KvMemory | None) -> BlockStore:
        """`memory`: the host tier's slab, which the store reads and writes without a copy."""


def make_store(
    url: str,
    block_bytes: int,
    namespace: Namespace,
    *,
    codec: Codec | None = None,
    memory: KvMemory | None = None,
    cluster: ClusterStore | None = None,
) -> BlockStore:
    """A store that is not started.

    Args:
        namespace: everything a block's bytes depend on besides its hash; the codec is added here.
        codec: compresses blocks in transit; None: no compression.
        memory: the host tier's slab.

    Raises ConfigError: unknown store. Whether it can be reached, and its package is installed, start() checks.
    """
    codec = codec or NoCodec()
    store_namespace = namespace.with_fields(codec=codec.name).digest
    if url == CLUSTER:
        if cluster is None:
            raise ConfigError("cache.remote: cluster needs a cluster: start one with kvrelay serve")
        return cluster(block_bytes, store_namespace, codec, memory)
    scheme = url.partition("://")[0] if "://" in url else ""
    if not scheme:
        raise ConfigError(
            f"cache.remote: {url!r} is no store; write cluster, redis://host:6379, or a URL such as s3://bucket/kv"
        )
    if scheme in _REDIS:
        from kvrelay.kvcache.stores.redis import RedisStore

        return RedisStore(url, block_bytes, store_namespace, codec=codec)
    from kvrelay.kvcache.stores.fsspec import FsspecStore

    return FsspecStore(url, block_bytes, store_namespace, codec=codec)
