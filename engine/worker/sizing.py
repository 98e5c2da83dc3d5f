"""How large a worker's KV pool, steps and batch are: as the settings have it, else by the device. Pure."""

from dataclasses import dataclass

from kvrelay.settings.engine import EngineSettings

GPU_SHARE = 0.9  # of the memory that is free once the weights are loaded; the rest is for activations and graphs
GPU_TOKENS, GPU_SEQUENCES = 8192, 256
CPU_SHARE = 0.25  # of the free memory, for all workers of the machine
CPU_LEAST_BYTES, CPU_MOST_BYTES = 64 << 20, 1 << 30  # of one worker: beyond, attention over the pool is the limit
CPU_TOKENS, CPU_SEQUENCES = 512, 64  # longer steps prefill no faster on a CPU, and delay the sequences that decode


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Either `kv_memory_bytes`, or `kv_memory_share` of the memory that is free once the weights are loaded.

    token_budget: tokens in a step; max_running: sequences in a batch; pool_reason, step_reason: why, for people.
    """

    kv_memory_bytes: int | None
    kv_memory_share: float | None
    token_budget: int
    max_running: int
    pool_reason: str
    step_reason: str

    def describe(self, pool_bytes: int) -> str:
        """One line, for a pool that came out at `pool_bytes`."""
        return (
            f"KV pool {pool_bytes / (1 << 20):,.0f} MiB ({self.pool_reason}), {self.token_budget:,} tokens a step, "
            f"{self.max_running:,} sequences ({self.step_reason})"
        )


def engine_sizes(
    engine: EngineSettings, *, has_device: bool, free_host_bytes: int, num_workers: int, gpus_per_worker: float
) -> EngineSizes:
    """What `engine` sets, and defaults for the rest.

    Args:
        engine: of the worker's role.
        has_device: the backend computes in a GPU's own memory.
        free_host_bytes: what this process may still take of the host's memory.
        num_workers: that share the machine.
        gpus_per_worker: what each requests of Ray; below 1: workers share a GPU; 0: unknown, all share one.
    """
    workers = f"{num_workers} workers" if num_workers > 1 else "1 worker"
    share, num_bytes = engine.kv_memory_share, engine.kv_memory_bytes
    if share is not None:
        pool = f"engine.kv_memory: {share:.0%} of the free memory"
        share /= 1 if has_device else max(num_workers, 1)  # what others took of a GPU is not free
    elif num_bytes is not None:
        pool = "engine.kv_memory"
    elif has_device:
        sharers = round(1 / gpus_per_worker) if 0 < gpus_per_worker < 1 else 1 if gpus_per_worker else num_workers
        share = GPU_SHARE / max(sharers, 1)
        pool = f"{share:.0%} of the GPU's free memory" + (f", which {sharers} workers share" if sharers > 1 else "")
    else:
        num_bytes = int(CPU_SHARE * free_host_bytes / max(num_workers, 1))
        num_bytes = min(max(num_bytes, CPU_LEAST_BYTES), CPU_MOST_BYTES)
        pool = f"by {free_host_bytes / (1 << 30):.1f} GiB of free memory and {workers}; at most 1 GiB"
    device, tokens, sequences = (
        ("a GPU", GPU_TOKENS, GPU_SEQUENCES) if has_device else ("a CPU", CPU_TOKENS, CPU_SEQUENCES)
    )
    tokens = engine.token_budget or tokens
    sequences = min(engine.max_running or sequences, tokens)
    given = [name for name in ("token_budget", "max_running") if getattr(engine, name) is not None]
    reason = ", ".join(f"engine.{name}" for name in given) or f"defaults on {device}"
    return EngineSizes(num_bytes, share, tokens, sequences, pool, reason)


def context_notice(max_model_len: int, wanted: int) -> str | None:
    """What to say of a context that the pool cuts to `max_model_len` tokens; None: it is as `wanted`."""
    if max_model_len >= wanted:
        return None
    return (
        f"the context is cut from {wanted:,} to {max_model_len:,} tokens, which is what the KV pool holds: "
        "raise engine.kv_memory, or choose engine.kv_dtype fp8_e4m3"
    )
