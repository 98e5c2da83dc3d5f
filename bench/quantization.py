"""What quantised weights change: error of weights and of logits, and perplexity, on a fixed English text.

    python bench/quantization.py [--model M] [--quantization int8 int4] [--backend B] [--json FILE]

The whole text is one prompt, for the unquantised model in float32 first, then in bfloat16, then in float32 for each way
of quantising it. Logits are compared token by token: the error's size over the logits' (both without their mean, which
no softmax sees), the share of tokens with the same best one, and the mean divergence of the next token's distribution in
nats. The last row is the control: each layer's last product twice too large. Exit code 1 when an error is out of its bound,
or the control's within.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from figures import available_cores, show

import inprocess  # isort: skip
from kvrelay.engine.models.decoder import DecoderModel, load_model
from kvrelay.kernels.backend import AttentionBatch, Backend
from kvrelay.kernels.select import select_backend
from kvrelay.serve.text.tokenizer import Tokenizer

TEXT = Path(__file__).with_name("quantization.txt")
BLOCK_SIZE = 16
BOUNDS = {8: 0.03, 4: 0.25}  # of the logits' relative error, by bits


def logits_of(model: DecoderModel, backend: Backend, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] float32, of one prompt over a cache of its own."""
    length, shape = len(tokens), model.attention_shape
    num_blocks = -(-length // BLOCK_SIZE)
    batch = AttentionBatch(
        query_starts=torch.tensor([0, length], dtype=torch.int32),
        context_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0),
        slot_mapping=torch.arange(length),
        positions=torch.arange(length),
        num_decode=0,
        max_query_len=length,
        max_context_len=length,
    )
    parts = 2 if shape.latent_dim is None else 1
    kv = torch.zeros(model.spec.num_layers, num_blocks, parts, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    kv = kv.to(model.dtype)
    with torch.inference_mode():
        hidden = model.forward(torch.tensor(tokens), batch, backend.plan(batch, shape), list(kv))
        return model.logits(hidden)


def perplexity(logits: torch.Tensor, tokens: list[int]) -> float:
    logprobs = logits[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:]).unsqueeze(1))
    return math.exp(-float(logprobs.double().mean()))


def compare(logits: torch.Tensor, exact: torch.Tensor, tokens: list[int]) -> dict[str, Any]:
    off, size = (x - x.mean(-1, keepdim=True) for x in (logits - exact, exact))
    true = exact.log_softmax(-1)
    before, after = perplexity(exact, tokens), perplexity(logits, tokens)
    return {
        "logit error": float(off.norm() / size.norm()),
        "worst token": float((off.norm(dim=-1) / size.norm(dim=-1)).max()),
        "same best token": float((logits.argmax(-1) == exact.argmax(-1)).float().mean()),
        "divergence, nats": float((true.exp() * (true - logits.log_softmax(-1))).sum(-1).mean()),
        "perplexity": after,
        "perplexity, change": after / before - 1,
    }


def spoil(model: DecoderModel) -> None:
    """Every layer's last product twice too large, as a wrong scale would have it."""
    for layer in model._layers:
        mlp: Any = layer.mlp
        down = mlp._down
        mlp._down = lambda x, down=down: down(x) * 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--quantization", nargs="+", default=["int8", "int8/64", "int4", "int4/64", "int4/128"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    folder = inprocess.prepare(options.model)
    backend: Backend = select_backend(options.backend, "auto", options.threads)
    tokens = Tokenizer(folder).encode(TEXT.read_text())
    plain = load_model(folder, backend, torch.float32)
    exact = logits_of(plain, backend, tokens)
    half = load_model(folder, backend, torch.bfloat16)
    rows: list[dict[str, Any]] = [
        {"weights": "float32", "bits per weight": 32.0, "perplexity": perplexity(exact, tokens)},
        {"weights": "bfloat16", "bits per weight": 16.0, **compare(logits_of(half, backend, tokens), exact, tokens)},
    ]
    del half
    failed = []
    for name in options.quantization:
        scheme = inprocess.scheme(name)
        assert scheme is not None
        model = load_model(folder, backend, torch.float32, quantization=scheme)
        error = model.weight_error
        assert error is not None
        found = compare(logits_of(model, backend, tokens), exact, tokens)
        bits = 8 * error.num_bytes / error.num_weights
        rows.append({"weights": name, "bits per weight": bits, "weight error": error.relative, **found})
        if scheme.group == 32 and found["logit error"] > BOUNDS[scheme.bits]:
            failed.append(name)
    rows.append({"weights": "float32, wrong scale", **wrong_scale(plain, backend, exact, tokens)})
    show(f"{options.model}, {len(tokens)} tokens of text", rows, options.json)
    if failed or rows[-1]["logit error"] < max(BOUNDS.values()):
        raise SystemExit(f"out of bounds: {failed or 'the control is within'}")


def wrong_scale(model: DecoderModel, backend: Backend, exact: torch.Tensor, tokens: list[int]) -> dict[str, Any]:
    spoil(model)
    return compare(logits_of(model, backend, tokens), exact, tokens)


if __name__ == "__main__":
    main()
