"""One try at computing a request on chosen workers, and the KV that travels for it. See serve/requests/attempt.py."""

from typing import Protocol

from kvrelay.cluster.simulator.requests import SimulatedSequenceRequest
from kvrelay.cluster.simulator.resources.clock import Event
from kvrelay.cluster.simulator.resources.network import Flow
from kvrelay.plane.messages import TokenOutput
from kvrelay.router.types import Decision


class AttemptOwner(Protocol):
    """Whose attempt it is. Calls come when the message has arrived; those of an attempt that is over are ignored."""

    @property
    def peer(self) -> object: ...  # the ingress
    def reserved(self, attempt: "SimulatedAttempt", held_tokens: int) -> None: ...
    def output(self, attempt: "SimulatedAttempt", worker_id: str, output: TokenOutput) -> None: ...
    def failed(self, attempt: "SimulatedAttempt", worker_id: str, code: str) -> None: ...


class AttemptHolder(Protocol):
    """A worker, as far as its attempts let go of it."""

    worker_id: str

    def abort(self, attempt_id: str) -> None: ...


class SimulatedAttempt:
    """`id` is unique. flow: its KV, when another worker decodes than computes the prompt."""

    __slots__ = (
        "_bytes_per_token", "_late_bytes", "decision", "fed_tokens", "flow", "has_first_token", "held_tokens", "holders", "id",
        "is_over", "num_emitted", "owner", "request", "tier_tokens", "wait",
    )  # fmt: skip

    def __init__(
        self, owner: AttemptOwner, request: SimulatedSequenceRequest, decision: Decision, bytes_per_token: int
    ) -> None:
        self.id, self.owner, self.request, self.decision = request.request_id, owner, request, decision
        self.flow: Flow | None = None
        self.holders: dict[str, AttemptHolder] = {}  # who has not said that it is done with it
        self.wait: Event | None = None  # the end of its time in line for a reservation
        self.held_tokens = self.fed_tokens = 0  # at the decode worker already; of the prompt, given to the flow
        self.num_emitted = 0  # tokens of output that have left for the client, as far as was noted
        self.tier_tokens = 0  # of the prompt, brought up from below the pool where it was computed
        self.has_first_token = self.is_over = False
        self._bytes_per_token, self._late_bytes = bytes_per_token, 0.0

    # ---- the KV

    def feed(self, start: int, end: int, seconds: float, groups: int) -> None:
        """A step of so many seconds computes the prompt's tokens start .. end - 1; what is before them is there.

        All but the last of the `groups` of layers can go while it lasts.
        """
        assert self.flow is not None
        if end <= self.fed_tokens:
            return
        fresh, own = self._bytes(self.fed_tokens, end), self._bytes(max(start, self.fed_tokens), end)
        ready = self._late_bytes + fresh - own / groups
        self._late_bytes, self.fed_tokens = own / groups, end
        self.flow.pace(ready, seconds)

    def computed(self) -> None:
        """The prompt is: what is left can go."""
        if self.flow is not None:
            self.flow.close(self._late_bytes)

    def _bytes(self, start: int, end: int) -> float:
        """Of the prompt's tokens start .. end - 1, those that the decode worker lacks; the last block travels whole."""
        request = self.request
        if end == len(request.token_ids):
            end = -(-end // request.tokens_per_hash) * request.tokens_per_hash
        return float(max(0, end - max(start, self.held_tokens)) * self._bytes_per_token)

    # ---- what workers say

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
