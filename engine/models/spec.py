"""A decoder as data: one frozen `ModelSpec` per checkpoint, read from its HF config.

Holds every difference between model families. Pure: imports no torch and no transformers, so routers
and tests may read a model's shape without loading it. Both config dialects are read: rope_theta +
rope_scaling (transformers 4) and rope_parameters (transformers 5), nested text_config included.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvrelay.engine.models.families import ALIASES, ARCHITECTURES, FAMILIES, ConfigText, Family, Json
from kvrelay.engine.models.quantization import Quantization, quantization_of
from kvrelay.engine.models.spec_parts import ExpertSpec, LatentSpec, expert_spec, latent_query_scale, latent_spec
from kvrelay.errors import CheckpointCorrupt, ModelNotFound, UnsupportedModel

ActivationName = Literal["silu", "gelu_tanh"]

_ACTIVATIONS: dict[str, ActivationName] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip
_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One kind of rotary embedding. `dynamic` equals `default` up to max_position, which is never exceeded.

    original_max_position: the context before it was stretched (llama3, yarn).
    attention_factor: multiplies cosines and sines (yarn); None: derived from factor.
    """

    kind: str
    theta: float
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder as a list of parts: one record per checkpoint, hence its size. Sizes are elements; windows and
    positions are tokens.

    layer_windows: per layer, the sliding window or None for full attention.
    layer_ropes: per layer, an index into `ropes`.
    query_scale multiplies q·k. embed_scale multiplies embeddings, rounded to the model's dtype.
    norm_offset: the checkpoint stores w where the norm multiplies by 1 + w.
    sandwich_norms: norms after attention and after the MLP, before each residual add.
    latent: attention is over latents (MLA): num_kv_heads is 1 then, head_dim the width of a token's cache entry.
    experts: some layers choose among experts (MoE).
    quantization: how the checkpoint stores linear weights; None: as they are.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    activation: ActivationName
    query_scale: float
    ropes: tuple[RopeSpec, ...]
    layer_ropes: tuple[int, ...]
    layer_windows: tuple[int | None, ...]
    is_tied: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    norm_offset: bool = False
    sandwich_norms: bool = False
    embed_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    latent: LatentSpec | None = None
    experts: ExpertSpec | None = None
    quantization: Quantization | None = None

    @property
    def rotary_dim(self) -> int:
        """How many numbers of a key are rotated."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @classmethod
    def from_config(cls, config: Any, generation: Json | None = None) -> "ModelSpec":
        """From a config.json as a dict, or a transformers config object; `generation` adds its eos ids.

        Raises:
            UnsupportedModel: an architecture, rope kind or option that is not supported.
            CheckpointCorrupt: impossible sizes.
        """
        raw: Json = config if isinstance(config, Mapping) else config.to_dict()
        family = _family_of(raw)
        text = _text_config(raw, family)
        spec = _build(family, text, _eos_ids(text, generation), _bos_id(text, generation))
        spec = replace(spec, quantization=quantization_of(raw, family.name))
        _check(spec)
        return spec

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelSpec":
        """From config.json and, if present, generation_config.json."""
        config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        return cls.from_config(config, read_json(generation) if generation.exists() else None)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelNotFound or CheckpointCorrupt naming the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFound(str(path.parent), f"{path.name} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointCorrupt(str(path), f"not readable as JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointCorrupt(str(path), "expected a JSON object")
    return data


def _family_of(raw: Json) -> Family:
    """By `architectures` first (which names the head), else by model_type."""
    named = [str(name) for name in raw.get("architectures") or ()]
    model_type = str(raw.get("model_type", ""))
    if named:
        known = next((ARCHITECTURES[name] for name in named if name in ARCHITECTURES), None)
    else:
        known = ALIASES.get(model_type, model_type)
    if known not in FAMILIES:
        what = ", ".join(named) or model_type or "no architecture named"
        raise UnsupportedModel(what, f"supported architectures are {', '.join(ARCHITECTURES)}")
    return FAMILIES[known]


def _text_config(raw: Json, family: Family) -> ConfigText:
    """The decoder's part of the config; ids that only the outer config has are copied into it."""
    nested = raw.get("text_config")
    if nested is None:
        return ConfigText(family, raw)
    inner: Json = nested if isinstance(nested, Mapping) else nested.to_dict()
    outer = {
        key: raw[key] for key in ("eos_token_id", "bos_token_id", "tie_word_embeddings") if raw.get(key) is not None
    }
    return ConfigText(family, {**inner, **outer})


def _build(family: Family, text: ConfigText, eos_ids: tuple[int, ...], bos_id: int | None) -> ModelSpec:
    if text.get("use_bidirectional_attention"):
        raise UnsupportedModel(family.name, "bidirectional attention (an encoder) cannot be served as a decoder")
    num_layers, num_heads = text.size("num_hidden_layers"), text.size("num_attention_heads")
    hidden, bias = text.size("hidden_size"), bool(text.get("attention_bias"))
    head_dim = text.size("head_dim") if text.get("head_dim") else hidden // num_heads
    is_sliding = _sliding_layers(text, num_layers)
    ropes = _ropes(text)
    spec = ModelSpec(
        architecture=family.name,
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_size=text.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=text.size("num_key_value_heads") if text.get("num_key_value_heads") else num_heads,
        head_dim=head_dim,
        vocab_size=text.size("vocab_size"),
        max_position=text.size("max_position_embeddings"),
        norm_eps=float(text.get("rms_norm_eps")),
        activation=_activation(text),
        query_scale=float(text.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        ropes=ropes,
        layer_ropes=tuple(int(sliding and len(ropes) > 1) for sliding in is_sliding),
        layer_windows=tuple(text.size("sliding_window") if sliding else None for sliding in is_sliding),
        is_tied=bool(text.get("tie_word_embeddings")),
        has_qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        has_o_bias=bias if family.qkv_bias is None else False,
        has_mlp_bias=family.has_mlp_bias and bool(text.get("mlp_bias")),
        has_qk_norm=family.qk_norm,
        norm_offset=family.norm_offset,
        sandwich_norms=family.sandwich,
        embed_scale=float(hidden) ** 0.5 if family.scale_embeddings else None,
        attention_softcap=text.get("attn_logit_softcapping") if family.attention_softcap else None,
        final_softcap=text.get("final_logit_softcapping"),
        bos_id=bos_id,
        eos_ids=eos_ids,
        experts=expert_spec(text, num_layers),
    )
    return _with_latent(spec, text) if family.is_latent else spec


def _with_latent(spec: ModelSpec, text: ConfigText) -> ModelSpec:
    """The spec with latent attention."""
    if not text.get("num_key_value_heads"):
        text = ConfigText(text.family, {**text.raw, "num_key_value_heads": spec.num_heads})
    if text.name == "deepseek_v2":  # which has no such key
        text = ConfigText(text.family, {**text.raw, "rope_interleave": True})
    latent, rope = latent_spec(text), spec.ropes[0]
    scale = latent_query_scale(latent, rope_kind=rope.kind, factor=rope.factor, mscale_all_dim=rope.mscale_all_dim)
    return replace(spec, num_kv_heads=1, head_dim=latent.width, query_scale=scale, latent=latent, has_qkv_bias=False)


def _activation(text: ConfigText) -> ActivationName:
    gemma = text.family.norm_offset
    name = (text.raw.get("hidden_activation") if gemma else None) or text.get("hidden_act")
    if gemma and name == "gelu":  # an error in Gemma's first configs, which mean the tanh form
        name = "gelu_pytorch_tanh"
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(text.name, f"activation {name!r}; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _sliding_layers(text: ConfigText, num_layers: int) -> tuple[bool, ...]:
    """Per layer, whether attention is limited to the sliding window."""
    kind, window = text.family.window, text.get("sliding_window")
    if kind == "none" or window is None:
        return (False,) * num_layers
    if kind == "all" or (kind == "asked" and text.get("use_sliding_window")):
        return (True,) * num_layers
    if kind == "asked":
        return (False,) * num_layers
    if kind == "upper" and not text.get("use_sliding_window"):
        return (False,) * num_layers
    if (types := text.get("layer_types")) is not None:
        return _from_layer_types(text, types, num_layers)
    if kind == "upper":
        first = 28 if text.get("max_window_layers") is None else int(text.get("max_window_layers"))
        return tuple(layer >= first for layer in range(num_layers))
    every = 2 if kind == "alternate" else int(text.get("sliding_window_pattern") or text.get("_sliding_window_pattern"))
    return tuple(bool((layer + 1) % every) for layer in range(num_layers))


def _from_layer_types(text: ConfigText, types: list[str], num_layers: int) -> tuple[bool, ...]:
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown:
        raise UnsupportedModel(text.name, f"layer type {unknown[0]!r}; known: full_attention, sliding_attention")
    if len(types) != num_layers:
        raise CheckpointCorrupt("config.json", f"layer_types names {len(types)} layers, the model has {num_layers}")
    return tuple(kind == "sliding_attention" for kind in types)


def _ropes(text: ConfigText) -> tuple[RopeSpec, ...]:
    """(full,) or, if sliding layers have their own rope, (full, sliding)."""
    parameters = text.get("rope_parameters")
    per_type = text.family.window == "pattern"
    if parameters and any(isinstance(value, Mapping) for value in parameters.values()):
        full = parameters.get("full_attention") or {}
        sliding = parameters.get("sliding_attention") or {}
    else:
        full = {**(parameters or text.get("rope_scaling") or {})}
        sliding = {}
    kinds = [_rope(text, full, text.get("rope_theta"))]
    if per_type:
        kinds.append(_rope(text, sliding, text.get("rope_local_base_freq")))
    return tuple(kinds)


def _rope(text: ConfigText, values: Json, theta: float) -> RopeSpec:
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in _ROPE_KINDS:
        raise UnsupportedModel(text.name, f"rope type {kind!r}; known: {', '.join(_ROPE_KINDS)}")
    if values.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise UnsupportedModel(text.name, "partial_rotary_factor other than 1")
    needed = {"default": (), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}.get(kind, ("factor",))
    if missing := [key for key in needed if values.get(key) is None]:
        raise CheckpointCorrupt("config.json", f"rope type {kind} without {missing[0]}")
    given = {key: values[key] for key in _ROPE_FLOATS if values.get(key) is not None}
    original = values.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    return RopeSpec(
        kind=kind,
        theta=float(values.get("rope_theta") or theta),
        original_max_position=int(original or text.size("max_position_embeddings")),
        truncate=bool(values.get("truncate", True)),
        **{key: float(value) for key, value in given.items()},
    )


_ROPE_FLOATS = (
    "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
    "mscale_all_dim",
)  # fmt: skip


def _eos_ids(text: ConfigText, generation: Json | None) -> tuple[int, ...]:
    """Every EOS id, the config's first, without repeats."""
    ids: list[int] = []
    for value in (text.get("eos_token_id"), (generation or {}).get("eos_token_id")):
        ids.extend(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return tuple(dict.fromkeys(int(value) for value in ids))


def _bos_id(text: ConfigText, generation: Json | None) -> int | None:
    value = text.get("bos_token_id")
    if value is None:
        value = (generation or {}).get("bos_token_id")
    return None if value is None else int(value)


def _check(spec: ModelSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointCorrupt(
            "config.json", f"{spec.num_heads} query heads do not divide over {spec.num_kv_heads} KV heads"
        )
    if spec.rotary_dim % 2:
        raise CheckpointCorrupt("config.json", f"head_dim {spec.head_dim} is odd")
    if spec.norm_eps <= 0:
        raise CheckpointCorrupt("config.json", f"rms_norm_eps is {spec.norm_eps}")
