"""The shape of every tensor that a decoder needs, by Hugging Face's name without prefix. Pure."""

from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.models.spec_experts import ExpertSpec
from kvrelay.engine.models.spec_mla import LatentSpec

Shapes = dict[str, tuple[int, ...]]


def expected_shapes(spec: ModelSpec) -> Shapes:
    """By name."""
    shapes: Shapes = {
        "embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "norm.weight": (spec.hidden_size,),
    }
    if not spec.is_tied:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    for layer in range(spec.num_layers):
        shapes.update({f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(spec, layer).items()})
    return shapes


def _layer_shapes(spec: ModelSpec, layer: int) -> Shapes:
    has_experts = spec.experts is not None and layer in spec.experts.layers
    attention = _head_attention(spec) if spec.latent is None else _latent_attention(spec, spec.latent)
    mlp = _experts(spec, spec.experts) if spec.experts and has_experts else _mlp(spec, "mlp", spec.ffn_size)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if spec.sandwich_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return attention | mlp | {f"{name}.weight": (spec.hidden_size,) for name in norms}


def _linear(name: str, out_size: int, in_size: int, *, has_bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (out_size, in_size)}
    return shapes | ({f"{name}.bias": (out_size,)} if has_bias else {})


def _head_attention(spec: ModelSpec) -> Shapes:
    hidden, dim = spec.hidden_size, spec.head_dim
    wide, narrow = spec.num_heads * dim, spec.num_kv_heads * dim
    shapes: Shapes = {}
    for name, size in (("q", wide), ("k", narrow), ("v", narrow)):
        shapes |= _linear(f"self_attn.{name}_proj", size, hidden, has_bias=spec.has_qkv_bias)
    shapes |= _linear("self_attn.o_proj", hidden, wide, has_bias=spec.has_o_bias)
    if spec.has_qk_norm:
        shapes |= {f"self_attn.{name}.weight": (dim,) for name in ("q_norm", "k_norm")}
    return shapes


def _latent_attention(spec: ModelSpec, latent: LatentSpec) -> Shapes:
    hidden, heads, bias = spec.hidden_size, spec.num_heads, latent.has_bias
    if latent.query_rank is None:
        shapes = _linear("self_attn.q_proj", heads * latent.query_dim, hidden)
    else:
        shapes = _linear("self_attn.q_a_proj", latent.query_rank, hidden, has_bias=bias)
        shapes |= _linear("self_attn.q_b_proj", heads * latent.query_dim, latent.query_rank)
        shapes |= {"self_attn.q_a_layernorm.weight": (latent.query_rank,)}
    shapes |= _linear("self_attn.kv_a_proj_with_mqa", latent.width, hidden, has_bias=bias)
    shapes |= {"self_attn.kv_a_layernorm.weight": (latent.kv_rank,)}
    shapes |= _linear("self_attn.kv_b_proj", heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    return shapes | _linear("self_attn.o_proj", hidden, heads * latent.value_dim, has_bias=bias)


def _mlp(spec: ModelSpec, name: str, ffn: int, *, has_bias: bool | None = None) -> Shapes:
    bias = spec.has_mlp_bias if has_bias is None else has_bias
    shapes: Shapes = {}
    for part in ("gate", "up"):
        shapes |= _linear(f"{name}.{part}_proj", ffn, spec.hidden_size, has_bias=bias)
    return shapes | _linear(f"{name}.down_proj", spec.hidden_size, ffn, has_bias=bias)


def _experts(spec: ModelSpec, experts: ExpertSpec) -> Shapes:
    shapes = _linear("mlp.gate", experts.choice.num_experts, spec.hidden_size)
    if experts.choice.scoring == "sigmoid":
        shapes["mlp.gate.e_score_correction_bias"] = (experts.choice.num_experts,)
    for index in range(experts.choice.num_experts):
        shapes |= _mlp(spec, f"mlp.experts.{index}", experts.ffn_size, has_bias=False)
    if experts.shared_ffn_size:
        shapes |= _mlp(spec, f"mlp.{shared_name(experts)}", experts.shared_ffn_size)
    if experts.has_shared_gate:
        shapes |= _linear("mlp.shared_expert_gate", 1, spec.hidden_size)
    return shapes


def shared_name(experts: ExpertSpec) -> str:
    """Qwen has one shared expert, DeepSeek several stacked in one tensor."""
    return "shared_expert" if experts.has_shared_gate else "shared_experts"
