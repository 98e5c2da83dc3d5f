"""Which store lies below the others, by `cache.remote`: the cluster's own, Redis, or any fsspec URL."""

from typing import Protocol

from kvrelay.errors import ConfigError
from kvrelay.kvcache.stores.codecs import Codec, NoCodec
from kvrelay.kvcache.stores.namespace import Namespace
from kvrelay.kvcache.stores.store import BlockStore
from kvrelay.types import KvMemory

CLUSTER = "cluster"
_REDIS = ("redis", "rediss", "valkey", "valkeys", "unix")


class ClusterStore(Protocol):
    """How this worker's process makes its client of the cluster's store, where there is one."""

    def __call__(self, block_bytes: int, namespace: bytes, codec: Codec, memory: KvMemory | None) -> BlockStore:
        """`memory`: the slab in which the worker's blocks lie while they travel."""


def make_store(
    url: str,
    block_bytes: int,
    namespace: Namespace,
    *,
    codec: Codec | None = None,
    memory: KvMemory | None = None,
    cluster: ClusterStore | None = None,
) -> BlockStore:
    """The store, not started.

    Args:
        namespace: all that a block's bytes depend on besides its hash; the codec is added here.
        codec: what blocks become on their way there; None: they go as they are.
        memory: the host tier's.

    Raises ConfigError: there is no such store. That it can be reached, and that its package is there, start() finds out.
    """
    codec = codec or NoCodec()
    whose = namespace.with_fields(codec=codec.name).digest
    if url == CLUSTER:
        if cluster is None:
            raise ConfigError("cache.remote: cluster needs a cluster: start one with kvrelay serve")
        return cluster(block_bytes, whose, codec, memory)
    scheme = url.partition("://")[0] if "://" in url else ""
    if not scheme:
        raise ConfigError(
            f"cache.remote: {url!r} is no store; write cluster, redis://host:6379, or a URL such as s3://bucket/kv"
        )
    if scheme in _REDIS:
        from kvrelay.kvcache.stores.redis import RedisStore

        return RedisStore(url, block_bytes, whose, codec=codec)
    from kvrelay.kvcache.stores.fsspec import FsspecStore

    return FsspecStore(url, block_bytes, whose, codec=codec)
