"""Steps of the compiled CPU kernels, recorded once and replayed with new metadata for any number of tokens.

A step of a small model is hundreds of short kernel calls, and the interpreter between them costs a quarter of a decode
step and a tenth of a step of prompts. Like a CUDA graph, a recording keeps the calls with their addresses and runs them
in one call (kernels/cpu/native/replay.c), or layer by layer where the caller is to hear of each. The buffers have room
for the largest step, and nothing in the calls but a few words depends on the step: the number of its rows, and what
attention has to know of its sequences. Only compiled kernels can be recorded: a model that also computes in torch, or a
machine where another linear kernel is faster, runs every step without a recording.
"""

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvrelay.kernels.backend import AttentionBatch, AttentionShape, ModelForward, OnLayer
from kvrelay.kernels.cpu.native_kernels import SIGNATURES, NativeKernels, NativePlan, Schedule

logger = logging.getLogger(__name__)

MOST_HEADED = 8  # decoding sequences whose logits are recorded, too
Head = Callable[[Tensor], Tensor]  # hidden [T, hidden] -> logits [T, vocab] float32

# As enumerated in replay.c; at which of a call's words its number of rows stands (0: nowhere).
_KERNELS = {
    "kr_embed": 5, "kr_linear": 8, "kr_rms_norm": 8, "kr_rope": 7, "kr_gate": 6, "kr_attention": 0,
    "kr_quant_linear": 9, "kr_widen": 4, "kr_choose": 6, "kr_experts": 15, "kr_norm_rope_store": 14,
}  # fmt: skip
_NUMBER = {name: number for number, name in enumerate(_KERNELS)}
_ALIGNMENT, _HUGE_PAGE, _PIECE = 64, 2 << 20, 16 << 20  # bytes
_CALL_WORDS = 27  # a call: its kernel, then up to 26 arguments of 8 bytes
_NUM_TILES, _MAX_QUERY, _MAX_CONTEXT = 11, 18, 19  # words of a call of kr_attention


_ONE_AT_A_TIME = threading.Lock()
"""Serialises recordings of all engines of this process. Under a TorchDispatchMode torch 2.13 caches a pointer to a
Python object for each operator at its first use (getTorchApiFunction), without a reference. If two threads get there
first together, OpOverloadPacket creates the object twice and drops the one that the pointer refers to: the process
crashes later.
"""


class _Buffers:
    """Memory for the tensors of a recording of `rows` rows, each with room for `most` rows: reused once nothing views
    it, never freed. It lies in pieces so large that numpy asks for huge pages.
    """

    def __init__(self, rows: int, most: int) -> None:
        self._rows, self._most = rows, most
        self._pieces: list[np.ndarray] = []
        self._used = 0  # of the last piece
        self._free: dict[int, list[np.ndarray]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        free = self._free.setdefault(num_bytes, [])
        memory = free.pop() if free else self._take(num_bytes * self._most // self._rows)
        view = memory[:]  # the tensor's storage holds it, through any view of the tensor
        weakref.finalize(view, free.append, memory)
        return torch.from_numpy(view)[:num_bytes].view(dtype).view(tuple(shape))

    def _take(self, num_bytes: int) -> np.ndarray:
        room = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if not self._pieces or self._used + room > len(self._pieces[-1]):
            piece = np.empty(max(room, _PIECE) + _HUGE_PAGE, dtype=np.uint8)
            self._pieces.append(piece[-piece.ctypes.data % _HUGE_PAGE :])
            self._used = 0
        begin, self._used = self._used, self._used + room
        return self._pieces[-1][begin : begin + num_bytes]

    def spoil(self) -> None:
        """Fill everything with NaN."""
        for piece in self._pieces:
            piece[: self._used if piece is self._pieces[-1] else None] = 0xFF


class _Tape:
    """Replaces the library of compiled kernels: runs the calls and records them."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib
        self.calls: list[np.ndarray] = []
        self.layer_ends: list[int] = []  # number of calls until each layer is done
        self.foreign: str | None = None  # something that ran and is not on the tape
        self.is_paused = False

    def end_layer(self, layer: int, on_layer: OnLayer | None) -> None:
        """A layer is done; what `on_layer` does about it is no part of the recording."""
        self.layer_ends.append(len(self.calls))
        if on_layer is not None:
            self.is_paused = True
            on_layer(layer)
            self.is_paused = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._lib, name)
        if name not in _KERNELS:
            self.foreign = self.foreign if self.is_paused else name
            return function  # type: ignore[no-any-return]

        def run(*arguments: Any) -> None:
            if not self.is_paused:
                self.calls.append(_encode(name, arguments))
            function(*arguments)

        return run


def _encode(name: str, arguments: Sequence[Any]) -> np.ndarray:
    words = np.zeros(_CALL_WORDS, dtype=np.int64)
    words[0] = _NUMBER[name]
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
        if not func.is_view and not self._tape.is_paused:
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
class _Recording:
    """Calls for any number of rows.

    num_rows: with which they were recorded, and later those of the last replay. layer_ends: see _Tape. result: with
    memory for the most rows behind it.
    """

    calls: np.ndarray  # [calls, _CALL_WORDS] int64
    num_rows: int
    layer_ends: list[int]
    result: Tensor
    buffers: _Buffers
    attention: np.ndarray = field(init=False)  # numbers of the attention calls
    _row_words: np.ndarray = field(init=False)  # where in all of `calls` a number of rows stands
    _per_row: np.ndarray = field(init=False)  # what stands there for each row

    def __post_init__(self) -> None:
        kernels = self.calls[:, 0]
        self.attention = np.flatnonzero(kernels == _NUMBER["kr_attention"])
        words = np.array(list(_KERNELS.values()))[kernels]
        self._row_words = (np.arange(len(kernels)) * _CALL_WORDS + words)[words > 0]
        self._per_row, rest = np.divmod(self.calls.reshape(-1)[self._row_words], self.num_rows)
        assert not rest.any(), "a call's rows are no multiple of the step's"

    def replay(self, lib: Any, num_rows: int, on_layer: OnLayer | None = None) -> Tensor:
        """The result [num_rows, ...]; the next replay overwrites it."""
        if num_rows != self.num_rows:
            self.calls.reshape(-1)[self._row_words] = self._per_row * num_rows
            self.num_rows = num_rows
        done, (address, stride) = 0, (self.calls.ctypes.data, self.calls.strides[0])
        if on_layer is not None:
            for layer, end in enumerate(self.layer_ends):
                lib.kr_replay(address + done * stride, end - done)
                on_layer(layer)
                done = end
        lib.kr_replay(address + done * stride, len(self.calls) - done)
        return self.result.as_strided((num_rows, *self.result.shape[1:]), self.result.stride())


def _numbers_of(token_ids: Tensor, batch: AttentionBatch) -> tuple[np.ndarray, ...]:
    """The tensors that change from step to step, as numpy views: a write of a few numbers takes torch microseconds."""
    flat = token_ids, batch.slot_mapping, batch.positions, batch.query_starts, batch.context_lens
    return tuple(tensor.numpy() for tensor in (*flat, batch.block_tables))


class _StepInputs:
    """What recorded calls read, in memory that never moves: a step's tokens and metadata."""

    def __init__(
        self, kernels: NativeKernels, shape: AttentionShape, *, max_blocks: int, max_running: int, max_tokens: int
    ) -> None:
        self._kernels, self._shape = kernels, shape
        self._tile_tokens = kernels.lib.kr_attention_tile_tokens(shape.num_heads // shape.num_kv_heads)
        words, numbers = partial(torch.zeros, dtype=torch.int32), partial(torch.zeros, dtype=torch.int64)
        self._token_ids = numbers(max_tokens)
        batch = AttentionBatch(
            query_starts=words(max_running + 1),
            context_lens=words(max_running),
            block_tables=words(max_running, max_blocks),
            slot_mapping=numbers(max_tokens),
            positions=numbers(max_tokens),
            num_decode=0,
            max_query_len=0,
            max_context_len=0,
        )
        tiles = words(max_tokens // self._tile_tokens + max_running, 2)
        schedule = Schedule(kernels.lib, max_running, max_blocks * shape.block_size)
        self._plan = NativePlan(batch, shape, tiles, 0, schedule)
        self._views = _numbers_of(self._token_ids, batch)

    def fill(self, token_ids: Tensor, batch: AttentionBatch) -> dict[int, int]:
        """Take a step; returns what attention calls have to know of it, by word."""
        *flat, tables = self._views
        *new, new_tables = _numbers_of(token_ids, batch)
        for own, numbers in zip(flat, new, strict=True):
            own[: len(numbers)] = numbers
        tables[: new_tables.shape[0], : new_tables.shape[1]] = new_tables
        own_batch, plan, lib = self._plan.batch, self._plan, self._kernels.lib
        facts = {name: getattr(batch, name) for name in ("num_decode", "max_query_len", "max_context_len")}
        own_batch = replace(own_batch, **facts)
        self._kernels.share(plan.schedule, own_batch, self._shape)
        at = own_batch.query_starts.data_ptr(), len(new_tables), self._tile_tokens, plan.tiles.data_ptr()
        self._plan = replace(plan, batch=own_batch, num_tiles=lib.kr_attention_tiles(*at))
        words = _NUM_TILES, _MAX_QUERY, _MAX_CONTEXT
        return dict(zip(words, (self._plan.num_tiles, batch.max_query_len, batch.max_context_len), strict=True))

    def views(self, num_tokens: int, num_sequences: int) -> tuple[Tensor, AttentionBatch, NativePlan]:
        """The step's token ids, metadata and attention, without the room behind them."""
        whole = self._plan.batch
        batch = replace(
            whole,
            query_starts=whole.query_starts[: num_sequences + 1],
            context_lens=whole.context_lens[:num_sequences],
            block_tables=whole.block_tables[:num_sequences],
            slot_mapping=whole.slot_mapping[:num_tokens],
            positions=whole.positions[:num_tokens],
        )
        return self._token_ids[:num_tokens], batch, replace(self._plan, batch=batch)


class RecordedSteps:
    """Recordings of one model's steps. Call it from the engine thread only.

    Args:
        kernels: the compiled kernels that the forward calls.
        shape: of the model's attention layers.
        max_blocks, max_running, max_tokens: of a sequence, of a step's sequences, and of a step's tokens.
        head: the model's; where few sequences decode, their logits are recorded, too.
    """

    with_layers = True

    def __init__(
        self,
        kernels: NativeKernels,
        shape: AttentionShape,
        *,
        max_blocks: int,
        max_running: int,
        max_tokens: int,
        head: Head | None = None,
    ) -> None:
        self._kernels, self._head, self._most = kernels, head, (max_tokens, max_running)
        self._inputs = _StepInputs(
            kernels, shape, max_blocks=max_blocks, max_running=max_running, max_tokens=max_tokens
        )
        self._step: _Recording | None = None
        self._logits: _Recording | None = None
        self._last: tuple[Tensor, Tensor] | None = None  # the last run's hidden states and their logits
        self.why_not: str | None = None  # why nothing is recorded

    @property
    def has_captures(self) -> bool:
        return self._step is not None

    def fits(self, batch: AttentionBatch) -> bool:
        """Whether the batch is not too large, and the model can be recorded."""
        max_tokens, max_running = self._most
        size = len(batch.positions), len(batch.context_lens)
        return self.why_not is None and size[0] <= max_tokens and size[1] <= max_running

    def reset(self) -> None:
        """Drop all recordings, after something that they read has moved."""
        self._step = self._logits = self._last = None

    def warm_up(self, forward: ModelForward) -> None:
        """Nothing: the first step is recorded at once."""

    def logits_of(self, hidden: Tensor) -> Tensor | None:
        """Logits of all rows of the last run's result, if they were recorded. The next run overwrites them."""
        return self._last[1] if self._last is not None and self._last[0] is hidden else None

    def run(
        self, token_ids: Tensor, batch: AttentionBatch, forward: ModelForward, on_layer: OnLayer | None = None
    ) -> Tensor:
        """Hidden states [T, hidden] of a batch that fits; the first one is recorded.

        token_ids: [T] int64. on_layer: see DecoderModel.forward. The next run overwrites the result.
        """
        words, self._last = self._inputs.fill(token_ids, batch), None
        num_tokens, num_sequences = len(token_ids), len(batch.context_lens)
        if self._step is None:
            own = self._inputs.views(num_tokens, num_sequences)
            hidden, self._step, self.why_not = self._record(
                num_tokens, self._most[0], lambda tape: forward(*own, lambda layer: tape.end_layer(layer, on_layer))
            )
            if self.why_not is not None:
                logger.info("steps are not recorded: %s", self.why_not)
            return hidden
        for word, value in words.items():
            self._step.calls[self._step.attention, word] = value
        hidden = self._step.replay(self._kernels.lib, num_tokens, on_layer)
        if batch.num_decode == num_sequences == num_tokens <= MOST_HEADED and self._head is not None:
            self._last = self._with_logits(hidden, self._head)
        return hidden

    def _with_logits(self, hidden: Tensor, head: Head) -> tuple[Tensor, Tensor] | None:
        if self._logits is not None:
            return hidden, self._logits.replay(self._kernels.lib, len(hidden))
        logits, self._logits, why_not = self._record(len(hidden), MOST_HEADED, lambda _: head(hidden))
        if why_not is not None:
            self._head = None
            return None
        return hidden, logits

    def _record(
        self, rows: int, most: int, compute: Callable[[_Tape], Tensor]
    ) -> tuple[Tensor, _Recording | None, str | None]:
        """Run and record a computation of so many rows, with room for `most`, then replay it over overwritten buffers:
        the result must be the same. Returns the result, and the recording or why there is none.
        """
        buffers = _Buffers(rows, most)
        with _recording(self._kernels, buffers) as tape:
            result = compute(tape)
        if tape.foreign is not None:
            return result, None, f"{tape.foreign} is no compiled kernel"
        recording, first = _Recording(np.stack(tape.calls), rows, tape.layer_ends, result, buffers), result.clone()
        buffers.spoil()
        recording.replay(self._kernels.lib, rows)
        if not torch.equal(first, result):
            return first, None, "the replay's result differs"
        return result, recording, None
