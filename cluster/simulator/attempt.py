"""One try at serving a request on chosen workers, and the KV that is transferred for it.

See serve/requests/attempt.py.
"""

from typing import Protocol

from kvrelay.cluster.simulator.requests import SimulatedSequenceRequest
from kvrelay.cluster.simulator.resources.clock import Event
from kvrelay.cluster.simulator.resources.network import Flow
from kvrelay.plane.messages import TokenOutput
from kvrelay.router.types import Decision


class AttemptOwner(Protocol):
    """The request of an attempt. Keeps workers, which report to it, free of ingresses, which use workers.

    Calls come when the message has arrived; messages of an attempt that is over are dropped.
    """

    @property
    def peer(self) -> object: ...  # the connection that the attempt's messages use
    def reserved(self, attempt: "SimulatedAttempt", held_tokens: int) -> None: ...
    def output(self, attempt: "SimulatedAttempt", worker_id: str, output: TokenOutput) -> None: ...
    def failed(self, attempt: "SimulatedAttempt", worker_id: str, code: str) -> None: ...


class AttemptHolder(Protocol):
    """A worker, which may hold blocks for an attempt."""

    worker_id: str

    def abort(self, attempt_id: str) -> None: ...


class SimulatedAttempt:
    """`id` is unique. flow: the transfer of its KV, when the prompt is computed on another worker than decodes it. Its
    15 attributes are a record of one try.
    """

    __slots__ = (
        "_bytes_per_token",
        "_held_back_bytes",
        "decision",
        "fed_tokens",
        "flow",
        "has_first_token",
        "held_tokens",
        "holders",
        "id",
        "is_over",
        "num_emitted",
        "owner",
        "request",
        "tier_tokens",
        "wait",
    )

    def __init__(
        self, owner: AttemptOwner, request: SimulatedSequenceRequest, decision: Decision, bytes_per_token: int
    ) -> None:
        self.id, self.owner, self.request, self.decision = request.request_id, owner, request, decision
        self.flow: Flow | None = None
        self.holders: dict[str, AttemptHolder] = {}  # workers that have not reported that they are done with it
        self.wait: Event | None = None  # the time limit of a queued reservation
        self.held_tokens = 0  # of the prompt, at the decode worker already
        self.fed_tokens = 0  # of the prompt, given to the flow
        self.num_emitted = 0  # tokens of output that the client has, as of the last preemption
        self.tier_tokens = 0  # of the prompt, loaded from a lower tier where it was computed
        self.has_first_token = self.is_over = False
        self._bytes_per_token, self._held_back_bytes = bytes_per_token, 0.0

    # ---- the KV

    def feed(self, start: int, end: int, seconds: float, groups: int) -> None:
        """A step of `seconds` computes the prompt's tokens start .. end - 1; those before are computed.

        KV of all but the last of the `groups` of layers can be transferred during the step.
        """
        assert self.flow is not None
        if end <= self.fed_tokens:
            return
        fresh, own = self._bytes(self.fed_tokens, end), self._bytes(max(start, self.fed_tokens), end)
        ready = self._held_back_bytes + fresh - own / groups
        self._held_back_bytes, self.fed_tokens = own / groups, end
        self.flow.add(ready, seconds)

    def computed(self) -> None:
        """The whole prompt is computed: the rest of its KV can be transferred."""
        if self.flow is not None:
            self.flow.close(self._held_back_bytes)

    def _bytes(self, start: int, end: int) -> float:
        """KV of the prompt's tokens start .. end - 1 that the decode worker lacks; the last block goes whole."""
        request = self.request
        if end == len(request.token_ids):
            end = -(-end // request.tokens_per_hash) * request.tokens_per_hash
        return float(max(0, end - max(start, self.held_tokens)) * self._bytes_per_token)

    # ---- reports of workers

    def reserved(self, held_tokens: int) -> None:
        if not self.is_over:
            self.held_tokens = held_tokens
            self.owner.reserved(self, held_tokens)

    def output(self, worker_id: str, output: TokenOutput) -> None:
        if not self.is_over:
            self.owner.output(self, worker_id, output)

    def failed(self, worker_id: str, code: str) -> None:
        if not self.is_over:
            self.holders.pop(worker_id, None)
            self.owner.failed(self, worker_id, code)
