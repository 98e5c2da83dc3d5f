"""Settings of the model, of one worker's engine, and of what a role's workers have of their own."""

from typing import Annotated, Self

from pydantic import AfterValidator, model_validator

from kvrelay.settings.choices import (
    BackendName,
    Dtype,
    KvDtype,
    KvOrder,
    PreemptionSetting,
    Quantization,
    ReasoningParser,
    ToolParser,
)
from kvrelay.settings.choices import Speculation as SpeculationMode
from kvrelay.settings.section import Budget, Section, Size, setting

DEFAULT_MODEL = "smollm2-135m-instruct"


def _checked_block_size(tokens: int) -> int:
    if tokens & (tokens - 1) or not 1 <= tokens <= 512:
        raise ValueError("a block holds a power of two of tokens, up to 512")
    return tokens


BlockSize = Annotated[int, AfterValidator(_checked_block_size)]


class ModelSettings(Section):
    """Which model, and in what precision."""

    source: str = setting(DEFAULT_MODEL, "A local folder, a GGUF file, a hub id, or the built-in default.")
    served_name: str | tuple[str, ...] | None = setting(
        None,
        "The name in /v1/models, or a list of names, of which answers have the first; default: derived from source.",
    )
    dtype: Dtype = setting(
        "auto", "Type of weights and activations, and of KV unless engine.kv_dtype is set; auto: bfloat16."
    )
    quantization: Quantization = setting(
        "none",
        "Weights of all linear layers as integers: each step reads less memory, and outputs differ from the "
        "unquantised model's.",
    )
    max_model_len: int | None = setting(
        None,
        "Longest prompt plus output; default: the model's own, reduced to what the KV pool holds.",
        unit="tokens",
        ge=16,
    )

    chat_template: str | None = setting(
        None,
        "A Jinja file that turns chats into prompts, at the same path on every node; default: the model's own, and "
        "without one the model has no chat.",
    )
    reasoning_parser: ReasoningParser = setting(
        "auto",
        "How the model marks its reasoning, which chat replies return apart; auto: as its chat template shows; "
        "deepseek_r1: <think> as in qwen3, and assumed where neither prompt nor output begins with it.",
    )

    tool_parser: ToolParser = setting(
        "auto",
        "How the model writes tool calls; auto: as its chat template renders them, as hermes where the template knows "
        "no tools; none: requests with tools are refused.",
    )

    @property
    def served_names(self) -> tuple[str, ...]:
        """As set; none: one derived from the source."""
        return (self.served_name,) if isinstance(self.served_name, str) else self.served_name or ()

    @property
    def compute_dtype(self) -> str:
        """The type of weights and activations."""
        return "bfloat16" if self.dtype == "auto" else self.dtype


class EngineSettings(Section):
    """One worker's engine."""

    backend: BackendName = setting("auto", "Kernels; auto: cuda where it can run, else cpu.")
    device: str = setting("auto", "auto, cpu, cuda or cuda:<n>.")
    block_size: BlockSize = setting(16, "Size of a KV block; a power of two, at most 512.", unit="tokens")
    kv_layout: KvOrder = setting(
        "NHD", "Order of a block's tokens (N) and heads (H) in memory; HND: backends reference and cuda only."
    )
    kv_memory: Budget | None = setting(
        None,
        "KV pool of each worker: a size, or a share (0.5 or 50%) of the memory that is free after the weights are "
        "loaded; on a CPU the node's workers divide that share. Default: 0.9 on a GPU; on a CPU a quarter of the free "
        "memory divided by the node's workers, from 64 MiB to 1 GiB.",
    )
    kv_dtype: KvDtype = setting("auto", "Type of KV; fp8_e4m3 keeps a scale with each vector; auto: as model.dtype.")
    token_budget: int | None = setting(
        None, "Most tokens in one step; default: 8192 on a GPU, 512 on a CPU.", unit="tokens", ge=16
    )
    max_running: int | None = setting(
        None,
        "Most running sequences in one batch; at most token_budget; default: 256 on a GPU, 64 on a CPU.",
        unit="sequences",
        ge=1,
    )
    num_threads: int | None = setting(None, "CPU threads; default: the worker's physical cores.", ge=1)
    prefix_caching: bool = setting(True, "Keep full blocks for later prompts with the same prefix.")
    preemption: PreemptionSetting = setting(
        "auto",
        "How a preempted sequence comes back: swap (KV goes to host memory), recompute, or return-to-prefill (a "
        "decode worker returns it to a prefill worker); auto: the cheapest by measured speeds. Recompute where the "
        "mode is impossible.",
    )
    swap_memory: Size = setting(256 << 20, "Host memory for the KV of preempted sequences, allocated on demand.")
    speculation: SpeculationMode = setting(
        "auto",
        "Speculative decoding while measurements show a gain: ngram (prompt lookup), model (draft_model), auto (both "
        "where there is a draft_model). Tokens stay the same.",
    )
    draft_model: str | None = setting(
        None,
        "A small model with the same vocabulary that drafts on decode workers; same forms as model.source, computed "
        "in model.dtype.",
    )

    @property
    def draft_source(self) -> str | None:
        """The draft model; None when none drafts."""
        return self.draft_model if self.speculation in ("auto", "model") else None

    @property
    def draft_kv_bytes(self) -> int:
        """The draft model's KV pool on each decode worker, beside kv_memory: a quarter of a size that is set there, and
        at least 64 MiB.
        """
        return max(64 << 20, (self.kv_memory_bytes or 0) // 4)

    @property
    def kv_memory_share(self) -> float | None:
        """The share of free memory that the pool takes; None when its size is given, or nothing."""
        return self.kv_memory if isinstance(self.kv_memory, float) else None

    @property
    def kv_memory_bytes(self) -> int | None:
        """The pool's size; None when a share is given, or nothing."""
        return self.kv_memory if isinstance(self.kv_memory, int) else None

    @model_validator(mode="after")
    def _check_draft_model(self) -> Self:
        if self.speculation == "model" and self.draft_model is None:
            raise ValueError("speculation: model needs engine.draft_model; ngram drafts without one")
        return self


class RoleSettings(Section):
    """One role's own values (`prefill.block_size`, `decode.block_size`, …), over `engine` and `model.dtype`; default:
    as all workers.
    """

    dtype: Dtype | None = setting(None, "As model.dtype; different dtypes need transfer.convert_dtype.")
    backend: BackendName | None = setting(None, "As engine.backend.")
    device: str | None = setting(None, "As engine.device.")
    block_size: BlockSize | None = setting(
        None, "As engine.block_size; prompts are hashed by the smallest.", unit="tokens"
    )
    kv_layout: KvOrder | None = setting(None, "As engine.kv_layout.")
    kv_memory: Budget | None = setting(None, "As engine.kv_memory.")
    kv_dtype: KvDtype | None = setting(None, "As engine.kv_dtype; different dtypes need transfer.convert_dtype.")
    token_budget: int | None = setting(None, "As engine.token_budget.", unit="tokens", ge=16)
    max_running: int | None = setting(None, "As engine.max_running.", unit="sequences", ge=1)
    num_threads: int | None = setting(None, "As engine.num_threads.", ge=1)
