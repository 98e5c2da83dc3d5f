"""The values of settings that are a choice. Standard library only, so that `--help` can list them without pydantic."""

from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int4"]
KvDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3"]
BackendName = Literal["auto", "reference", "cpu", "cuda"]
TransportName = Literal["auto", "cuda_ipc", "nixl", "shm", "tcp"]
KvOrder = Literal["NHD", "HND"]
ChecksMode = Literal["full", "sampled", "off"]
EvictionPolicyName = Literal["lru", "lfu", "survival"]
WritePolicy = Literal["write-through", "selective", "write-back"]
Compression = Literal["none", "lossless", "int8", "fp8"]
TenantBy = Literal["auto", "cache_salt", "user", "api_key"]
PreemptionSetting = Literal["auto", "swap", "recompute", "return-to-prefill"]
Speculation = Literal["auto", "ngram", "model", "off"]
PrefetchMode = Literal["off", "best-effort", "wait", "timeout"]
OnMiss = Literal["refuse", "queue"]
TlsMode = Literal["auto"] | bool
PlannerMode = Literal["auto", "off"]
ToolParser = Literal[
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v3_1",
    "deepseek_v3_2",
    "gemma3_function",
    "gemma4",
    "glm4",
    "hermes",
    "kimi_k2",
    "llama3",
    "minimax",
    "mistral",
    "mistral_args",
    "qwen3_coder",
]
ReasoningParser = Literal["auto", "none", "qwen3", "deepseek_r1", "mistral", "gemma4", "granite", "kimi", "seed_oss"]
UnknownFields = Literal["ignore", "refuse"]
