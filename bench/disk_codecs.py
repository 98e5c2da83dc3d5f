"""What codecs make of KV that a model computed: size, speed, error, effect on what it says next. For disk.py."""

import importlib.util
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvrelay.config import ModelSettings
from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
from kvrelay.engine.step.engine import Engine, EngineConfig, load_engine
from kvrelay.hashing import block_hashes
from kvrelay.kernels.select import select_backend
from kvrelay.kvcache.stores.codecs import Codec, make_codec
from kvrelay.plane.messages import Sampling, SequenceRequest, TokenOutput
from kvrelay.types import KvLayout

CODECS = ("none", "lossless", "int8", "fp8")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
PROMPT_TOKENS, LATER, OUTPUT_TOKENS = 1024, (16, 80, 144, 208, 272), 32
TEXTS = sorted(Path(__file__).parents[1].glob("docs/*.md"))


def codec_rows(source: str) -> list[dict[str, Any]]:
    """A row for each dtype and codec, and the general compressors that the lossless one was chosen over."""
    folder = prepare_checkpoint(ModelSettings(source=source), None)
    tokens = _tokens(folder)
    rows = []
    for dtype in DTYPES:
        blocks, layout, effects = _computed(folder, tokens, dtype)
        for name in CODECS:
            figures = figures_of(make_codec(name, layout), blocks, layout)
            rows.append({"dtype": dtype, "codec": name, **figures, **effects[name]})
        rows += [{"dtype": dtype, "codec": name, **_peer(way, blocks)} for name, way in _peers(layout.itemsize).items()]
    half = replace(layout, dtype="float16")
    cast = [block.view(torch.float32).half().contiguous().view(torch.uint8) for block in blocks]
    return rows + [
        {"dtype": "float16", "codec": name, **figures_of(make_codec(name, half), cast, half)} for name in CODECS
    ]


def _tokens(folder: Path) -> list[int]:
    from tokenizers import Tokenizer

    text = "\n".join(path.read_text() for path in TEXTS)
    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return ids[: PROMPT_TOKENS + max(LATER)]


# ---- the model's part


def _computed(folder: Path, tokens: list[int], dtype: str) -> tuple[list[torch.Tensor], KvLayout, dict[str, Any]]:
    """The prompt's blocks as bytes, their layout, and what each codec does to the log-probabilities after them."""
    blocks: list[torch.Tensor] = []
    said: dict[str, list[TokenOutput]] = {}
    for name in CODECS:
        engine = _engine(folder, dtype)
        layout = engine.storage.memory.layout
        _run(engine, tokens[:PROMPT_TOKENS], 1)
        codec = make_codec(name, layout)
        kept = [_changed(engine, codec, index) for index in range(layout.num_blocks)]
        blocks = blocks or [block for block in kept if block is not None]
        said[name] = [_run(engine, tokens[: PROMPT_TOKENS + more], 1)[0] for more in LATER]
        said[name] += _run(engine, tokens, OUTPUT_TOKENS)
    return blocks, layout, {name: _effect(said["none"], said[name]) for name in CODECS}


def _engine(folder: Path, dtype: str) -> Engine:
    backend = select_backend("cpu", "auto", torch.get_num_threads())
    return load_engine(folder, backend, DTYPES[dtype], EngineConfig(kv_memory_bytes=160 << 20))


def _run(engine: Engine, tokens: list[int], count: int) -> list[TokenOutput]:
    engine.add(
        SequenceRequest(
            request_id=f"bench-{time.monotonic_ns()}", token_ids=tokens, num_prompt_tokens=len(tokens),
            block_hashes=block_hashes(tokens, engine.config.block_size),
            sampling=Sampling(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=20),
        )
    )  # fmt: skip
    outputs: list[TokenOutput] = []
    while engine.scheduler.has_work:
        outputs += engine.step().outputs
    return outputs


def _changed(engine: Engine, codec: Codec, index: int) -> torch.Tensor | None:
    """Pass one block of the pool through the codec, in place; its bytes as they were, None when it was never written."""
    block = engine.storage.tensor[:, index].contiguous()
    data = block.view(torch.uint8).flatten()
    if not data.any():
        return None
    now = torch.empty_like(data)
    codec.decode(codec.encode(memoryview(data.numpy())), memoryview(now.numpy()))
    engine.storage.tensor[:, index] = now.view(block.dtype).view(block.shape)
    return data


def _effect(was: list[TokenOutput], now: list[TokenOutput]) -> dict[str, Any]:
    """Of the most likely tokens' probabilities after the prompt, and of the greedy text."""
    shifts, worst = [], 0.0
    for before, after in zip(was[: len(LATER)], now[: len(LATER)], strict=True):
        theirs = dict(after.logprobs[0].top)
        both = [(lp, theirs[token]) for token, lp in before.logprobs[0].top if token in theirs]
        shifts.append(sum(math.exp(lp) * (lp - other) for lp, other in both))
        worst = max(worst, abs(both[0][0] - both[0][1]))
    texts = [[token for output in said[len(LATER) :] for token in output.token_ids] for said in (was, now)]
    same = next((i for i, (a, b) in enumerate(zip(*texts, strict=True)) if a != b), OUTPUT_TOKENS)
    return {"KL nats": sum(shifts) / len(shifts), "top logprob": worst, f"same of {OUTPUT_TOKENS}": same}


# ---- the codecs' part


def figures_of(codec: Codec, blocks: list[torch.Tensor], layout: KvLayout) -> dict[str, Any]:
    """`blocks`: bytes. Errors: RMS over RMS, and the largest over the largest number of its own token's head."""
    encoded = [codec.encode(memoryview(block.numpy())) for block in blocks]
    sample = memoryview(blocks[len(blocks) // 2].numpy())
    made, into = codec.encode(sample), memoryview(bytearray(sample.nbytes))
    was, now = torch.stack(blocks), torch.empty(len(blocks), blocks[0].numel(), dtype=torch.uint8)
    for part, row in zip(encoded, now, strict=True):
        codec.decode(part, memoryview(row.numpy()))
    dtype = getattr(torch, layout.dtype)
    was, error = was.view(dtype).double(), was.view(dtype).double() - now.view(dtype).double()
    heads = was.view(-1, layout.head_dim).abs().amax(dim=1).clamp_min(1e-30)
    return {
        "size": sum(part.nbytes for part in encoded) / sum(block.nbytes for block in blocks),
        "largest": max(part.nbytes for part in encoded) / blocks[0].nbytes,
        "RMS error": float(error.norm() / was.norm()),
        "max error": float((error.view(-1, layout.head_dim).abs().amax(dim=1) / heads).max()),
        "encode MB/s": _rate(lambda: codec.encode(sample), sample.nbytes) if codec.name != "none" else None,
        "decode MB/s": _rate(lambda: codec.decode(made, into), sample.nbytes),
    }


def _peers(itemsize: int) -> dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]]:
    """General compressors on whole blocks, those that are installed."""
    peers: dict[str, Any] = {"(zlib 1)": (lambda data: zlib.compress(data, 1), zlib.decompress)}
    if importlib.util.find_spec("zstandard"):
        import zstandard

        pack, unpack = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
        peers["(zstd 1)"] = (pack.compress, unpack.decompress)
    if importlib.util.find_spec("lz4"):
        import lz4.block

        peers["(lz4)"] = (lz4.block.compress, lz4.block.decompress)
    return peers


def _peer(way: tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]], blocks: list[torch.Tensor]) -> dict[str, Any]:
    pack, unpack = way
    sample = blocks[len(blocks) // 2].numpy().tobytes()
    made = pack(sample)
    return {
        "size": len(made) / len(sample),
        "encode MB/s": _rate(lambda: pack(sample), len(sample)),
        "decode MB/s": _rate(lambda: unpack(made), len(sample)),
    }


def _rate(action: Callable[[], object], num_bytes: int) -> float:
    best = math.inf
    for _ in range(7):
        began = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - began)
    return num_bytes / best / 1e6
