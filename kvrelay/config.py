"""Every setting, in frozen models that refuse unknown keys; the only reader of the environment.

One YAML file and command-line flags fill these models. The environment adds two secrets, so that they need stand
in no file (KVRELAY_API_KEY, KVRELAY_SECRET), and what is no setting: KVRELAY_CACHE, KVRELAY_NATIVE, Hugging Face's and
OpenTelemetry's own.
"""

import difflib
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvrelay.errors import ConfigError
from kvrelay.plane.messages import MAX_PRIORITY
from kvrelay.sizes import Budget, Size, memory_share, parse_bytes
from kvrelay.types import Role

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int4"]
KvDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3"]
BackendName = Literal["auto", "reference", "cpu", "cuda"]
TransportName = Literal["auto", "nixl", "shm", "tcp"]
KvOrder = Literal["NHD", "HND"]
ChecksMode = Literal["full", "sampled", "off"]
PolicyName = Literal["lru", "lfu", "survival"]
WritePolicy = Literal["write-through", "selective", "write-back"]
Compression = Literal["none", "lossless", "int8", "fp8"]
TenantBy = Literal["auto", "cache_salt", "user", "api_key"]
PreemptionSetting = Literal["auto", "swap", "recompute", "return-to-prefill"]
CascadeMode = Literal["auto", "off"]
Speculation = Literal["auto", "ngram", "model", "off"]
PrefetchMode = Literal["off", "best-effort", "wait", "timeout"]

DEFAULT_MODEL = "smollm2-135m-instruct"
API_KEY_VARIABLE = "KVRELAY_API_KEY"
SECRET_VARIABLE = "KVRELAY_SECRET"


def _checked_block_size(tokens: int) -> int:
    if tokens & (tokens - 1) or not 1 <= tokens <= 512:
        raise ValueError("a block holds a power of two of tokens, up to 512")
    return tokens


BlockSize = Annotated[int, AfterValidator(_checked_block_size)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _off_is_no_boolean(cls, data: Any) -> Any:
        """YAML reads a bare `off` as false."""
        if not isinstance(data, dict) or False not in data.values():
            return data
        names = {name for name, field in cls.model_fields.items() if _may_be_off(field.annotation)}
        return {name: "off" if value is False and name in names else value for name, value in data.items()}


def _may_be_off(annotation: Any) -> bool:
    parts = get_args(annotation)
    return "off" in parts or any(map(_may_be_off, parts))


class ModelSettings(_Settings):
    """Which model, and in what precision."""

    source: str = Field(DEFAULT_MODEL, description="local folder, GGUF file, hub id, or the built-in default")
    served_name: str | None = Field(None, description="name in /v1/models; default: derived from source")
    dtype: Dtype = Field("auto", description="weights, activations, and KV unless engine.kv_dtype; auto: bfloat16")
    quantization: Quantization = Field(
        "none",
        description="weights of all products as integers: none, int8 or int4; backends cpu and reference only. Less memory is read "
        "for each step, and texts differ from the unquantised model's",
    )
    quantization_group: Literal[32, 64, 128] = Field(
        32, description="inputs that share a scale when weights are quantised: more take less memory and are less exact"
    )
    max_model_len: int | None = Field(
        None,
        ge=16,
        description="longest prompt + output, tokens; default: the model's, cut to what the KV memory holds",
    )
    cache_dir: str | None = Field(
        None,
        description="where converted checkpoints lie; default: $KVRELAY_CACHE, "
        "else $XDG_CACHE_HOME/kvrelay, else ~/.cache/kvrelay",
    )

    @property
    def compute_dtype(self) -> str:
        """The type of weights and activations."""
        return "bfloat16" if self.dtype == "auto" else self.dtype


class EngineSettings(_Settings):
    """One worker's engine."""

    backend: BackendName = Field(
        "auto", description="kernels: auto (cuda where it can run, else cpu), reference, cpu, cuda"
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:<n>")
    block_size: BlockSize = Field(16, description="tokens in a block; a power of two")
    kv_layout: KvOrder = Field(
        "NHD",
        description="order of a block's tokens (N) and heads (H) in memory; HND: backends reference and cuda only",
    )
    kv_memory: Budget = Field(
        "256MiB",
        description="KV pool of each worker: a size, or a share such as 0.5 or 50% of the memory that is free once the weights "
        "are loaded, on a CPU divided by the node's workers",
    )
    kv_dtype: KvDtype = Field(
        "auto",
        description="KV's own type: float32, bfloat16, float16, or fp8_e4m3 (a scale for each vector); auto: model.dtype",
    )
    token_budget: int = Field(512, ge=16, description="most tokens in one step")
    max_running: int = Field(64, ge=1, description="most sequences in one batch; at most token_budget")
    max_waiting: int = Field(256, ge=1, description="most sequences in line; more are refused")
    num_threads: int | None = Field(None, ge=1, description="CPU threads; default: the worker's physical cores")
    prefix_caching: bool = Field(True, description="keep full blocks for prompts that begin alike")
    preemption: PreemptionSetting = Field(
        "auto",
        description="what becomes of a sequence that must give its blocks back: swap (to host memory), recompute, return-to-prefill (a "
        "decode worker's, to a prefill worker); auto: what measured speeds say is cheapest. One that cannot be done: recompute",
    )
    swap_memory: Size = Field(
        "256MiB", description="bytes of host memory for pre-empted sequences' KV, taken as they are needed; 0: none"
    )
    cascade: CascadeMode = Field(
        "auto",
        description="auto: sequences that decode together read blocks that they share (a system prompt, samples, beams) once, "
        "where it pays; off: each for itself",
    )
    warm_up: bool = Field(
        True,
        description="backend cuda: choose attention kernels and capture CUDA graphs before the worker takes requests, rather than "
        "at the first step of each size",
    )
    headroom: float = Field(
        1.0, ge=0, le=4,
        description="share of the blocks that running sequences are expected to need, by the lengths of late outputs, which "
        "admission leaves free; 0: one block for each",
    )  # fmt: skip
    speculation: Speculation = Field(
        "auto",
        description="draft next tokens and keep those that are right, while it is measured to pay: ngram (from a sequence's own "
        "text), model (by draft_model), auto (both, where there is a draft_model), off. Tokens are the same",
    )
    draft_tokens: int = Field(8, ge=1, le=32, description="most tokens drafted for a sequence in one step")
    draft_model: str | None = Field(
        None,
        description="a small model of the same vocabulary that drafts on decode workers: whatever model.source takes; it computes in "
        "model.dtype",
    )
    draft_quantization: Quantization = Field(
        "none", description="the draft model's weights as integers: as model.quantization, in the same groups"
    )
    draft_kv_memory: Size = Field(
        "64MiB", description="the draft model's own KV pool on each decode worker, beside kv_memory"
    )

    @property
    def swap_bytes(self) -> int:
        return parse_bytes(self.swap_memory)

    @property
    def draft_source(self) -> str | None:
        """The draft model, where one is to draft."""
        return self.draft_model if self.speculation in ("auto", "model") else None

    @property
    def draft_kv_bytes(self) -> int:
        return parse_bytes(self.draft_kv_memory)

    @model_validator(mode="after")
    def _check_draft_model(self) -> Self:
        if self.speculation == "model" and self.draft_model is None:
            raise ValueError("speculation: model needs engine.draft_model; ngram drafts without one")
        return self

    @property
    def kv_memory_share(self) -> float | None:
        """The share of free memory that the pool takes; None when its size is given."""
        return memory_share(self.kv_memory)

    @property
    def kv_memory_bytes(self) -> int:
        """The pool's size. Only where it is no share."""
        assert not isinstance(self.kv_memory, float)
        return parse_bytes(self.kv_memory)


class RoleSettings(_Settings):
    """What one role's workers have of their own, over `engine` and `model.dtype`."""

    dtype: Dtype | None = Field(None, description="as model.dtype; unequal ones need transfer.convert_dtype")
    backend: BackendName | None = Field(None, description="as engine.backend")
    device: str | None = Field(None, description="as engine.device")
    block_size: BlockSize | None = Field(None, description="as engine.block_size; prompts are hashed by the smallest")
    kv_layout: KvOrder | None = Field(None, description="as engine.kv_layout")
    kv_memory: Budget | None = Field(None, description="as engine.kv_memory")
    kv_dtype: KvDtype | None = Field(None, description="as engine.kv_dtype; unequal ones need transfer.convert_dtype")
    token_budget: int | None = Field(None, ge=16, description="as engine.token_budget")
    max_running: int | None = Field(None, ge=1, description="as engine.max_running")
    num_threads: int | None = Field(None, ge=1, description="as engine.num_threads")
    prefix_caching: bool | None = Field(None, description="as engine.prefix_caching")


class SchedulerSettings(_Settings):
    """Who is next in line on every worker."""

    tenant_by: TenantBy = Field(
        "auto",
        description="what tells tenants apart: cache_salt, user (fields of the body), api_key (the bearer token); "
        "auto: the first of these that a request has",
    )
    tenant_weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        {},
        description="shares of the service, by salt, user or key as clients send it; a tenant that is not named has 1",
    )
    output_weight: float = Field(
        2.0, gt=0, allow_inf_nan=False,
        description="what an output token costs its tenant, against 1 for a prompt token; cached ones are free",
    )  # fmt: skip
    oldest_every: int = Field(
        16, ge=1,
        description="of so many admissions one is of whoever came first, whatever priorities, deadlines and tenants say: "
        "nobody starves; 1: first come, first served",
    )  # fmt: skip
    credit_tokens: float = Field(
        4096.0, ge=0, allow_inf_nan=False,
        description="unevenness between tenants that is let be, in weighted tokens: so much of its share may a tenant save up while "
        "it has nothing in line, and so far ahead of the others are its deadlines still heeded",
    )  # fmt: skip


class CacheSettings(_Settings):
    """What is kept of KV, for how long, and where beyond the workers' pools."""

    policy: PolicyName = Field(
        "lru",
        description="which cached blocks are evicted first, in every tier: lru, lfu or survival",
    )
    host_memory: Size | None = Field(None, description="bytes of host memory under each worker's pool; default: none")
    disk_path: str | None = Field(None, description="folder for KV on local disk, under the host tier; default: none")
    disk_size: Size = Field("10GiB", description="bytes that each worker may use in disk_path")
    remote: str | None = Field(
        None,
        description="`cluster`: the cluster's own store; redis:// or valkey:// URL; or an fsspec URL such as s3://bucket/kv",
    )
    write: WritePolicy = Field(
        "write-through",
        description="when a block goes down a tier: write-through (when it is full), selective (after `write_after_hits`), "
        "write-back (when it is about to be evicted)",
    )
    write_after_hits: int = Field(1, ge=1, description="matches that make a block worth writing under `selective`")
    compression: Compression = Field(
        "none",
        description="of blocks on disk and remote: none, lossless, or quantised to fp8 or int8 (tokens may change)",
    )
    prefetch: PrefetchMode = Field(
        "timeout",
        description="what a request in line does about blocks on disk or remote: best-effort (goes on with what has come when "
        "its turn is there), wait (for all, even where computing were quicker), timeout (waits `prefetch_timeout_s` at most), off",
    )
    prefetch_timeout_s: float = Field(2.0, gt=0, description="longest wait for blocks from disk or remote")
    inflight: Size = Field("256MiB", description="bytes that may be under way between a worker's tiers at once")
    io_threads: int = Field(2, ge=1, le=64, description="threads that move blocks between a worker's tiers")
    tenant_share: float = Field(
        1.0, gt=0, le=1,
        description="largest share of a worker's host tier, and of its disk tier, that blocks of one cache_salt may take",
    )  # fmt: skip

    @property
    def inflight_bytes(self) -> int:
        return parse_bytes(self.inflight)

    @property
    def is_shared(self) -> bool:
        """Whether what one worker has computed soon lies in the cluster's own store, from where all can load it."""
        return self.remote == "cluster" and self.write == "write-through" and self.prefetch != "off"

    @property
    def host_bytes(self) -> int:
        return parse_bytes(self.host_memory) if self.host_memory is not None else 0

    @property
    def disk_bytes(self) -> int:
        return parse_bytes(self.disk_size)

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        if (self.disk_path or self.remote) and self.host_memory is None:
            raise ValueError("disk_path and remote need cache.host_memory: blocks pass through it")
        return self


class StoreSettings(_Settings):
    """The cluster's own store (`cache.remote: cluster`): one node of it on each machine that has workers."""

    memory: Size = Field("1GiB", description="bytes of memory on each machine")
    disk_path: str | None = Field(None, description="folder on each machine under that memory; default: none")
    disk_size: Size = Field("10GiB", description="bytes that each node may use in disk_path")
    replicas: int = Field(2, ge=1, le=8, description="copies of each block, as far as there are machines")
    tenant_quota: Size | None = Field(
        None, description="bytes that blocks of one cache_salt may take on each machine; default: no limit"
    )
    repair_rate: Size = Field(
        "256MiB", description="bytes per second that a node copies to others when nodes come or go"
    )

    @property
    def memory_bytes(self) -> int:
        return parse_bytes(self.memory)

    @property
    def disk_bytes(self) -> int:
        return parse_bytes(self.disk_size)

    @property
    def tenant_quota_bytes(self) -> int | None:
        return None if self.tenant_quota is None else parse_bytes(self.tenant_quota)

    @property
    def repair_rate_bytes(self) -> int:
        return parse_bytes(self.repair_rate)


class TransferSettings(_Settings):
    """How KV travels."""

    transport: TransportName = Field(
        "auto",
        description="shm, nixl or tcp; auto: shm on one host, nixl for CUDA, else tcp",
    )
    checks: ChecksMode = Field(
        "full", description="checksums of KV regions, verified before commit: of all, of a random sample, or of none"
    )
    sampled_share: float = Field(0.1, gt=0, le=1, description="share of the regions that `checks: sampled` verifies")
    lease_s: float = Field(10.0, gt=0, description="blocks of a silent peer are freed after this, on both sides")
    deadline_s: float = Field(
        30.0, gt=0, description="a transfer that is not committed so long after its prefill fails"
    )
    stall_s: float = Field(
        2.0, gt=0, description="a read that makes no progress for so long goes on over another path, or fails"
    )
    window: Size = Field(
        "64MiB", description="bytes that one prefill worker announces ahead of one decode worker's reads"
    )
    tcp_streams: int = Field(
        0, ge=0, le=16, description="connections of one pair over tcp; 0: four between hosts, one on the same host"
    )
    layers_per_announce: int = Field(
        0, ge=0, description="layers grouped in one announcement; 0: a quarter of the model"
    )
    convert_dtype: bool = Field(
        False,
        description="let prefill and decode workers have unequal dtypes: KV is cast on its way. Texts may then differ from "
        "those of one worker alone",
    )

    @property
    def window_bytes(self) -> int:
        return parse_bytes(self.window)


class RouterSettings(_Settings):
    """How workers are chosen. Costs are in seconds of predicted time to first token."""

    policy: str = Field("joint", description="who chooses the workers of a request; see docs/routing.md for the others")
    policy_options: dict[str, bool | int | float | str] = Field({}, description="that policy's own settings, by name")
    seed: int = Field(0, description="of the draws that some policies make; a request's id is drawn with it")
    local_prefill_tokens: int = Field(
        32, ge=0, description="at most this many uncached prompt tokens are prefilled on the decode worker"
    )
    max_inflight: int = Field(
        512,
        ge=1,
        description="sequences admitted at once by one ingress, each of a request's n and prompts counted; more get 429",
    )
    max_deferred: int = Field(
        256,
        ge=0,
        description="of those, requests that wait at the ingress while their first token will be late in any case, so that they keep "
        "nobody else from being in time (policy joint); more get 429. 0: all go to workers at once",
    )
    reserve_timeout_s: float = Field(
        10.0,
        gt=0,
        description="longest wait for one decode worker's blocks; another may be tried after it, then 429",
    )
    retry_budget: int = Field(2, ge=0, description="times a request is tried again after a worker's fault")
    index: Literal["auto", "exact", "approximate"] = Field(
        "auto",
        description="who holds which prefix: by the workers' own news (exact), by what was sent to them (approximate), or that "
        "for those that tell nothing within seconds (auto)",
    )
    learned_s: float = Field(120.0, gt=0, description="approximate: a prompt is taken to be cached for so long")
    audit_s: float = Field(
        60.0,
        ge=0,
        description="every worker is asked so often whether it holds what the index says, a sample; 0: never",
    )
    share_load_s: float = Field(
        0.002,
        ge=0,
        le=1,
        description="where there are several ingresses: at most so often each tells a worker what it has assigned to it, and the "
        "worker tells the others; 0: never, they see each other's requests in the workers' reports only",
    )


class SloClass(_Settings):
    """A class of service that requests may name."""

    ttft_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    tpot_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    degrade_to: str | None = None
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)  # in line, of who brings none of its own


class SloSettings(_Settings):
    """What is promised to requests. While nothing is set here, every request is admitted and nothing is predicted."""

    ttft_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="longest time to the first token that requests are admitted for, s: class `default`, of those that name none",
    )
    tpot_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="longest mean time per token after the first, s; the like"
    )
    classes: dict[str, SloClass] = Field(
        {},
        description="others by name, each with `ttft_s`, `tpot_s` (left out: as it comes), `degrade_to`: the class that a "
        "request is served under when this one cannot be met, and `priority`: its place in line, unless the request says its own",
    )
    on_miss: Literal["refuse", "queue"] = Field(
        "refuse",
        description="a request whose SLO is out of reach: refuse (429 with Retry-After, before anything is computed) or queue "
        "(served without a promise, and told so)",
    )
    confidence: float = Field(
        0.7,
        gt=0,
        lt=1,
        description="share of requests that must stay within what is predicted of them: more refuses earlier",
    )

    @model_validator(mode="after")
    def _check_classes(self) -> Self:
        if "default" in self.classes:
            raise ValueError("slo.classes.default: the class `default` is slo.ttft_s and slo.tpot_s themselves")
        for name in self.classes:
            if not name or len(name) > 64 or not name.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"slo.classes: {name!r} is no name: letters, digits, - and _, up to 64")
            chain = [name]
            while (following := self.classes[chain[-1]].degrade_to) is not None:
                if following not in self.classes:
                    raise ValueError(f"slo.classes.{chain[-1]}.degrade_to: there is no class {following!r}")
                if following in chain:
                    raise ValueError(f"slo.classes.{name}.degrade_to: leads back to {following!r}")
                chain.append(following)
        return self

    @property
    def is_on(self) -> bool:
        """Whether times are predicted at all."""
        return self.ttft_s is not None or self.tpot_s is not None or bool(self.classes)


class ServeSettings(_Settings):
    """The OpenAI HTTP front."""

    host: str = Field("127.0.0.1", description="address to listen on; under `serve deploy`: http_options in the file")
    port: int = Field(8000, ge=1, le=65535, description="HTTP port; under `serve deploy`: http_options in the file")
    max_body_bytes: Size = Field("4MiB", description="larger bodies get 413")
    max_n: int = Field(16, ge=1, description="largest n")
    max_prompts: int = Field(64, ge=1, description="prompts in one completions request")
    max_logprobs: int = Field(20, ge=0, description="most alternatives per token")
    request_timeout_s: float = Field(600.0, gt=0, description="a request that takes longer fails")
    api_key: str | None = Field(
        None,
        description="when set, requests must carry it as a bearer token; default: $KVRELAY_API_KEY, if any. "
        "On the command line, or in a file for `serve deploy`, Ray's dashboard shows it",
    )


class ClusterSettings(_Settings):
    """How many of each, and on what."""

    prefill: int = Field(1, ge=0, description="prefill workers; 0: decode workers compute prompts too (aggregated)")
    decode: int = Field(1, ge=1, description="decode workers")
    ingress: int = Field(1, ge=1, description="ingress replicas")
    cores_per_worker: int | None = Field(
        None,
        ge=1,
        description="physical CPU cores each worker is pinned to, its own and of one NUMA node while there are enough; "
        "default: at its start a fair share of the node among all workers wanted then, so set this where workers are to be added later",
    )
    num_cpus_per_worker: float | None = Field(None, ge=0, description="Ray CPUs each worker asks for")
    num_gpus_per_worker: float = Field(0.0, ge=0, description="Ray GPUs each worker asks for")
    dashboard_port: int = Field(
        8265, ge=1, le=65535, description="Ray dashboard; another when taken; of no effect under `serve deploy`"
    )
    secret: str | None = Field(
        None,
        description="authenticates workers to each other, until Ray stops; default: $KVRELAY_SECRET, else drawn at "
        "start. On the command line, or in a file for `serve deploy`, Ray's dashboard shows it",
    )
    tls: bool = Field(
        False,
        description="TLS 1.3 between workers and ingresses, requests and KV over tcp alike; both ends show certificates. "
        "Not for nixl, and not needed for what never leaves the host (shm)",
    )
    tls_cert: str | None = Field(
        None,
        description="PEM file, at the same path on every node, with a certificate for both client and server use; "
        "default: each process is issued one by an authority that the cluster's secret makes",
    )
    tls_key: str | None = Field(None, description="PEM file with the certificate's key, not encrypted")
    tls_ca: str | None = Field(
        None, description="PEM file with the authority whose certificates are let in: one of this cluster alone"
    )

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        files = (self.tls_cert, self.tls_key, self.tls_ca)
        if any(files) and not all(files):
            raise ValueError("tls_cert, tls_key and tls_ca go together: set all three or none")
        if any(files) and not self.tls:
            raise ValueError("tls_cert is of no effect while tls is off; set cluster.tls: on")
        return self


class PlannerSettings(_Settings):
    """How many workers there are, by load."""

    mode: Literal["auto", "off"] = Field(
        "off",
        description="auto: Serve starts and drains workers as the planner says, within the bounds below; off: there are as many as "
        "cluster.prefill and cluster.decode say",
    )
    profile: str | None = Field(
        None,
        description="a worker's speed: a file of `kvrelay profile --fit`, or one of configs/profiles, at the same path on every node; "
        "default: learnt from what workers report",
    )
    ttft_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="time to the first token that is planned for, s; default: slo.ttft_s, else 5",
    )
    tpot_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="time per token after the first, s; default: slo.tpot_s, else 0.1"
    )
    share: float = Field(0.9, ge=0.5, le=0.999, description="share of the requests that are to stay within both")
    min_prefill: int = Field(1, ge=1, description="fewest prefill workers")
    max_prefill: int = Field(4, ge=1, description="most prefill workers")
    min_decode: int = Field(1, ge=1, description="fewest decode workers")
    max_decode: int = Field(4, ge=1, description="most decode workers")
    max_workers: int | None = Field(
        None, ge=2, description="most workers of both roles together; default: no limit of its own"
    )
    interval_s: float = Field(10.0, ge=1, le=600, description="between two looks at the load")
    horizon_s: float = Field(60.0, ge=0, le=3600, description="how far ahead is planned: what a worker takes to start")
    hold_s: float = Field(
        300.0, ge=10, le=86400,
        description="fewer workers must have been enough for so long before there are fewer, and that long after the last change; in "
        "an hour a count turns at most 2 x 3600 / hold_s + 3 times",
    )  # fmt: skip
    margin: float = Field(
        0.15, ge=0, le=2, description="of the load: what the fewer workers must still carry on top of it"
    )
    period_s: float = Field(
        86400.0, ge=0, description="of a pattern that is used once the history shows it; 0: none is looked for"
    )
    drain_s: float = Field(
        120.0,
        ge=0,
        le=3600,
        description="what a worker that is given up may take to finish; then its sequences go on elsewhere",
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min_prefill > self.max_prefill or self.min_decode > self.max_decode:
            raise ValueError("a minimum is above its maximum")
        if self.max_workers is not None and self.max_workers < self.min_prefill + self.min_decode:
            raise ValueError("max_workers is below min_prefill + min_decode")
        return self


class Settings(_Settings):
    """All of it."""

    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    prefill: RoleSettings = Field(RoleSettings(), description="Prefill workers' own. None: as for all workers.")
    decode: RoleSettings = Field(RoleSettings(), description="Decode workers' own. None: as for all workers.")
    scheduler: SchedulerSettings = SchedulerSettings()
    cache: CacheSettings = CacheSettings()
    store: StoreSettings = StoreSettings()
    transfer: TransferSettings = TransferSettings()
    router: RouterSettings = RouterSettings()
    slo: SloSettings = SloSettings()
    serve: ServeSettings = ServeSettings()
    cluster: ClusterSettings = ClusterSettings()
    planner: PlannerSettings = PlannerSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        owns = {role: self.for_role(role) for role in Role}
        computed = {self.key_of(role, "dtype"): own.model.compute_dtype for role, own in owns.items()}
        kept = {self.key_of(role, "kv_dtype"): own.kv_dtype for role, own in owns.items()}
        for dtypes in (computed, kept):
            if len(set(dtypes.values())) > 1 and not self.transfer.convert_dtype:
                told = " and ".join(f"{key} is {dtype}" for key, dtype in dtypes.items())
                raise ValueError(f"{told}: set them alike, or transfer.convert_dtype to true")
        return self

    @property
    def kv_dtype(self) -> str:
        """The type of KV in a pool: `engine.kv_dtype`, or else the model's."""
        return self.model.compute_dtype if self.engine.kv_dtype == "auto" else self.engine.kv_dtype

    def for_role(self, role: Role) -> "Settings":
        """What one role's workers run with: its own section over `engine` and `model.dtype`; no role differs in it."""
        own = self._own(role).model_dump(exclude_none=True)
        dtype = own.pop("dtype", self.model.dtype)
        return self.model_copy(
            update={
                "model": self.model.model_copy(update={"dtype": dtype}),
                "engine": self.engine.model_copy(update=own),
                "prefill": RoleSettings(),
                "decode": RoleSettings(),
            }
        )

    def key_of(self, role: Role, name: str) -> str:
        """Where this role's `name`, a key of RoleSettings, is set: for messages."""
        if getattr(self._own(role), name) is not None:
            return f"{role}.{name}"
        return f"model.{name}" if name == "dtype" else f"engine.{name}"

    def _own(self, role: Role) -> RoleSettings:
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def tokens_per_hash(self) -> int:
        """Tokens that one block hash covers: the smallest block of any role, so that each has hashes of its own blocks."""
        return min(self._own(role).block_size or self.engine.block_size for role in Role)


def _nearest(error: ValidationError) -> str:
    """The first problem as one sentence; an unknown key is told with the nearest known one."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"][:2]]  # a third part names a type of a union
    if first["type"] != "extra_forbidden":
        message = first["msg"].removeprefix("Value error, ").replace("\n", " ")
        return f"{'.'.join(path) or 'configuration'}: {message}"
    model: Any = Settings
    for part in path[:-1]:
        model = model.model_fields[part].annotation
    if len(first["loc"]) > 2:  # inside a setting that is a mapping
        return f"unknown key {'.'.join(map(str, first['loc']))}"
    near = difflib.get_close_matches(path[-1], model.model_fields, n=1, cutoff=0.4)
    hint = f"; did you mean {'.'.join([*path[:-1], near[0]])}?" if near else ""
    return f"unknown setting {'.'.join(path)}{hint}"


def settings_from(data: dict[str, Any]) -> Settings:
    """Checked settings from nested plain data. Raises ConfigError naming the key."""
    try:
        return Settings.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_nearest(error)) from error


def planner_settings_from(data: dict[str, Any]) -> PlannerSettings:
    """The section `planner` alone. Raises ConfigError naming the key."""
    return settings_from({"planner": data}).planner


def load_settings(path: str | Path | None, overrides: dict[str, dict[str, Any]] | None = None) -> Settings:
    """Settings from a YAML file, then `overrides` (section -> key -> value; None means not given)."""
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = yaml.safe_load(Path(path).read_text()) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: {in_one_line(error)}") from error
        _require_sections(path, data)
    data = {
        section: values for section, values in data.items() if values is not None
    }  # "engine:" with all commented out
    for section, values in (overrides or {}).items():
        given = {key: value for key, value in values.items() if value is not None}
        if given:
            data[section] = {**data.get(section, {}), **given}
    return settings_from(data)


_OTHERS_FILES = {  # a key that only their files have -> whose they are, and what takes them
    "applications": "a Ray Serve file: serve deploy",
    "apiVersion": "a Kubernetes file: kubectl apply -f",
    "available_node_types": "a Ray cluster file: ray up",
}


def _require_sections(path: str | Path, data: object) -> None:
    """Raises ConfigError unless it is a mapping of sections to mappings."""
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected sections such as model:, engine:, cluster:")
    for key, whose in _OTHERS_FILES.items():
        if key in data:
            raise ConfigError(f"{path} holds no kvrelay settings but is {whose} {path}")
    for section, values in data.items():
        if section in Settings.model_fields and not isinstance(values, dict | None):
            raise ConfigError(f"{path}: {section}: expected settings as `key: value`, not {values!r}")
        if not isinstance(section, str):
            raise ConfigError(f"{path}: unknown setting {section!r}")


def in_one_line(error: Exception) -> str:
    """An error's message without YAML's excerpts of the text, which take several lines."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem:
        where = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        return f"{error.problem}{where}"
    return " ".join(str(error).split())


def environment_api_key() -> str | None:
    """KVRELAY_API_KEY, None when it is not set or empty."""
    return os.environ.get(API_KEY_VARIABLE) or None


def with_secrets(settings: Settings) -> Settings:
    """With the API key and the cluster's secret of the environment, where the settings have none."""
    secret = settings.cluster.secret or os.environ.get(SECRET_VARIABLE) or None
    cluster = settings.cluster.model_copy(update={"secret": secret})
    return with_api_key(settings, environment_api_key()).model_copy(update={"cluster": cluster})


def with_api_key(settings: Settings, api_key: str | None) -> Settings:
    """With this API key where the settings have none."""
    serve = settings.serve.model_copy(update={"api_key": settings.serve.api_key or api_key})
    return settings.model_copy(update={"serve": serve})


def cache_dir(settings: ModelSettings | None = None) -> Path:
    """Where converted checkpoints and compiled kernels are kept."""
    if settings is not None and settings.cache_dir:
        return Path(settings.cache_dir).expanduser()
    if env := os.environ.get("KVRELAY_CACHE"):
        return Path(env).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay"


def native_disabled() -> bool:
    """KVRELAY_NATIVE=0 turns the compiled CPU kernels off (they fall back to torch)."""
    return os.environ.get("KVRELAY_NATIVE", "1") == "0"


def trace_exporters() -> list[str]:
    """Where spans go, by OpenTelemetry's own variables: OTEL_TRACES_EXPORTER, else OTLP when an endpoint is set."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return []
    has_endpoint = any(
        os.environ.get(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    )
    names = os.environ.get("OTEL_TRACES_EXPORTER") or ("otlp" if has_endpoint else "")
    return [name for part in names.split(",") if (name := part.strip()) not in ("", "none")]


def otlp_protocol() -> str:
    """OpenTelemetry's variables for it: "http/protobuf" (its default) or "grpc"."""
    own = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
    return own or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"


def hub_offline() -> bool:
    """Whether Hugging Face's own switches forbid the network."""
    return any(
        os.environ.get(name, "0").lower() in ("1", "true", "yes") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def settings_table() -> str:
    """Every setting with its default and meaning, as the Markdown of docs/configuration.md."""
    lines: list[str] = []
    for section, field in Settings.model_fields.items():
        model: Any = field.annotation
        lines += [
            f"## `{section}`",
            "",
            field.description or (model.__doc__ or "").strip(),
            "",
            "| key | default | meaning |",
            "|---|---|---|",
        ]
        for name, setting in model.model_fields.items():
            lines.append(f"| `{section}.{name}` | `{setting.default}` | {setting.description or ''} |")
        lines.append("")
    return "\n".join(lines)
