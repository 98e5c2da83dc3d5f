"""One engine in this process, and Hugging Face's model of the same folder: what decode.py and prefill.py compare."""

import argparse
import json
import math
import struct
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.figures import available_cores
from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.step.engine import Engine
from kvrelay.hashing import block_hashes
from kvrelay.kernels.common.quant_scheme import Scheme
from kvrelay.kernels.select import select_backend
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.settings.engine import ModelSettings

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class WeightCount:
    """Numbers of a checkpoint. `step_parameters` is what one decode step must read."""

    step_parameters: int
    linear_parameters: int  # in GEMMs over every prompt token (all but embedding, head and norms)
    kv_values_per_token: int
    num_layers: int
    num_heads: int
    head_dim: int
    vocab_size: int


def prepare(source: str) -> Path:
    """The model's folder (fetched or converted when needed)."""
    return prepare_checkpoint(ModelSettings(source=source), None)


def count_weights(folder: Path) -> WeightCount:
    """From the safetensors' headers alone. An untied embedding table is not read by a step, but for its rows."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config = config.get("text_config") or config
    embedding = head = linear = other = 0
    for file in sorted(folder.glob("*.safetensors")):
        for name, shape in _shapes(file):
            size = math.prod(shape)
            if "vision" in name or "multi_modal" in name:
                continue
            if "embed_tokens" in name:
                embedding += size
            elif "lm_head" in name:
                head += size
            elif len(shape) == 2:
                linear += size
            else:
                other += size
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    return WeightCount(
        step_parameters=linear + other + (head or embedding),
        linear_parameters=linear,
        kv_values_per_token=2 * config["num_hidden_layers"] * num_kv_heads * head_dim,
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        head_dim=head_dim,
        vocab_size=config["vocab_size"],
    )


def operations(count: WeightCount, length: int) -> float:
    """Floating-point operations of one prompt: linear layers, causal attention, one row of logits."""
    attention = 2 * 2 * count.num_layers * count.num_heads * count.head_dim * length * (length + 1) / 2
    return 2 * count.linear_parameters * length + attention


def _shapes(file: Path) -> list[tuple[str, list[int]]]:
    with file.open("rb") as data:
        (size,) = struct.unpack("<Q", data.read(8))
        header = json.loads(data.read(size))
    return [(name, entry["shape"]) for name, entry in header.items() if name != "__metadata__"]


def parser_for(description: str) -> argparse.ArgumentParser:
    """The options of both benches of one engine."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--hf-dtype", choices=["bfloat16", "float32"], help="default: --dtype")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--quantization", nargs="*", default=[], help="int8, int4, or with a group: int4/64")
    parser.add_argument("--mapped", action="store_true", help="also with the packed weights that workers share")
    parser.add_argument("--json", type=Path)
    return parser


def build_engines(options: argparse.Namespace, folder: Path, *, token_budget: int, kv_memory: int) -> dict[str, Engine]:
    """An engine for each quantisation that is asked for, by its name, and "mapped"; at least 64 MiB of KV each."""
    make = partial(build_engine, folder, options.dtype, options.threads, options.backend)
    memory = max(kv_memory, 64 << 20)
    engines = {
        name: make(token_budget=token_budget, kv_memory=memory, quantization=name)
        for name in ("none", *options.quantization)
    }
    if options.mapped:
        engines["mapped"] = make(token_budget=token_budget, kv_memory=memory, is_mapped=True)
    return engines


def build_engine(
    folder: Path,
    dtype: str,
    threads: int,
    backend: str,
    *,
    token_budget: int,
    kv_memory: int,
    quantization: str = "none",
    is_mapped: bool = False,
) -> Engine:
    """An engine like a worker's, in this thread, without prefix cache (prompts are random anyway)."""
    torch.set_num_threads(threads)
    config = EngineConfig(
        kv_memory_bytes=kv_memory,
        token_budget=token_budget,
        prefix_caching=False,
        quantization=scheme(quantization),
        shares_weights=is_mapped,
    )
    chosen = select_backend(backend, "auto", threads)  # type: ignore[arg-type]
    return load_engine(folder, chosen, DTYPES[dtype], config)


def scheme(quantization: str) -> Scheme | None:
    """From "none", "int8", "int4", or with a group: "int4/64"."""
    kind, _, group = quantization.partition("/")
    return None if kind == "none" else Scheme({"int8": 8, "int4": 4}[kind], int(group or 32))


def step_bytes(engine: Engine, count: WeightCount, item: int) -> float:
    """Bytes of weights that one decode step reads: `item` for each, but what quantised ones take."""
    error = engine.model.weight_error
    if error is None:
        return item * count.step_parameters
    return error.num_bytes + item * (count.step_parameters - error.num_weights)


def request(index: int, prompt: list[int], output_tokens: int, block_size: int) -> SequenceRequest:
    """A greedy request of exactly `output_tokens` tokens."""
    return SequenceRequest(
        request_id=f"bench-{index}",
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        block_hashes=block_hashes(prompt, block_size),
        sampling=Sampling(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
    )


def random_prompt(index: int, length: int, vocab_size: int) -> list[int]:
    """`length` ids, the same for the same index."""
    draw = torch.Generator().manual_seed(index)
    tokens: list[int] = torch.randint(min(1000, vocab_size // 2), vocab_size, (length,), generator=draw).tolist()
    return tokens


def load_hugging_face(folder: Path, dtype: str) -> Any:
    """transformers' own model (sdpa attention, its default)."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()


def time_of(action: Any) -> float:
    """Seconds that one call takes."""
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s
