"""Engines over the fake CUDA runtime, in the shapes of known models with two layers."""

from contextlib import contextmanager
from pathlib import Path

import torch

from bench.gpu import engines, models, section
from kvrelay.engine.checkpoints.loading import load_model
from kvrelay.engine.speculation.draft_choice import DraftModelChoice, SpeculationTimes
from kvrelay.engine.speculation.draft_model import DraftModel
from kvrelay.engine.step.build import make_engine
from kvrelay.engine.step.config import EngineConfig, Extensions
from kvrelay.kernels.backend import Backend
from kvrelay.kernels.cuda.prefill_kernels import PrefillKernels
from kvrelay.kernels.cuda.staging import PinnedTokens
from kvrelay.kernels.select import select_backend
from tests.fake_cuda.counters import counted

SMALL = {
    "num_hidden_layers": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": models.LLAMA_8B
    | SMALL
    | {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3-moe": models.QWEN3_MOE | SMALL | {"num_experts": 16},
    "deepseek": models.DEEPSEEK_LITE | SMALL | {"n_routed_experts": 16},
}
# for weights that loops quantise
NARROW = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 1}
CONFIGS |= {
    "narrow llama": CONFIGS["llama"] | NARROW | {"head_dim": 128},
    "narrow qwen3-moe": CONFIGS["qwen3-moe"] | NARROW | {"moe_intermediate_size": 128},
}
TOKEN = 7  # what every row draws: kernels do nothing, so the drawn ones would be whatever lies in the memory


def patch(monkeypatch):
    """What depends on numbers that no kernel computes."""
    wait = PinnedTokens.wait
    monkeypatch.setattr(PinnedTokens, "wait", lambda self: [TOKEN] * len(wait(self)))
    monkeypatch.setattr(PrefillKernels, "try_out", lambda self, shape, variant: {})
    monkeypatch.setattr("kvrelay.kernels.cuda.backend._try_out", lambda draw, device: None)
    monkeypatch.setattr("kvrelay.kernels.cuda.quantized._compare", lambda *products: None)


def folder_of(tmp_path: Path, name: str) -> Path:
    """A checkpoint with random weights, written on the CPU."""
    models.CONFIGS[f"fake {name}"] = (CONFIGS[name], CONFIGS[name])
    return models.folder_of(section.Context("cpu", False, tmp_path, tmp_path / "rows"), f"fake {name}")


def patch_drafts(monkeypatch):
    """Drafts pay always: what steps take here says nothing."""
    monkeypatch.setattr(SpeculationTimes, "is_known", lambda self, num_sequences: True)
    monkeypatch.setattr(SpeculationTimes, "plain", lambda self, num_sequences: 1.0)
    monkeypatch.setattr(SpeculationTimes, "extra", lambda self, num_sequences: (0.0, 0.0))
    monkeypatch.setattr(
        DraftModelChoice, "lengths", lambda self, candidates, most, *rest, **more: [3] * len(candidates)
    )


def _model(folder: Path, backend: Backend, block_size: int, quantization=None):
    return load_model(
        folder,
        backend,
        torch.bfloat16,
        block_size=block_size,
        kv_layout="NHD",
        kv_dtype=torch.bfloat16,
        quantization=quantization,
    )


def make(folder: Path, device: str = "cuda:0", draft: Path | None = None, quantization=None, **config):
    """An engine that is warmed up as a worker's is. draft: the folder of a draft model."""
    sizes = {"block_size": 16, "kv_memory_bytes": 256 << 20, "token_budget": 128, "max_running": 16}
    config = sizes | {"prefix_caching": False} | config
    backend = select_backend("cuda", device)
    model, extensions = _model(folder, backend, config["block_size"], quantization), Extensions()
    if draft is not None:
        drafts = DraftModel(
            _model(draft, backend, config["block_size"]),
            backend,
            block_size=config["block_size"],
            kv_memory_bytes=64 << 20,
            max_running=config["max_running"],
            max_model_len=4096,
            vocab_size=model.spec.vocab_size,
        )
        drafts.warm_up()
        extensions = Extensions(draft_model=drafts)
    engine = make_engine(model, backend, EngineConfig(max_waiting=256, **config), extensions)
    engine.runner.warm_up()
    return engine


@contextmanager
def decoding(engine, num_sequences, **sampling):
    """So many sequences behind 300 tokens of context, past their first steps. Yields what runs one step."""
    with engines.decoding(engine, num_sequences, 300, 60, **sampling) as step:
        for _ in range(4):
            step()
        yield step


@contextmanager
def sharing(engine, num_sequences, num_shared):
    """So many sequences with a common prefix, past their prompts. Yields what runs one step."""
    vocab, names = engine.model.spec.vocab_size, []
    common = engines.random_prompt(500, num_shared, vocab)
    for index in range(num_sequences):
        wanted = engines.request(index, common + engines.random_prompt(index, 40, vocab), 60)
        engine.add(wanted)
        names.append(wanted.request_id)
        for _ in range(1 if index else 20):  # the first one's prefix is there before the others come
            engine.step()
    try:
        for _ in range(20):
            engine.step()
        yield engine.step
    finally:
        for name in names:
            engine.abort(name)


def add_prompt(engine, num_tokens, index=900):
    """A prompt that is computed in chunks of the token budget. Returns the request's id."""
    prompt = engines.random_prompt(index, num_tokens, engine.model.spec.vocab_size)
    wanted = engines.request(index, prompt, 8)
    engine.add(wanted)
    return wanted.request_id


def counts_of(step, num_steps=3, device=0):
    """What each of the next steps cost."""
    found = []
    for _ in range(num_steps):
        with counted(device) as counts:
            step()
        found.append(counts)
    return found
