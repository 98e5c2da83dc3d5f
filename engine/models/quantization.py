"""`quantization_config` of a checkpoint's config.json as data: which linear weights are quantised, and how.

Pure: imports no torch. engine/checkpoints/stored_tensors.py has the tensors of each format.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvrelay.errors import CheckpointCorrupt, UnsupportedModel

Json = Mapping[str, Any]
Packing = Literal["fp8", "int8", "int32", "gptq", "awq", "mxfp4"]

_INSTEAD = """use an fp8, int8, int4 (compressed-tensors, GPTQ, AWQ) or MXFP4 checkpoint, a GGUF file, or the bf16 \
checkpoint (with model.quantization int8 or int4)"""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a linear weight [N, K] is stored.

    packing: "fp8" and "int8": values as they are; "int32": compressed-tensors' words; the others by their own layout.
    group: inputs that share a scale; 0: all of an output's. block: (rows, columns) that share one (fp8).
    has_zeros: integers have zero points; zero_shift is added to stored ones.
    """

    packing: Packing
    bits: int = 8
    group: int = 0
    block: tuple[int, int] | None = None
    has_zeros: bool = False
    zero_shift: int = 0

    def __str__(self) -> str:
        name = {"int32": f"int{self.bits}", "gptq": f"GPTQ int{self.bits}", "awq": "AWQ int4"}.get(self.packing)
        groups = f" in groups of {self.group}" if self.group else ""
        blocks = f" in blocks of {self.block[0]} x {self.block[1]}" if self.block else ""
        return (name or self.packing) + groups + blocks


@dataclass(frozen=True, slots=True)
class Quantization:
    """The formats of a checkpoint's linear weights.

    groups: (targets, format). A target is a module's name, "re:" and a pattern that a name begins with, or "Linear".
    ignored: the same, of modules that are not quantised. has_kv_scheme: it has scales for a quantised KV cache.
    """

    method: str
    groups: tuple[tuple[tuple[str, ...], WeightFormat], ...]
    ignored: tuple[str, ...] = ()
    has_kv_scheme: bool = False

    def __str__(self) -> str:
        return " and ".join(dict.fromkeys(str(format) for _, format in self.groups)) + f" ({self.method})"

    def format_of(self, *names: str) -> WeightFormat | None:
        """The format of a linear module with these names: a target by name before one by pattern before "Linear"."""
        if _rank(self.ignored, names) is not None:
            return None
        ranks = [(rank, i) for i, (targets, _) in enumerate(self.groups) if (rank := _rank(targets, names)) is not None]
        return self.groups[min(ranks)[1]][1] if ranks else None


def _rank(targets: tuple[str, ...], names: tuple[str, ...]) -> int | None:
    """0: by name, 1: by pattern, 2: "Linear"; None: no target matches."""
    if any(name in targets for name in names):
        return 0
    patterns = [target.removeprefix("re:") for target in targets if target.startswith("re:")]
    if any(re.match(pattern, name) for pattern in patterns for name in names):
        return 1
    return 2 if "Linear" in targets else None


def quantization_of(raw: Json, model: str) -> Quantization | None:
    """From a config.json; None: plain weights. Raises UnsupportedModel with what would work, CheckpointCorrupt."""
    nested = raw.get("text_config")
    inner: Json = nested if isinstance(nested, Mapping) else {}
    config = raw.get("quantization_config") or raw.get("compression_config") or inner.get("quantization_config")
    if not config:
        return None
    config = config if isinstance(config, Mapping) else config.to_dict()
    method = str(config.get("quant_method") or ("compressed-tensors" if "config_groups" in config else "unknown"))
    read, own = _READERS.get(method), _Config(model, method, config)
    if read is None:
        raise own.refused()
    try:
        found = read(own)
        found.format_of("")  # its patterns compile
        return found
    except (TypeError, ValueError, AttributeError, KeyError, re.error) as error:
        raise CheckpointCorrupt("config.json", f"quantization_config ({method}) is malformed: {error}") from error


@dataclass(frozen=True, slots=True)
class _Config:
    model: str
    method: str
    keys: Json

    def refused(self, what: str = "") -> UnsupportedModel:
        by = f"quantised by {self.method}" + (f" with {what}" if what else "")
        return UnsupportedModel(self.model, f"weights {by} are not supported: {_INSTEAD}")

    def one(self, weights: WeightFormat) -> Quantization:
        """All linear weights are stored so, unless their tensors are plain."""
        return Quantization(self.method, ((("Linear",), weights),), (), bool(self.keys.get("kv_cache_scheme")))


def _fp8(config: _Config) -> Quantization:
    algorithm = (config.keys.get("quantization") or config.keys).get("quant_algo", "FP8")  # ModelOpt's
    if algorithm != "FP8":
        raise config.refused(f"quant_algo {algorithm}")
    return config.one(WeightFormat("fp8", block=_block(config.keys.get("weight_block_size"))))


def _block(sizes: Any) -> tuple[int, int] | None:
    if sizes is None:
        return None
    rows, columns = map(int, sizes.split("x") if isinstance(sizes, str) else sizes)
    if min(rows, columns) < 1:
        raise ValueError(f"blocks of {rows} x {columns}")
    return rows, columns


def _gptq(config: _Config) -> Quantization:
    keys, stored = config.keys, config.keys.get("checkpoint_format") or "gptq"
    if keys.get("desc_act"):
        raise config.refused("desc_act (groups by activation order)")
    if any(not str(pattern).startswith("-:") for pattern in keys.get("dynamic") or ()):
        raise config.refused("dynamic (bits of some modules)")
    if keys["bits"] not in (4, 8) or stored not in ("gptq", "gptq_v2"):
        raise config.refused(f"{keys['bits']} bits in checkpoint_format {stored}")
    shift = int(stored == "gptq")  # which stores zero points less one
    return config.one(WeightFormat("gptq", keys["bits"], _group(keys["group_size"]), has_zeros=True, zero_shift=shift))


def _awq(config: _Config) -> Quantization:
    keys = config.keys
    bits, version = keys.get("bits", keys.get("w_bit", 4)), str(keys.get("version") or "gemm").lower()
    if bits != 4 or version != "gemm":
        raise config.refused(f"version {version} and {bits} bits")
    group = _group(keys.get("group_size", keys.get("q_group_size", 128)))
    return config.one(WeightFormat("awq", 4, group, has_zeros=bool(keys.get("zero_point", True))))


def _group(size: Any) -> int:
    """Inputs that share a scale; 0: all."""
    if size in (None, -1):
        return 0
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"group size {size!r}")
    return size


def _compressed_tensors(config: _Config) -> Quantization:
    keys = config.keys
    sparsity = (keys.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense" or keys.get("transform_config"):
        raise config.refused(f"sparsity {sparsity} or transform_config")
    formats = tuple((tuple(it["targets"]), _compressed_format(config, it)) for it in keys["config_groups"].values())
    return Quantization(config.method, formats, tuple(keys.get("ignore") or ()), bool(keys.get("kv_cache_scheme")))


def _compressed_format(config: _Config, group: Json) -> WeightFormat:
    stored, weights = str(group.get("format") or config.keys.get("format")), group["weights"]
    bits, kind = weights.get("num_bits", 8), str(weights.get("type", "int")).lower()
    size, has_zeros = _group(weights.get("group_size")), not weights.get("symmetric", True)
    if str(weights.get("actorder")).lower() in ("group", "dynamic"):
        raise config.refused("actorder group (groups by activation order)")
    plain = stored in ("float-quantized", "int-quantized", "naive-quantized")
    if kind == "float" and bits == 8 and plain and not size:
        return WeightFormat("fp8", block=_block(weights.get("block_structure")))
    if kind == "int" and bits == 8 and plain:
        return WeightFormat("int8", 8, size, has_zeros=has_zeros)
    if kind == "int" and bits in (4, 8) and stored == "pack-quantized":
        return WeightFormat("int32", bits, size, has_zeros=has_zeros)
    if kind == "float" and bits == 4 and stored == "mxfp4-pack-quantized":
        return WeightFormat("mxfp4", 4, 32)
    raise config.refused(f"format {stored} and {kind} weights of {bits} bits")


_READERS: dict[str, Callable[[_Config], Quantization]] = {
    "fp8": _fp8, "fbgemm_fp8": _fp8, "modelopt": _fp8, "gptq": _gptq, "awq": _awq,
    "compressed-tensors": _compressed_tensors,
}  # fmt: skip
