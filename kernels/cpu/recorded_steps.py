"""Decode steps of the compiled CPU kernels, recorded once per batch size and replayed with new metadata.

Also steps of one sequence with a few tokens: drafts, or the end of a prompt.

A step of a small model is hundreds of short kernel calls, and the interpreter between them costs a quarter of the step.
Like a CUDA graph, a recording keeps the calls with their addresses and runs them all in one call
(kernels/cpu/native/replay.c). Only compiled kernels can be recorded: a model that also computes in torch, or a machine
where another linear kernel is faster, runs every step without a recording.
"""

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvrelay.kernels.backend import AttentionBatch, AttentionShape, ModelForward
from kvrelay.kernels.cpu.native_kernels import SIGNATURES, NativeKernels, NativePlan, Schedule

logger = logging.getLogger(__name__)

LARGEST = 64  # sequences; the interpreter's share of larger steps is small
MOST_TOKENS = 33  # of a single sequence
MOST_HEADED = 8  # sequences whose logits are part of the recording; each size has its own memory for them
Head = Callable[[Tensor], Tensor]  # hidden [T, hidden] -> logits [T, vocab] float32

# As enumerated in replay.c.
_KERNELS = (
    "kr_embed", "kr_linear", "kr_rms_norm", "kr_rope", "kr_gate", "kr_attention", "kr_quant_linear", "kr_widen",
    "kr_choose", "kr_experts", "kr_norm_rope_store",
)  # fmt: skip
_ATTENTION = _KERNELS.index("kr_attention")
_ALIGNMENT = 64  # bytes
_CALL_WORDS = 27  # a call: its kernel, then up to 26 arguments of 8 bytes
_MAX_CONTEXT_WORD = 1 + 18  # kr_attention's max_context_len


_ONE_AT_A_TIME = threading.Lock()
"""Serialises recordings of all engines of this process. Under a TorchDispatchMode torch 2.13 caches a pointer to a
Python object for each operator at its first use (getTorchApiFunction), without a reference. If two threads get there
first together, OpOverloadPacket creates the object twice and drops the one that the pointer refers to: the process
crashes later.
"""


class _Buffers:
    """Memory for the tensors of a recording: reused once nothing views it, never freed."""

    def __init__(self) -> None:
        self._owned: list[np.ndarray] = []
        self._free: dict[int, list[np.ndarray]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        free = self._free.setdefault(num_bytes, [])
        if not free:
            memory = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
            start = -memory.ctypes.data % _ALIGNMENT
            self._owned.append(memory)
            free.append(memory[start : start + num_bytes])
        memory = free.pop()
        view = memory[:]  # the tensor's storage holds it, through any view of the tensor
        weakref.finalize(view, free.append, memory)
        return torch.from_numpy(view).view(dtype).view(tuple(shape))

    def spoil(self) -> None:
        """Fill everything with NaN."""
        for memory in self._owned:
            memory.fill(0xFF)


class _Tape:
    """Replaces the library of compiled kernels: runs the calls and records them."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib
        self.calls: list[np.ndarray] = []
        self.foreign: str | None = None  # something that ran and is not on the tape

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._lib, name)
        if name not in _KERNELS:
            self.foreign = name
            return function  # type: ignore[no-any-return]

        def run(*arguments: Any) -> None:
            self.calls.append(_encode(name, arguments))
            function(*arguments)

        return run


def _encode(name: str, arguments: Sequence[Any]) -> np.ndarray:
    words = np.zeros(_CALL_WORDS, dtype=np.int64)
    words[0] = _KERNELS.index(name)
    for index, (kind, value) in enumerate(zip(SIGNATURES[name][0], arguments, strict=True), start=1):
        if kind is ctypes.c_float:
            words[index : index + 1].view(np.float64)[0] = value
        else:
            words[index] = 0 if value is None else int(value)
    return words


class _Watch(TorchDispatchMode):
    """Detects torch operators that compute: only views are allowed while a step is recorded."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self._tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler at the first call otherwise: 1 s and 100 MiB."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self._tape.foreign = str(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def _recording(kernels: NativeKernels, buffers: _Buffers) -> Iterator[_Tape]:
    """Record kernel calls onto the tape, with their results in `buffers`."""
    lib, empty = kernels.lib, kernels.empty
    tape = _Tape(lib)
    kernels.lib, kernels.empty = tape, buffers.empty
    try:
        with _ONE_AT_A_TIME, _Watch(tape):
            yield tape
    finally:
        kernels.lib, kernels.empty = lib, empty


@dataclass(slots=True)
class _Graph:
    """One batch size: its calls, their inputs and outputs."""

    calls: np.ndarray  # [calls, _CALL_WORDS] int64
    attention: np.ndarray  # indices of the attention calls
    token_ids: Tensor
    batch: AttentionBatch
    plan: NativePlan
    hidden: Tensor
    logits: Tensor | None  # of all rows, if they are part of the recording
    buffers: _Buffers
    metadata: tuple[np.ndarray, ...] = ()  # views of token_ids and of the batch's tensors, in the order of `_metadata`

    def refill(self, token_ids: Tensor, batch: AttentionBatch) -> None:
        """Write this step's metadata into the buffers that the calls read."""
        if not self.metadata:
            self.metadata = _metadata(self.token_ids, self.batch)
        ids, contexts, slots, positions, tables = self.metadata  # numpy: each of these takes torch microseconds
        new_ids, new_contexts, new_slots, new_positions, new_tables = _metadata(token_ids, batch)
        ids[:], contexts[:], slots[:], positions[:] = new_ids, new_contexts, new_slots, new_positions
        tables[:, : new_tables.shape[1]] = new_tables
        self.calls[self.attention, _MAX_CONTEXT_WORD] = batch.max_context_len

    def replay(self, lib: Any) -> None:
        lib.kr_replay(self.calls.ctypes.data, len(self.calls))


def _metadata(token_ids: Tensor, batch: AttentionBatch) -> tuple[np.ndarray, ...]:
    """The inputs that change from step to step, as numpy views."""
    tensors = (token_ids, batch.context_lens, batch.slot_mapping, batch.positions, batch.block_tables)
    return tuple(tensor.numpy() for tensor in tensors)


class RecordedSteps:
    """Recordings of one model's decode step. Call it from the engine thread only.

    Args:
        kernels: the compiled kernels that the forward calls.
        shape: of the model's attention layers.
        max_blocks: most blocks of a sequence.
        head: the model's; in steps of few decoding sequences the recording computes the logits, too.
    """

    def __init__(
        self, kernels: NativeKernels, shape: AttentionShape, *, max_blocks: int, head: Head | None = None
    ) -> None:
        self._kernels, self._shape, self._max_blocks, self._head = kernels, shape, max_blocks, head
        self._last: _Graph | None = None  # its buffers hold the last step's results
        self._graphs: dict[tuple[int, int], _Graph] = {}  # by (sequences, tokens)
        self.why_not: str | None = None  # why nothing is recorded
        # shared by all sizes, since one replays at a time; refilled for every step
        self._schedule = Schedule(kernels.lib, LARGEST, max_blocks * shape.block_size)

    @property
    def sizes(self) -> list[int]:
        """Tokens of the steps recorded so far."""
        return sorted(tokens for _, tokens in self._graphs)

    def fits(self, batch: AttentionBatch) -> bool:
        """Whether the batch is all decode or one sequence alone, not too large, and the model can be recorded."""
        if self.why_not is not None:
            return False
        size = batch.context_lens.shape[0]
        if size == 1:
            return batch.max_query_len <= MOST_TOKENS
        return batch.num_decode == size <= LARGEST and batch.max_query_len == 1

    def reset(self) -> None:
        """Drop all recordings, after something that they read has moved."""
        self._graphs.clear()
        self._last = None

    def warm_up(self, forward: ModelForward) -> None:
        """Nothing: a step is recorded at once when it comes first."""

    def logits_of(self, hidden: Tensor) -> Tensor | None:
        """Logits of all rows of the last run's result, if the recording computes them. The next run overwrites them."""
        last = self._last
        return last.logits if last is not None and last.hidden is hidden else None

    def run(self, token_ids: Tensor, batch: AttentionBatch, forward: ModelForward) -> Tensor:
        """Hidden states [T, hidden] of a batch that fits; records at the first batch of its size.

        token_ids: [T] int64. The result is overwritten by the next run.
        """
        size = batch.context_lens.shape[0], token_ids.shape[0]
        graph = self._graphs.get(size)
        if graph is not None:
            graph.refill(token_ids, batch)
            self._kernels.share(
                self._schedule, replace(graph.batch, max_context_len=batch.max_context_len), self._shape
            )
            graph.replay(self._kernels.lib)
            self._last = graph
            return graph.hidden
        graph = self._record(token_ids, batch, forward)
        if self.why_not is None:
            self._graphs[size] = graph
        else:
            logger.info("decode steps are not recorded: %s", self.why_not)
        return graph.hidden

    def _record(self, token_ids: Tensor, batch: AttentionBatch, forward: ModelForward) -> _Graph:
        """Run and record the step, then replay it over overwritten buffers: the result must be the same."""
        tables = torch.zeros(batch.context_lens.shape[0], self._max_blocks, dtype=torch.int32)
        tables[:, : batch.block_tables.shape[1]] = batch.block_tables
        own = AttentionBatch(
            query_starts=batch.query_starts.to(torch.int32, copy=True),
            context_lens=batch.context_lens.to(torch.int32, copy=True),
            block_tables=tables,
            slot_mapping=batch.slot_mapping.clone(),
            positions=batch.positions.clone(),
            num_decode=batch.num_decode,
            max_query_len=batch.max_query_len,
            max_context_len=batch.max_context_len,
        )
        plan, ids, buffers = self._kernels.plan(own, self._shape, self._schedule), token_ids.clone(), _Buffers()
        assert plan.batch.context_lens is own.context_lens and plan.batch.block_tables is own.block_tables
        with _recording(self._kernels, buffers) as tape:
            hidden = forward(ids, own, plan)
        self.why_not = f"{tape.foreign} is no compiled kernel" if tape.foreign else None
        logits = self._recorded_head(hidden, buffers, tape) if self.why_not is None and _decodes_few(batch) else None
        calls = np.stack(tape.calls) if tape.calls else np.zeros((0, _CALL_WORDS), dtype=np.int64)
        graph = _Graph(calls, np.flatnonzero(calls[:, 0] == _ATTENTION), ids, own, plan, hidden, logits, buffers)
        if self.why_not is None:
            results = [tensor for tensor in (hidden, logits) if tensor is not None]
            first = [tensor.clone() for tensor in results]
            buffers.spoil()
            graph.replay(self._kernels.lib)
            if not all(map(torch.equal, first, results)):
                self.why_not = "the replay's result differs"
                hidden.copy_(first[0])
                graph.logits = None
        return graph

    def _recorded_head(self, hidden: Tensor, buffers: _Buffers, tape: _Tape) -> Tensor | None:
        """The logits, their calls appended to the tape; None if anything but compiled kernels computes them."""
        if self._head is None:
            return None
        with _recording(self._kernels, buffers) as own:
            logits = self._head(hidden)
        if own.foreign is not None:
            self._head = None
            return None
        tape.calls += own.calls
        return logits


def _decodes_few(batch: AttentionBatch) -> bool:
    return batch.num_decode == batch.context_lens.shape[0] <= MOST_HEADED
