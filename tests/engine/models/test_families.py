"""Our decoder equals Hugging Face's, family by family, over a paged cache with scattered blocks."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
from kvrelay.engine.checkpoints.loading import load_model
from kvrelay.engine.checkpoints.tiny import TINY_CONFIGS, random_weights, tiny_checkpoint
from kvrelay.engine.models.decoder import DecoderModel
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.errors import CheckpointCorrupt, ModelNotFound, UnsupportedModel
from kvrelay.kernels.backend import AttentionBatch
from kvrelay.kernels.oracle.reference import ReferenceBackend
from kvrelay.settings.engine import ModelSettings

BLOCK_SIZE = 4
NUM_BLOCKS = 32
PROMPT = [5, 93, 17, 200, 41, 7, 7, 150, 99, 3, 64, 120, 250, 18, 33, 77, 2, 9, 181, 55, 142, 23, 8]

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
GEMMA3 = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24, "num_hidden_layers": 4}
HALF = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def gemma3(**kwargs: Any) -> transformers.PretrainedConfig:
    return transformers.Gemma3TextConfig(**(SIZES | GEMMA3 | {"layer_types": HALF} | kwargs))


def gemma3_nested() -> transformers.PretrainedConfig:
    text = SIZES | GEMMA3 | {"layer_types": HALF}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    return transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)


LATENT: dict[str, Any] = SIZES | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
STRETCHED = YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}


def deepseek_v2(**kwargs: Any) -> transformers.PretrainedConfig:
    return transformers.DeepseekV2Config(**(LATENT | kwargs))


def deepseek_v3(**kwargs: Any) -> transformers.PretrainedConfig:
    return transformers.DeepseekV3Config(**(LATENT | kwargs))


EXPERTS: dict[str, Any] = SIZES | {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}


def qwen2_moe(**kwargs: Any) -> transformers.PretrainedConfig:
    return transformers.Qwen2MoeConfig(**(EXPERTS | {"shared_expert_intermediate_size": 40} | kwargs))


def qwen3_moe(**kwargs: Any) -> transformers.PretrainedConfig:
    return transformers.Qwen3MoeConfig(**(EXPERTS | {"head_dim": 16} | kwargs))


CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biased": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-head-dim": lambda: transformers.LlamaConfig(**SIZES, head_dim=20),
    "llama-llama3-rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama-linear-rope": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}
    ),
    "llama-dynamic-rope": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}
    ),
    "mistral-sliding": lambda: transformers.MistralConfig(**SIZES, head_dim=16, sliding_window=7),
    "mistral-full": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-yarn": lambda: transformers.Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen2-upper-sliding": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=16, sliding_window=6, query_pre_attn_scalar=20),
    "gemma3": gemma3,
    "gemma3-linear-rope": lambda: gemma3(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    ),
    "gemma3-softcaps": lambda: gemma3(attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3-nested": gemma3_nested,
    "deepseek-v2-groups-biased": lambda: deepseek_v2(
        topk_method="group_limited_greedy", routed_scaling_factor=1.5, attention_bias=True, mlp_bias=True
    ),
    "deepseek-v2-lite-yarn": lambda: deepseek_v2(q_lora_rank=None, rope_parameters=STRETCHED),
    "deepseek-v3-yarn": lambda: deepseek_v3(rope_parameters=STRETCHED),
    "deepseek-v3-halves": lambda: deepseek_v3(rope_interleave=False, norm_topk_prob=False),
    "qwen3-moe": lambda: qwen3_moe(norm_topk_prob=True, attention_bias=True),
    "qwen3-moe-some-dense-sliding": lambda: qwen3_moe(mlp_only_layers=[1], use_sliding_window=True, sliding_window=6),
    "qwen2-moe": lambda: qwen2_moe(decoder_sparse_step=2, num_hidden_layers=4),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=5),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Idle torch threads that spin take more time than such small products need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def hf_model(config: transformers.PretrainedConfig) -> torch.nn.Module:
    """A model with random weights of every kind: norms and biases differ from their neutral start."""
    torch.manual_seed(0)
    nested = config.model_type == "gemma3"
    kind = transformers.Gemma3ForConditionalGeneration if nested else transformers.AutoModelForCausalLM
    build = kind._from_config if nested else kind.from_config
    model = build(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.ndim == 1 else 0.6 * parameter.shape[-1] ** -0.5
            offset = 1.0 if "norm" in name and "gemma" not in config.model_type else 0.0
            parameter.copy_(torch.randn_like(parameter) * scale + offset)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    model = hf_model(CONFIGS[request.param]())
    model.save_pretrained(folder)
    return model, folder


class PagedLoop:
    """One sequence over scattered blocks: the smallest engine there can be."""

    def __init__(self, model: DecoderModel, backend: ReferenceBackend) -> None:
        shape = model.attention_shape
        self.model, self.backend = model, backend
        num_parts = 2 if shape.latent_dim is None else 1
        size = (NUM_BLOCKS, num_parts, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        self.kv = [torch.full(size, 7.0, dtype=shape.dtype) for _ in range(model.spec.num_layers)]
        self.table = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1))
        self.length = 0
        self.layers_seen: list[int] = []

    def run(self, token_ids: list[int]) -> Tensor:
        """Logits [len(token_ids), vocab] after appending the tokens."""
        positions = torch.arange(self.length, self.length + len(token_ids))
        self.length += len(token_ids)
        batch = AttentionBatch(
            query_starts=torch.tensor([0, len(token_ids)], dtype=torch.int32),
            context_lens=torch.tensor([self.length], dtype=torch.int32),
            block_tables=self.table[None, : -(-self.length // BLOCK_SIZE)].to(torch.int32),
            slot_mapping=self.table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            positions=positions,
            num_decode=int(len(token_ids) == 1),
            max_query_len=len(token_ids),
            max_context_len=self.length,
        )
        plan = self.backend.plan(batch, self.model.attention_shape)
        self.layers_seen.clear()
        with torch.inference_mode():
            hidden = self.model.forward(torch.tensor(token_ids), batch, plan, self.kv, self.layers_seen.append)
            return self.model.logits(hidden)


def paged(folder: Path, dtype: torch.dtype = torch.float32) -> PagedLoop:
    backend = ReferenceBackend("cpu")
    return PagedLoop(load_model(folder, backend, dtype, block_size=BLOCK_SIZE), backend)


def hf_logits(model: torch.nn.Module, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def test_logits_of_a_whole_prompt_equal_hugging_faces(pair: tuple[torch.nn.Module, Path]) -> None:
    model, folder = pair
    loop = paged(folder)
    torch.testing.assert_close(loop.run(PROMPT), hf_logits(model, PROMPT), atol=1e-4, rtol=1e-4)
    assert loop.layers_seen == list(range(loop.model.spec.num_layers))


def test_greedy_decoding_in_chunks_equals_hugging_faces(pair: tuple[torch.nn.Module, Path]) -> None:
    model, folder = pair
    loop = paged(folder)
    loop.run(PROMPT[:9])
    tokens = list(PROMPT)
    logits = loop.run(PROMPT[9:])
    for _ in range(20):
        torch.testing.assert_close(logits[-1], hf_logits(model, tokens)[-1], atol=1e-4, rtol=1e-4)
        tokens.append(int(logits[-1].argmax()))
        logits = loop.run(tokens[-1:])


def test_bfloat16_stays_near_float32(pair: tuple[torch.nn.Module, Path]) -> None:
    _, folder = pair
    exact, rounded = paged(folder).run(PROMPT), paged(folder, torch.bfloat16).run(PROMPT)
    assert rounded.dtype is torch.float32
    likeness = torch.nn.functional.cosine_similarity(exact, rounded, dim=-1).sort().values
    turns = ModelSpec.from_folder(folder).experts is not None  # rounding may choose a token another expert
    assert likeness[int(turns)] > 0.99 and likeness[0] > 0.95


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen2-moe", "mixtral", "deepseek-v3-yarn"])
def test_experts_fused_into_one_tensor_are_found_too(name: str, tmp_path: Path) -> None:
    model = hf_model(CONFIGS[name]())
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any(key.endswith("experts.gate_up_proj") for key in load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(paged(tmp_path).run(PROMPT), hf_logits(model, PROMPT), atol=1e-4, rtol=1e-4)


def test_what_a_config_says_of_experts_matters_in_these_tests(tmp_path: Path) -> None:
    """Negative control."""
    folder = random_weights(qwen3_moe(norm_topk_prob=True).to_dict(), tmp_path)
    first = paged(folder).run(PROMPT)
    raw = json.loads((folder / "config.json").read_text())
    for change in ({"norm_topk_prob": False}, {"num_experts_per_tok": 2}):
        (folder / "config.json").write_text(json.dumps(raw | change))
        assert (paged(folder).run(PROMPT) - first).abs().max() > 0.01
    (folder / "config.json").write_text(json.dumps(raw | {"mlp_only_layers": [1]}))
    with pytest.raises(CheckpointCorrupt, match=r"layers\.1\.mlp\.(experts|gate)"):
        paged(folder)


def test_the_window_matters_in_these_tests(tmp_path: Path) -> None:
    """Negative control: widening the window changes the answer, so the tests above do see it."""
    config = CONFIGS["mistral-sliding"]()
    hf_model(config).save_pretrained(tmp_path)
    narrow = paged(tmp_path).run(PROMPT)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"sliding_window": None}))
    wide = paged(tmp_path).run(PROMPT)
    torch.testing.assert_close(narrow[:7], wide[:7])
    assert (narrow[7:] - wide[7:]).abs().max() > 0.01


def test_rotary_tables_grow_with_the_context(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**(SIZES | {"max_position_embeddings": 5000}))
    random_weights(config.to_dict(), tmp_path)
    model = load_model(tmp_path, ReferenceBackend("cpu"), torch.float32)
    assert model.num_positions == 2048
    model.reserve_positions(2049)
    assert model.num_positions == 4096
    model.reserve_positions(4097)
    assert model.num_positions == 5000


def test_random_weights_load_in_transformers_and_here(tmp_path: Path) -> None:
    config = CONFIGS["qwen3"]()
    config.architectures = ["Qwen3ForCausalLM"]
    folder = random_weights(config.to_dict(), tmp_path, seed=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    torch.testing.assert_close(paged(folder).run(PROMPT), hf_logits(model, PROMPT), atol=1e-4, rtol=1e-4)


def old_dialect(config: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """The config as transformers 4 wrote it."""
    return {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types")} | kwargs


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("llama", {"rope_theta": 10000.0, "rope_scaling": None}),
        (
            "llama-llama3-rope",
            {"rope_theta": 500.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
        ),
        (
            "qwen2-yarn",
            {
                "rope_theta": 10000.0,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            },
        ),
        ("qwen2-upper-sliding", {"use_sliding_window": True, "max_window_layers": 1, "rope_theta": 10000.0}),
        (
            "gemma3-linear-rope",
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "sliding_window_pattern": 2,
            },
        ),
    ],
)
def test_both_config_dialects_give_the_same_spec(name: str, old: dict[str, Any]) -> None:
    new = CONFIGS[name]().to_dict()
    if name.startswith("gemma3"):
        new["layer_types"] = ["sliding_attention", "full_attention"] * 2
    assert ModelSpec.from_config(old_dialect(new, **old)) == ModelSpec.from_config(new)


def test_a_sparse_gemma3_config_takes_hugging_faces_defaults() -> None:
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }
    spec = ModelSpec.from_config(raw)
    full = transformers.Gemma3Config(text_config=raw["text_config"]).text_config
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, full.vocab_size)
    assert spec.eos_ids == (1, 106) and spec.is_tied and spec.ropes[0].factor == 8.0
    assert [w is not None for w in spec.layer_windows] == [t == "sliding_attention" for t in full.layer_types]


@pytest.mark.parametrize(
    "family",
    [
        "Llama",
        "Mistral",
        "Qwen2",
        "Qwen3",
        "Gemma",
        "Gemma2",
        "Gemma3Text",
        "DeepseekV3",
        "Qwen3Moe",
        "Qwen2Moe",
        "Mixtral",
    ],
)
def test_an_empty_config_means_what_it_means_to_transformers(family: str) -> None:
    config = getattr(transformers, f"{family}Config")()
    empty = ModelSpec.from_config({"model_type": config.model_type})
    assert empty == ModelSpec.from_config(config.to_dict())


def test_eos_ids_of_both_files_are_joined() -> None:
    spec = ModelSpec.from_config(CONFIGS["llama"]().to_dict(), {"eos_token_id": [9, 2]})
    assert spec.eos_ids == (2, 9) and spec.bos_id == 1


def test_unknown_parts_are_refused_by_name() -> None:
    good = CONFIGS["llama"]().to_dict()
    with pytest.raises(UnsupportedModel, match=r"MambaForCausalLM.*LlamaForCausalLM"):
        ModelSpec.from_config(good | {"architectures": ["MambaForCausalLM"]})
    with pytest.raises(UnsupportedModel, match="rope type 'longrope'"):
        ModelSpec.from_config(good | {"rope_parameters": {"rope_type": "longrope"}})
    with pytest.raises(UnsupportedModel, match="activation 'relu'"):
        ModelSpec.from_config(good | {"hidden_act": "relu"})
    with pytest.raises(UnsupportedModel, match="bitsandbytes"):
        ModelSpec.from_config(good | {"quantization_config": {"quant_method": "bitsandbytes"}})
    with pytest.raises(CheckpointCorrupt, match="hidden_size"):
        ModelSpec.from_config(good | {"hidden_size": "big"})


def tamper(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return random_weights(CONFIGS["llama"]().to_dict(), tmp_path)


def load(folder: Path) -> DecoderModel:
    return load_model(folder, ReferenceBackend("cpu"), torch.float32)


def test_a_missing_tensor_is_named(tiny: Path) -> None:
    tamper(tiny, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointCorrupt, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        load(tiny)


def test_an_unknown_tensor_is_named(tiny: Path) -> None:
    tamper(tiny, lambda t: t.update({"model.layers.0.mlp.experts.0.w1": torch.zeros(2)}))
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors.*experts\.0\.w1"):
        load(tiny)


def test_a_wrong_shape_is_named(tiny: Path) -> None:
    tamper(tiny, lambda t: t.update({"model.norm.weight": torch.zeros(47)}))
    with pytest.raises(CheckpointCorrupt, match=r"model\.norm\.weight has shape \[47\], expected \[48\]"):
        load(tiny)


def test_vision_towers_and_rotary_buffers_are_passed_over(tiny: Path) -> None:
    extra = {"vision_tower.x.weight": torch.zeros(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)}
    tamper(tiny, lambda t: t.update(extra))
    assert load(tiny).spec.num_layers == 3


def test_a_truncated_or_garbled_file_is_refused(tiny: Path) -> None:
    weights = tiny / "model.safetensors"
    whole = weights.read_bytes()
    for broken in (whole[:-10], whole[:5], b"\xff" * 64, whole[:8] + b"{" * 8 + whole[16:]):
        weights.write_bytes(broken)
        with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors"):
            load(tiny)
    weights.unlink()
    with pytest.raises(ModelNotFound, match="safetensors"):
        load(tiny)


def test_a_sharded_checkpoint_loads_and_a_lost_shard_is_named(
    pair: tuple[torch.nn.Module, Path], tmp_path: Path
) -> None:
    model, folder = pair
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    torch.testing.assert_close(paged(tmp_path).run(PROMPT), paged(folder).run(PROMPT), atol=0, rtol=0)
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointCorrupt, match=lost.name):
        load(tmp_path)


# ---- the tiny checkpoints that other parts verify with


def greedy(folder: Path, prompt: list[int], count: int = 24) -> list[int]:
    loop = paged(folder)
    logits, tokens = loop.run(prompt), []
    for _ in range(count):
        tokens.append(int(logits[-1].argmax()))
        logits = loop.run(tokens[-1:])
    return tokens


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_a_tiny_checkpoint_is_whole_and_equals_hugging_faces(family: str, tmp_path: Path) -> None:
    folder = prepare_checkpoint(ModelSettings(source=str(tiny_checkpoint(family, tmp_path / family))))
    prompt = transformers.AutoTokenizer.from_pretrained(folder).encode(
        "The quick brown fox jumps over the lazy dog, 5 ü"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    torch.testing.assert_close(paged(folder).run(prompt), hf_logits(model, prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_a_tiny_checkpoints_answer_hangs_on_its_context(family: str, tmp_path: Path) -> None:
    """Else comparing answers would prove nothing about the cache."""
    folder = tiny_checkpoint(family, tmp_path / family)
    prompt = [(37 * at + 11) % 250 + 3 for at in range(36)]
    changed = [*prompt[:4], prompt[4] ^ 1, *prompt[5:]]
    plain = greedy(folder, prompt)
    assert len(set(plain)) > 8
    assert greedy(folder, changed) != plain
