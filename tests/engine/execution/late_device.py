"""A device that computes by itself, for the step loop: what is launched is done in order, and as late as it can be.

Its memory is the host's, so that looking too early is possible: unfinished tensors hold what no model takes, and any
torch operator on one that is not launched as work of the device is a wait of the host, which is counted.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from kvrelay.engine.execution.runner import Runner
from kvrelay.engine.models.decoder import DecoderModel
from kvrelay.engine.step.engine import Engine
from kvrelay.kernels.backend import SamplingBatch, TokenFeed
from kvrelay.kernels.common.logits import packed_log_probabilities
from kvrelay.kernels.oracle.reference import ReferenceBackend

# known to the host, too; a tensor that is on its device stays where it is
_KNOWN = (Tensor.device.__get__, Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.to)
UNDRAWN = -1_000_000  # as a token id it makes an embedding fail


class OnDevice(Tensor):
    """A result that may not be there yet. `stream`: the device's."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.cat:  # of drafts
            parts = args[0]
            out = torch.full((sum(part.shape[0] for part in parts),), UNDRAWN)
            return parts[0].stream.launch(out, lambda: torch.cat([plain(part) for part in parts]))
        for one in args:
            if isinstance(one, OnDevice) and func not in _KNOWN:
                one.stream.finish()
        return func(*(plain(one) if isinstance(one, OnDevice) else one for one in args), **(kwargs or {}))


def plain(x: Tensor) -> Tensor:
    """As the device's own work sees it."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


class Stream:
    """Work in the order of its launch. num_waits: of the host."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], object]] = deque()
        self.num_launched = self.num_done = self.num_waits = 0

    def launch(self, out: Tensor, work: Callable[[], Tensor]) -> Tensor:
        """`work` gives what `out` will hold."""
        self._queue.append(lambda: out.copy_(work()))
        self.num_launched += 1
        found = out.as_subclass(OnDevice)
        found.stream = self
        return found

    def do(self, number: int) -> None:
        """The device has come so far."""
        with torch.inference_mode():
            while self.num_done < number:
                self._queue.popleft()()
                self.num_done += 1

    def finish(self) -> None:
        """The host waits for everything."""
        if self.num_done < self.num_launched:
            self.num_waits += 1
            self.do(self.num_launched)


class LateTokens:
    """See PendingTokens."""

    def __init__(self, tokens: Tensor, packed: Tensor | None, stream: Stream) -> None:
        self.tokens, self.packed, self._stream, self._number = tokens, packed, stream, stream.num_launched

    def wait(self) -> list[int]:
        self._stream.num_waits += 1
        self._stream.do(self._number)
        self.packed = None if self.packed is None else plain(self.packed)
        return plain(self.tokens).tolist()


class LateBackend(ReferenceBackend):
    """An asynchronous device over the reference's kernels; see `late`."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.stream = Stream()
        self.num_fed = 0  # launches that took tokens which the host did not know

    @property
    def asynchronous(self) -> "LateBackend":
        return self

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        self.stream.finish()
        return super().sample(plain(logits), batch)

    def sample_on_device(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        draw = super().sample_on_device
        out = torch.full((logits.shape[0],), UNDRAWN)
        return self.stream.launch(out, lambda: draw(plain(logits), batch))

    def pending(self, tokens: Tensor, logits: Tensor | None = None, rows=(), most: int = 0) -> LateTokens:
        if logits is None:
            return LateTokens(tokens, None, self.stream)
        out = torch.full((len(rows), 1 + 2 * most), torch.nan, dtype=torch.float64)
        packed = self.stream.launch(out, lambda: packed_log_probabilities(plain(logits), plain(tokens), rows, most))
        return LateTokens(tokens, packed, self.stream)

    def place(self, token_ids: Tensor, feed: TokenFeed | None) -> Tensor:
        if feed is None:
            return token_ids
        self.num_fed += 1
        tokens, sources = plain(feed.tokens), feed.sources
        return self.stream.launch(
            torch.full_like(token_ids, UNDRAWN),
            lambda: torch.where(sources >= 0, tokens[sources.clamp(min=0)], token_ids),
        )


def late(engine: Engine) -> Engine:
    """The same engine, its model and its pool's copies launched on its backend's stream."""
    storage, stream = engine.cache.storage, engine.backend.stream
    copy = storage.copy_blocks
    storage.copy_blocks = lambda copies: stream.launch(torch.empty(0), lambda: copy(copies) or torch.empty(0))
    _launch(engine.model, engine.runner, stream)
    if (drafts := engine.drafts.model) is not None:
        _launch(drafts._runner._model, drafts._runner, stream)
    return engine


def _launch(model: DecoderModel, runner: Runner, stream: Stream) -> None:
    forward, logits = model.forward, runner.logits
    hidden_size, vocab = model.spec.hidden_size, model.spec.vocab_size

    def late_forward(token_ids, batch, plan, kv_layers, on_layer=None):
        out = torch.full((token_ids.shape[0], hidden_size), torch.nan)
        return stream.launch(out, lambda: forward(plain(token_ids), batch, plan, kv_layers, on_layer))

    def late_logits(hidden, rows):
        return stream.launch(torch.full((len(rows), vocab), torch.nan), lambda: logits(plain(hidden), rows))

    model.forward, runner.logits = late_forward, late_logits
