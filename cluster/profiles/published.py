"""Ready-made profiles of datacentre GPUs, made of published figures; configs/profiles/ holds what it makes.

A worker's curve is a roofline with two efficiencies: of the tensor cores in matrix products, and of the memory when weights and
KV are read. They and the cost of a sequence are chosen so that `saturated_tokens_per_s` reproduces NVIDIA's own throughput table
for that model, GPU, number and type (the error is in each profile). What saturation cannot show is assumed, and says so.
"""

from dataclasses import dataclass
from pathlib import Path

from kvrelay.cluster.profiles.profile import Fit, FitError, SimulatorProfile, Source, load_profile
from kvrelay.errors import ConfigError
from kvrelay.router.planning.speed_curve import SpeedCurve

BLOCK_TOKENS = 16
TOKEN_BUDGET = 2048
MAX_RUNNING = 512
TABLE_RUNNING = 2048  # max_batch_size of the table's runs
OVERHEAD_S = 0.002
MEMORY_SHARE = 0.9  # of the GPU's: the rest is activations and the runtime
HOST_SHARE = 0.5  # of a machine's memory, for KV
PCIE_SHARE = 0.8
GPUS_PER_NODE = 8
TABLE = (
    "NVIDIA/TensorRT-LLM docs/source/performance/perf-overview.md at commit 258c7540c03517def55d9a5aadfa9288af474e1b "
    "(version 0.17, maximum throughput)"
)
_ENGINE = "Mooncake's README: its Transfer Engine with 40 GB of KV, "
_LENGTHS = (
    (128, 128), (128, 2048), (128, 4096), (500, 2000), (1000, 1000), (2048, 128), (2048, 2048), (5000, 500), (20000, 2000),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU and its share of a machine of eight. Bytes, seconds, floating point operations per second (dense)."""

    name: str
    memory_bytes: float
    hbm_bytes_per_s: float
    flops: float  # 16-bit
    fp8_flops: float  # 0: it has none
    attention_flops: float
    attention_origin: str
    pcie_bytes_per_s: float  # each way
    nvlink_bytes_per_s: float  # each way
    node_network_bytes_per_s: float
    network_origin: str
    node_memory_bytes: float
    origin: str


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense model with grouped-query attention."""

    name: str
    num_layers: int
    hidden: int
    ffn: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    num_params: float
    max_model_len: int

    @property
    def linear_params(self) -> int:
        """That a token is multiplied with: layers and output head, not the embedding."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.num_kv_heads * self.head_dim
        return self.num_layers * (attention + 3 * self.hidden * self.ffn) + self.vocab * self.hidden

    def kv_bytes_per_token(self, value_bytes: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * value_bytes


@dataclass(frozen=True, slots=True)
class Build:
    """A model on GPUs. The shares and `sequence_s` are fitted to `table`: output tokens/s at each of _LENGTHS."""

    name: str
    shape: Shape
    gpu: Gpu
    num_gpus: int
    is_fp8: bool
    flops_share: float
    bandwidth_share: float
    sequence_s: float
    table: tuple[float, ...] = ()  # none: the shares are another build's
    pool_tokens: int | None = None  # less than fits
    note: str = ""


H100 = Gpu(
    "H100 SXM 80 GB", 80e9, 3.35e12, 989.4e12, 1978.9e12,
    620.7e12, "FlashAttention-3, forward, head size 128, 16k tokens: pytorch/benchmark #2391",
    64e9, 450e9, 190e9, _ENGINE + "8 x 400 Gb/s RoCE", 2e12, "NVIDIA H100 and DGX H100 datasheets",
)  # fmt: skip
A100 = Gpu(
    "A100 SXM 80 GB", 80e9, 2.039e12, 312e12, 0.0,
    190e12, "FlashAttention-2 (arXiv 2307.08691): 50 to 73 % of the peak; 61 %",
    32e9, 300e9, 87e9, _ENGINE + "4 x 200 Gb/s RoCE", 2e12, "NVIDIA A100 and DGX A100 datasheets",
)  # fmt: skip
LLAMA_8B = Shape("Llama-3.1-8B", 32, 4096, 14336, 8, 128, 128256, 8.03e9, 131072)
LLAMA_70B = Shape("Llama-3.1-70B", 80, 8192, 28672, 8, 128, 128256, 70.55e9, 131072)

_8B_H100 = (28836.77, 21109.38, 13593.65, 16500.69, 15244.78, 3556.73, 9488.42, 3559.36, 1401.31)
_70B_H100 = (14730.69, 17061.82, 14171.43, 14679.33, 11451.16, 1923.41, 8801.95, 2457.42, 1512.6)
_8B_A100 = (6627.27, 5255.99, 3453.79, 4276.58, 3786.83, 799.61, 2424.16, 825.13, 330.04)
_70B_A100 = (4717.62, 5241.5, 3724.67, 4445.37, 3320.41, 542.38, 2553.71, 696.34, 413.38)
_AS_FP8 = "shares as the fp8 table gives them: assumed equal for 16-bit values, which the table does not have"
_MOONCAKE = (
    "the machines of Mooncake's paper (arXiv 2407.00079: 8 x A800 80 GB, up to 800 Gb/s RDMA) with a pool of 0.5 Mtok, chosen so "
    "that its trace does not fit; speed is the A100's: an A800's NVLink is slower"
)

BUILDS = {
    build.name: build
    for build in (
        Build("llama-3.1-8b-h100-fp8", LLAMA_8B, H100, 1, True, 0.62, 0.875, 5e-6, _8B_H100),
        Build("llama-3.1-8b-h100-bf16", LLAMA_8B, H100, 1, False, 0.62, 0.875, 5e-6, note=_AS_FP8),
        Build("llama-3.1-70b-h100x8-fp8", LLAMA_70B, H100, 8, True, 0.32, 0.425, 1e-5, _70B_H100),
        Build("llama-3.1-70b-h100x8-bf16", LLAMA_70B, H100, 8, False, 0.32, 0.425, 1e-5, note=_AS_FP8),
        Build("llama-3.1-8b-a100-fp16", LLAMA_8B, A100, 1, False, 0.87, 0.8, 3e-5, _8B_A100),
        Build("llama-3.1-70b-a100x8-fp16", LLAMA_70B, A100, 8, False, 0.56, 0.425, 3e-5, _70B_A100),
        Build("llama-70b-a800x8-mooncake", LLAMA_70B, A100, 8, False, 0.56, 0.425, 3e-5, _70B_A100, 500_000, _MOONCAKE),
    )
}


def published_profile(name: str) -> SimulatorProfile:
    """Raises ConfigError that lists the names."""
    if name not in BUILDS:
        raise ConfigError(f"no ready-made profile {name}; there are {', '.join(BUILDS)}")
    return _profile(BUILDS[name])


def find_profile(name: str) -> SimulatorProfile:
    """A ready-made profile by its name, else the file of that name. Raises ConfigError."""
    if Path(name).suffix != ".json" and not Path(name).is_file():
        return published_profile(name)
    return load_profile(name)


def _profile(build: Build) -> SimulatorProfile:
    shape, gpu, count = build.shape, build.gpu, build.num_gpus
    value_bytes = 1 if build.is_fp8 else 2
    kv_bytes = shape.kv_bytes_per_token(value_bytes)
    curve = _curve(build, kv_bytes)
    fits = int((MEMORY_SHARE * gpu.memory_bytes * count - shape.num_params * value_bytes) / kv_bytes)
    per_node = GPUS_PER_NODE // count
    host_bytes = HOST_SHARE * gpu.node_memory_bytes / per_node
    network = gpu.node_network_bytes_per_s / per_node
    profile = SimulatorProfile(
        name=build.name,
        source=_sources(build),
        prefill=curve,
        decode=curve,
        block_size=BLOCK_TOKENS,
        num_blocks=(build.pool_tokens or fits) // BLOCK_TOKENS,
        tier_blocks={} if build.pool_tokens else {"host": int(host_bytes / kv_bytes / BLOCK_TOKENS)},
        token_budget=TOKEN_BUDGET,
        max_running=MAX_RUNNING,
        max_model_len=shape.max_model_len,
        kv_bytes_per_token=kv_bytes,
        link_bytes_per_s=network,
        local_bytes_per_s=gpu.nvlink_bytes_per_s * count,
        load_bytes_per_s={"host": PCIE_SHARE * gpu.pcie_bytes_per_s * count, "remote": network},
        workers_per_node=per_node,
        cost_per_hour=float(count),
    )
    return profile.model_copy(update={"fit": _fit(build, profile)}) if build.table else profile


def _curve(build: Build, kv_bytes: int) -> SpeedCurve:
    shape, gpu, count = build.shape, build.gpu, build.num_gpus
    flops = (gpu.fp8_flops if build.is_fp8 else gpu.flops) * count * build.flops_share
    bandwidth = gpu.hbm_bytes_per_s * count * build.bandwidth_share
    linear = shape.linear_params
    return SpeedCurve(
        overhead_s=OVERHEAD_S,
        weights_s=_rounded(linear * (1 if build.is_fp8 else 2) / bandwidth),
        token_s=_rounded(2 * linear / flops),
        pair_s=_rounded(4 * shape.hidden * shape.num_layers / (gpu.attention_flops * count)),
        context_s=_rounded(kv_bytes / bandwidth),
        sequence_s=build.sequence_s,
    )


def saturated_tokens_per_s(profile: SimulatorProfile, input_tokens: int, output_tokens: int) -> float:
    """Output tokens per second of one worker that prefills and decodes, with requests always waiting.

    Each request pays for its prompt and for its share of the steps that it decodes in; the batch is what the pool holds at
    half-grown sequences.
    """
    curve, context = profile.decode, input_tokens + output_tokens / 2
    batch = min(TABLE_RUNNING, profile.pool_tokens / context)
    prompt_s = input_tokens * curve.token_s + input_tokens**2 / 2 * curve.pair_s
    step_s = (
        curve.overhead_s
        + max(curve.weights_s, batch * curve.token_s)
        + batch * (context * curve.context_s + curve.sequence_s)
    )
    return output_tokens / (prompt_s + output_tokens * step_s / batch)


def _fit(build: Build, profile: SimulatorProfile) -> Fit:
    """How far the saturated throughput is from the table's."""
    whole = profile
    if build.pool_tokens:
        whole = _profile(BUILDS["llama-3.1-70b-a100x8-fp16"])
    errors = sorted(
        abs(saturated_tokens_per_s(whole, *lengths) / told - 1)
        for lengths, told in zip(_LENGTHS, build.table, strict=True)
    )
    error = FitError(
        num_samples=len(errors), median=_rounded(errors[len(errors) // 2]), p90=_rounded(errors[int(0.9 * len(errors))])
    )
    return Fit(
        model=build.shape.name,
        dtype="fp8" if build.is_fp8 else "fp16",
        device=f"{build.num_gpus} x {build.gpu.name}",
        threads=0,
        date="TensorRT-LLM 0.17",
        errors={"throughput": error},
    )


def _sources(build: Build) -> tuple[Source, ...]:
    gpu, shape = build.gpu, build.shape
    flops = gpu.fp8_flops if build.is_fp8 else gpu.flops
    fitted = f"fitted to {TABLE}" if build.table else build.note
    return (
        Source(constant="dense peak of one GPU", value=flops, unit="FLOP/s", origin=gpu.origin),
        Source(constant="memory bandwidth of one GPU", value=gpu.hbm_bytes_per_s, unit="B/s", origin=gpu.origin),
        Source(constant="memory of one GPU", value=gpu.memory_bytes, unit="B", origin=gpu.origin),
        Source(constant="PCIe, each way", value=gpu.pcie_bytes_per_s, unit="B/s", origin=gpu.origin),
        Source(constant="NVLink, each way", value=gpu.nvlink_bytes_per_s, unit="B/s", origin=gpu.origin),
        Source(constant="machine's network", value=gpu.node_network_bytes_per_s, unit="B/s", origin=gpu.network_origin),
        Source(constant="attention in prompts", value=gpu.attention_flops, unit="FLOP/s", origin=gpu.attention_origin),
        Source(
            constant="weights that a token is multiplied with",
            value=shape.linear_params,
            origin=f"config of {shape.name}",
        ),
        Source(constant="share of the peak in matrix products", value=build.flops_share, origin=fitted),
        Source(constant="share of the memory bandwidth", value=build.bandwidth_share, origin=fitted),
        Source(constant="sequence_s", value=build.sequence_s, unit="s", origin=fitted),
        Source(constant="overhead_s", value=OVERHEAD_S, unit="s", origin="assumed: the table does not show it"),
        Source(
            constant="share of memory for weights and KV", value=MEMORY_SHARE, origin="assumed: as engines' defaults"
        ),
        Source(constant="share of host memory for KV", value=HOST_SHARE, origin="assumed"),
        Source(constant="share of PCIe's rate", value=PCIE_SHARE, origin="assumed"),
        Source(constant="cost_per_hour", value=build.num_gpus, unit="GPU hours", origin="GPUs of a worker; no price"),
        *(
            [Source(constant="pool", value=build.pool_tokens, unit="tokens", origin=build.note)]
            if build.pool_tokens
            else ()
        ),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
