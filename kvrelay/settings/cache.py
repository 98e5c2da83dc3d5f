"""Settings of the KV cache below the workers' pools, of the cluster's own KV store, and of KV transfers."""

from typing import Self

from pydantic import model_validator

from kvrelay.settings.choices import (
    ChecksMode,
    Compression,
    EvictionPolicyName,
    PrefetchMode,
    TransportName,
    WritePolicy,
)
from kvrelay.settings.section import Section, Size, setting


class CacheSettings(Section):
    """Which KV is kept, for how long, and in which tiers below the workers' pools."""

    eviction_policy: EvictionPolicyName = setting("lru", "Which unused block is evicted first, in every tier.")
    host_memory: Size | None = setting(None, "Host memory below each worker's pool; default: no host tier.")
    disk_path: str | None = setting(None, "Folder for KV on local disk, below the host tier; default: no disk tier.")
    disk_size: Size = setting(10 << 30, "Most disk space of each worker in disk_path.")
    remote: str | None = setting(
        None,
        "`cluster` (the cluster's own store), a redis:// or valkey:// URL, or an fsspec URL such as s3://bucket/kv.",
    )
    write_policy: WritePolicy = setting(
        "write-through",
        "When a block is written to the lower tier: write-through (once it is full), selective (after a hit), "
        "write-back (on eviction).",
    )
    compression: Compression = setting(
        "none", "Of blocks on disk and in remote stores; int8 and fp8 quantise them, which may change tokens."
    )
    sealed: bool = setting(
        False,
        "Encrypt blocks on disk and in stores, with a key for each tenant; needs cluster.secret where they outlive the "
        "cluster.",
    )
    prefetch: PrefetchMode = setting(
        "timeout",
        "What a queued request does about blocks on disk or in a remote store: best-effort (starts with what has "
        "arrived), wait (for all, even where computing is quicker), timeout (waits at most 2 s), off.",
    )
    tenant_share: float = setting(
        1.0,
        "Largest share of a worker's host tier, and of its disk tier, for blocks of one tenant: an API key with a "
        "namespace, or a cache_salt.",
        gt=0,
        le=1,
    )

    @property
    def is_shared(self) -> bool:
        """Whether blocks that one worker has computed soon reach the cluster's store, from where all can load them."""
        return self.remote == "cluster" and self.write_policy == "write-through" and self.prefetch != "off"

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        if (self.disk_path or self.remote) and self.host_memory is None:
            raise ValueError("disk_path and remote need cache.host_memory: blocks pass through it")
        return self


class StoreSettings(Section):
    """The cluster's own KV store (`cache.remote: cluster`): one node on each machine that runs workers."""

    memory: Size = setting(1 << 30, "Memory on each machine.")
    disk_path: str | None = setting(None, "Folder on each machine below that memory; default: none.")
    disk_size: Size = setting(10 << 30, "Most disk space of each node in disk_path.")
    replicas: int = setting(2, "Copies of each block, as far as there are machines.", unit="copies", ge=1, le=8)
    tenant_quota: Size | None = setting(
        None,
        "Most memory on all machines together, each copy counted, and as much again on their disks, for blocks of one "
        "tenant without store_bytes in serve.api_keys_file: an API key with a namespace, or a cache_salt; default: "
        "no limit.",
    )


class TransferSettings(Section):
    """How KV travels from prefill to decode workers."""

    transport: TransportName = setting(
        "auto",
        "How decode workers read KV; auto: shared memory on one host, between GPUs cuda_ipc on one host and nixl, "
        "else tcp.",
    )
    checks: ChecksMode = setting(
        "full", "Checksums of KV regions, verified before commit: of all, of a random sample, or of none."
    )
    convert_dtype: bool = setting(
        False,
        "Allow different dtypes on prefill and decode workers: KV is cast on its way, and outputs may differ from "
        "those of one worker.",
    )
