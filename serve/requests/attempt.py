"""One attempt at computing a sequence on chosen workers: reserve, prefill, commit, decode.

Workers' messages travel over several sockets and may overtake each other, so every step handles whatever comes.
"""

import asyncio

import msgspec

from kvrelay.errors import ConnectionLost, ProtocolError, RequestError
from kvrelay.plane import messages as wire
from kvrelay.plane.messages import TokenOutput
from kvrelay.router.types import Decision
from kvrelay.serve.requests.retries import AttemptFailed
from kvrelay.serve.telemetry.moves import MoveRecord
from kvrelay.serve.telemetry.observer import RequestObserver
from kvrelay.serve.workers.membership import Placer
from kvrelay.serve.workers.worker_link import Received, Submission


def _without_first(output: TokenOutput, count: int) -> TokenOutput:
    """`output` without its first `count` tokens, which were delivered before, and without the facts of its first."""
    tokens, logprobs = output.token_ids[count:], output.logprobs[count:]
    return msgspec.structs.replace(
        output,
        position=output.position + count,
        token_ids=tokens,
        logprobs=logprobs,
        cached_tokens=None,
        prompt_logprobs=[],
        timings=None,
    )


def _merged(outputs: list[TokenOutput], request_id: str) -> TokenOutput:
    """Consecutive outputs as one. Facts of the first token come from the output that has them."""
    first, last = outputs[0], outputs[-1]
    if first is last:
        return first if first.request_id == request_id else msgspec.structs.replace(first, request_id=request_id)
    return msgspec.structs.replace(
        first,
        request_id=request_id,
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=[entry for output in outputs for entry in output.logprobs],
        finish_reason=last.finish_reason,
        stop_token=last.stop_token,
    )


class TokenOrder:
    """Outputs are added as they arrive, in any order; `take` returns the next ones, merged.

    `tokens` is the sequence's output so far, delivered or ready. At most `limit` positions are
    accepted: more is the worker's fault.
    """

    def __init__(self, request_id: str, limit: int) -> None:
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self._request_id, self._limit = request_id, limit
        self._ready: list[TokenOutput] = []
        self.early: dict[int, TokenOutput] = {}

    @property
    def remaining(self) -> int:
        return self._limit - len(self.tokens)

    def add(self, output: TokenOutput) -> None:
        """Take one output. Raises ProtocolError when it lies past the output's end."""
        if output.position + len(output.token_ids) > self._limit or output.position < 0:
            raise ProtocolError(f"position {output.position} is past the limit of {self._limit} tokens")
        if output.position > len(self.tokens):
            known = self.early.get(output.position)
            if known is None or len(known.token_ids) <= len(output.token_ids):
                self.early[output.position] = output
            return
        self._append(output)
        while self.early and (first := min(self.early)) <= len(self.tokens):
            self._append(self.early.pop(first))

    def _append(self, output: TokenOutput) -> None:
        if self.finish_reason is not None:
            return
        seen = len(self.tokens) - output.position
        if seen > 0:
            if seen > len(output.token_ids) or (seen == len(output.token_ids) and output.finish_reason is None):
                return
            output = _without_first(output, seen)
        self._ready.append(output)
        self.tokens += output.token_ids
        self.finish_reason = output.finish_reason

    def take(self) -> TokenOutput | None:
        """Everything that is ready, as one output, or None."""
        if not self._ready:
            return None
        outputs, self._ready = self._ready, []
        return _merged(outputs, self._request_id)


class GroupOrder:
    """A TokenOrder for each choice of a request. The whole ends when every choice has ended or was dropped."""

    def __init__(self, request_id: str, limit: int, num_choices: int) -> None:
        self._orders = [TokenOrder(request_id, limit) for _ in range(num_choices)]
        self._dropped: set[int] = set()
        self.finish_reason: str | None = None  # the last choice's, once all have ended

    @property
    def ended(self) -> tuple[int, ...]:
        """Choices that have ended or were dropped."""
        done = (index for index, order in enumerate(self._orders) if order.finish_reason is not None)
        return tuple(sorted({*done, *self._dropped}))

    @property
    def emitted(self) -> list[list[int]]:
        """Each choice's output so far."""
        return [list(order.tokens) for order in self._orders]

    def add(self, output: TokenOutput) -> None:
        """Take one output. Raises ProtocolError when it is no choice's, or lies past its end."""
        if not 0 <= output.choice < len(self._orders):
            raise ProtocolError(f"choice {output.choice} of {len(self._orders)}")
        if output.choice in self._dropped:
            return
        self._orders[output.choice].add(output)
        if self._orders[output.choice].finish_reason is not None:
            self._end()

    def take(self) -> TokenOutput | None:
        """Everything that is ready of one choice, as one output, or None."""
        for order in self._orders:
            if (output := order.take()) is not None:
                return output
        return None

    def drop(self, choice: int) -> None:
        """This choice needs no more tokens."""
        self._dropped.add(choice)
        self._end()

    def _end(self) -> None:
        if len(self.ended) == len(self._orders):
            self.finish_reason = self._orders[-1].finish_reason or "stop"

    @property
    def remaining(self) -> int:
        """Tokens that the choice with the least output so far may still have."""
        return max((order.remaining for order in self._orders if order.finish_reason is None), default=0)

    def forget_early(self) -> None:
        """A new attempt computes everything after each choice's tokens again."""
        for order in self._orders:
            order.early.clear()


RESERVE_GRACE_S = 5.0  # beyond the wait that the decode worker itself allows


class SequenceAttempt:
    """`request` on the workers of `decision`. Its outputs go through `order`, which outlives the attempt.

    Every step raises AttemptFailed, and RequestError when the request's time is up.
    """

    def __init__(
        self,
        request: wire.SequenceRequest,
        decision: Decision,
        submission: Submission,
        order: GroupOrder,
        placer: Placer,
        observer: RequestObserver | MoveRecord,
    ) -> None:
        self.request, self.decision = request, decision
        self._submission, self._order = submission, order
        self._placer, self._observer = placer, observer
        self._has_first_token = False
        self._is_committed = decision.prefill is None or decision.decode is None  # else: once the KV is transferred
        self._ticket: bytes | None = None

    @property
    def id(self) -> str:
        return self._submission.id

    # ---- steps

    async def reserve(self, message: wire.Reserve) -> bytes:
        """Reserve blocks on the decode worker, before any compute is spent. Returns the ticket of one KV transfer."""
        assert self.decision.decode is not None
        self._observer.reserving(self.decision.decode)
        self._submit(self.decision.decode, message)
        try:
            async with asyncio.timeout(message.timeout_s + RESERVE_GRACE_S):
                while self._ticket is None:
                    await self._receive()
        except TimeoutError as error:
            raise AttemptFailed(self.decision.decode, "full", "no answer to the reservation") from error
        return self._ticket

    def submit(self, request: wire.SequenceRequest, ticket: bytes | None, moves: str = "") -> None:
        """Have the prompt computed: by the prefill worker, else by the decode worker.

        moves: id of the attempt that this one continues from where it runs, on the prefill worker itself.
        """
        if self.decision.prefill is not None:
            self._submit(self.decision.prefill, wire.Prefill(request=request, ticket=ticket, moves=moves))
        else:
            assert self.decision.decode is not None
            self._submit(self.decision.decode, wire.Generate(request=request))

    async def prefilled(self) -> wire.TokenOutput | None:
        """The next first token of a choice; None once the decode worker has committed the prompt's KV."""
        while (output := self._order.take()) is None:
            if self._is_over or (self._has_first_token and self._is_committed):
                return None
            await self._receive()
        return output

    async def decoded(self) -> wire.TokenOutput | None:
        """All tokens that are ready, waiting for the first of them; None after the last."""
        while (output := self._order.take()) is None:
            if self._is_over:
                return None
            await self._receive()
        return output

    async def arrived(self) -> None:
        """Wait until the decode worker has the KV, or the sequence has ended. Outputs stay in the order."""
        while not self._is_committed and not self._is_over:
            await self._receive()

    @property
    def is_decoding(self) -> bool:
        """Its prompt's KV is on the decode worker, and its first token is here."""
        return self._has_first_token and self._is_committed and not self._is_over

    @property
    def _is_over(self) -> bool:
        return self._order.finish_reason is not None or self._submission.is_closed

    def _submit(self, worker_id: str, message: wire.Reserve | wire.Prefill | wire.Generate) -> None:
        self._observer.submitted(worker_id, message)
        try:
            self._submission.send(worker_id, message)
        except ConnectionLost as error:
            raise AttemptFailed(worker_id, "lost", str(error)) from error

    # ---- what workers send

    async def _receive(self) -> None:
        for worker_id, message in await self._submission.inbox.get_all():
            self._handle(worker_id, message)
            if self._order.finish_reason is not None:
                return

    def _handle(self, worker_id: str, message: Received) -> None:
        if isinstance(message, wire.TokenOutput):
            self._on_tokens(worker_id, message)
        elif isinstance(message, wire.Reserved):
            self._ticket = message.ticket
            self._observer.reserved(message)
        elif isinstance(message, wire.Transferred):
            self._on_committed()
            self._observer.transferred(message)
        elif isinstance(message, wire.Refused):
            self._submission.released(worker_id)
            raise AttemptFailed(worker_id, message.reason, message.message, retry_after_s=message.retry_after_s)
        elif isinstance(message, wire.Failed):
            self._submission.released(worker_id)
            raise AttemptFailed(worker_id, message.code, message.message, retryable=message.retryable)
        elif isinstance(message, ConnectionLost):
            if self._submission.released(worker_id):
                raise AttemptFailed(worker_id, "lost", str(message))
        elif message is not None:
            raise message

    def _on_tokens(self, worker_id: str, output: wire.TokenOutput) -> None:
        try:
            self._order.add(output)
        except ProtocolError as error:
            raise AttemptFailed(worker_id, "engine", str(error), retryable=False) from error
        if not self._has_first_token and worker_id == (self.decision.prefill or self.decision.decode):
            self._on_first_token(output)
        if worker_id == self.decision.decode:
            self._on_committed()  # it decodes: the blocks have arrived
        if output.ends_request:
            self._submission.released(worker_id)
        if output.finish_reason is not None:
            self.narrow()

    def _on_first_token(self, output: wire.TokenOutput) -> None:
        self._has_first_token = True
        now_s = self._observer.first_token(output)
        self._placer.first_token(self.id, output, now_s)
        self._release_prefill()

    def _on_committed(self) -> None:
        self._is_committed = True
        self._release_prefill()

    def _release_prefill(self) -> None:
        """The prefill worker is done once its token and its blocks have both arrived."""
        source, target = self.decision.prefill, self.decision.decode
        if source is not None and target is not None and self._has_first_token and self._is_committed:
            self._submission.released(source)

    # ---- groups

    def drop_choice(self, choice: int) -> None:
        """Have workers stop computing a choice of a group."""
        self._submission.abort_choice(choice)
        self.narrow()

    def narrow(self) -> None:
        """Count only the choices that still run.

        A beam search returns all its results at its end: until then all run.
        """
        group = self.request.group
        if group is not None and group.beams is None:
            self._placer.narrowed(self.id, group.num_choices - len(self._order.ended))

    def interrupt(self, error: RequestError | AttemptFailed) -> None:
        """Have the current step raise `error`."""
        self._submission.inbox.put(("", error))

    def wake(self) -> None:
        """Have the current step look again: another attempt has brought outputs, or takes over."""
        self._submission.inbox.put(("", None))

    def holds(self, worker_id: str) -> bool:
        """Whether this worker still has a part in it."""
        return self._submission.has(worker_id)

    def give_up(self, worker_id: str, failure: AttemptFailed) -> None:
        """A move that `leave` was called for has failed: fail, so that a retry follows. Else nothing happens."""
        if not self._submission.is_closed and not self.holds(worker_id):
            self.interrupt(failure)

    def leave(self, worker_id: str) -> None:
        """Have one worker end its part; what comes next comes from elsewhere."""
        self._submission.abort_at(worker_id)

    def close(self, reason: str) -> None:
        """The one release path: workers that may still hold something get an Abort. Idempotent."""
        if not self._submission.is_closed:
            self._placer.ended(self.id)
            self._submission.close(reason)
