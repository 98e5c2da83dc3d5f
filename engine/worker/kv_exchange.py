"""A prompt's KV out of an engine and into one, in the formats of kvcache/memory/formats.py; in files that others read;
and from the stores into host memory before its request comes. On the engine's thread, between two steps.

Out: the prompt is computed (or found cached) as a prefill worker does it, its blocks are held, copied and let go. In:
blocks are reserved and filled as a decode worker does it, and its full blocks stay in the prefix cache. A file is
safetensors: `kv` or `kv.<layer>`, `token_ids`, and what the KV is of as metadata.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvrelay.engine.scheduling.sequence import Sequence as TokenSequence
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.step.requests import request_fault
from kvrelay.errors import CheckpointCorrupt, InvalidRequest, LayoutMismatch
from kvrelay.kvcache.memory.formats import KvFormat, export_kv, import_kv, shape_of
from kvrelay.plane.messages import Prefetch, Prefetched, Sampling, SequenceRequest

_REQUEST_ID = "kv-exchange"
_SAME = ("model", "num_layers", "num_kv_heads", "head_dim", "quantization")


@dataclass(frozen=True, slots=True)
class PromptKv:
    """The KV of a prompt. `tensors`: "kv", or "kv.<layer>" for a layerwise format. `origin`: what of a Fingerprint must
    be equal.
    """

    fmt: KvFormat
    token_ids: list[int]
    tensors: Mapping[str, Tensor]
    origin: Mapping[str, str]


def export_prompt(engine: Engine, token_ids: Sequence[int], fmt: KvFormat, *, salt: str = "") -> PromptKv:
    """Compute the prompt and copy its KV. The engine must have nothing else to do.

    Raises InvalidRequest: it cannot take this prompt; LayoutMismatch: the format is not for its pool.
    """
    request = _request(engine, token_ids, salt)
    engine.add(request, hold=True, output_limit=1)
    try:
        while _REQUEST_ID in engine.scheduler.sequences and _REQUEST_ID not in engine.scheduler.held:
            engine.step()
        if _REQUEST_ID not in engine.scheduler.held:  # no token could follow it
            raise InvalidRequest(f"{len(token_ids)} tokens; the longest prompt here is {engine.max_model_len - 2}")
        blocks = engine.scheduler.held[_REQUEST_ID].blocks
        tensors = {
            name: export_kv(engine.cache.storage, blocks, len(token_ids), fmt, layer=layer)
            for name, layer in _tensors(engine, fmt)
        }
    finally:
        engine.abort(_REQUEST_ID)
    return PromptKv(fmt, list(token_ids), tensors, _origin(engine))


def import_prompt(engine: Engine, kv: PromptKv, *, salt: str = "") -> int:
    """Put a prompt's full blocks into the prefix cache; how many of its tokens are there then.

    The engine must have nothing else to do. Raises InvalidRequest: it cannot take this prompt; LayoutMismatch: another
    model's, or tensors of another shape.
    """
    origin = _origin(engine)
    for name in _SAME:
        if kv.origin.get(name) != origin[name]:
            raise LayoutMismatch(name, f"{kv.origin.get(name)} in the file, {origin[name]} here: not the same model")
    engine.reserve(_request(engine, kv.token_ids, salt))
    try:
        reservations = engine.step().reservations
        if not reservations:
            raise InvalidRequest(f"no room for {len(kv.token_ids)} tokens")
        blocks = engine.scheduler.receiving[_REQUEST_ID].blocks
        for name, layer in _tensors(engine, kv.fmt):
            if (tensor := kv.tensors.get(name)) is None:
                raise LayoutMismatch("tensors", f"there is no {name}")
            if tuple(tensor.shape) != (expected := shape_of(engine.cache.memory.layout, len(kv.token_ids), kv.fmt)):
                raise LayoutMismatch("shape", f"{name} is {list(tensor.shape)}, not {list(expected)}")
            import_kv(engine.cache.storage, blocks, tensor, kv.fmt, layer=layer, first=reservations[0].held_tokens)
        engine.requests.activate(_REQUEST_ID, [])
    finally:
        engine.abort(_REQUEST_ID)
    size = engine.config.block_size
    return len(kv.token_ids) // size * size if engine.config.prefix_caching else 0


def save(kv: PromptKv, path: Path) -> None:
    """As a safetensors file."""
    from safetensors.torch import save_file

    tensors = {name: tensor.cpu() for name, tensor in kv.tensors.items()}
    tensors["token_ids"] = torch.tensor(kv.token_ids, dtype=torch.int64)
    save_file(tensors, path, metadata={"format": str(kv.fmt), "origin": json.dumps(dict(kv.origin))})


def load(path: Path) -> PromptKv:
    """What `save` wrote. Raises CheckpointCorrupt: it is no such file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        token_ids = tensors.pop("token_ids").tolist()
        return PromptKv(KvFormat(metadata["format"]), token_ids, tensors, json.loads(metadata["origin"]))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointCorrupt(str(path), f"no KV that `kvrelay kv export` wrote: {error}") from error


def _tensors(engine: Engine, fmt: KvFormat) -> Iterator[tuple[str, int | None]]:
    if not fmt.is_layerwise:
        yield "kv", None
        return
    for layer in range(engine.cache.memory.layout.num_layers):
        yield f"kv.{layer}", layer


def _origin(engine: Engine) -> dict[str, str]:
    return {name: str(value) for name, value in asdict(engine.cache.fingerprint).items()}


def _request(engine: Engine, token_ids: Sequence[int], salt: str) -> SequenceRequest:
    request = SequenceRequest(
        request_id=_REQUEST_ID,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        block_hashes=[],
        tokens_per_hash=engine.config.block_size,
        salt=salt,
        sampling=Sampling(max_tokens=2, temperature=0.0, ignore_eos=True),
    )
    if (refusal := engine.requests.refusal(request)) is not None:
        raise InvalidRequest(refusal[1])
    return request


def prefetch(engine: Engine, message: Prefetch, answer: Callable[[Prefetched], None]) -> None:
    """Have the prompt's blocks brought from the stores into the host tier, and keep them for `message.hold_s`.

    `answer` is called once, when it is known where they are. Nothing is held that does not end by itself.
    """
    request = message.request
    fault = request_fault(request, engine.config.block_size, engine.model.spec.vocab_size)
    if not 0 < message.hold_s < math.inf:
        fault = "hold_s must be positive and finite"
    if fault is not None:
        answer(Prefetched(query_id=message.query_id, problem="invalid", message=fault))
        return
    size = engine.config.block_size
    seq = TokenSequence(request, size, arrival=0)
    num_in_pool = len(engine.pool.match(seq.block_chain()))
    num_in_host = 0
    engine.requests.pin_ahead(seq, num_in_pool, message.hold_s)

    def answer_coming(num_coming: int) -> None:
        answer(
            Prefetched(
                query_id=message.query_id,
                pool_tokens=num_in_pool * size,
                host_tokens=num_in_host * size,
                coming_tokens=num_coming * size,
            )
        )

    if engine.tiers is None:
        answer_coming(0)
        return
    num_in_host = engine.tiers.keep_ahead(seq, num_in_pool, message.hold_s)
    if not engine.tiers.prefetch(seq, num_in_pool + num_in_host, message.hold_s, answer_coming):
        answer(Prefetched(query_id=message.query_id, problem="full", message="too many prefetches are under way"))
