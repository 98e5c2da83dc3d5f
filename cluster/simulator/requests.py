"""Requests of the load: lengths, block names, and their outcome. Pure."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from types import MappingProxyType
from typing import Any, Protocol, Self, cast

from kvrelay.cluster.simulator.clock import Event
from kvrelay.cluster.simulator.network import Flow
from kvrelay.cluster.workloads.trace import TraceEntry
from kvrelay.errors import ConfigError
from kvrelay.hashing import HASH_BYTES, tenant_of
from kvrelay.plane import messages as wire
from kvrelay.plane.messages import TokenOutput
from kvrelay.router.types import Decision

END_TOKEN, WORD_TOKEN = 2, 7
_OUTPUT_NAME = 1 << 127  # keeps names of outputs apart from those of prompts
_PROMPT_NAME = 1 << 126  # and from those of prompts that the trace does not name


class CountedTokens:
    """Stands in for a list of token ids."""

    def __init__(self, count: int, last: int = 0) -> None:
        self._count, self._last = count, last

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return []
        if place != -1:
            raise IndexError("only the last of counted tokens is known")
        return self._last

    def append(self, token: int) -> None:
        self._count += 1
        self._last = token

    def extend(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._count += len(tokens)
            self._last = tokens[-1]

    def __iadd__(self, tokens: Sequence[int]) -> Self:
        self.extend(tokens)
        return self

    def copy(self) -> "CountedTokens":
        return CountedTokens(self._count, self._last)


def counted(count: int) -> list[int]:
    """`count` tokens for a SequenceRequest."""
    return cast("list[int]", CountedTokens(count))


class SimulatedSequenceRequest(wire.SequenceRequest, frozen=True, kw_only=True):
    """A request as a worker gets it.

    The model ends the output after `output_tokens`, which scheduler and router ignore.
    """

    output_tokens: int


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request of the load. Times are seconds of the simulation; tokens are counts. A record of 17
    attributes."""

    index: int
    arrival_s: float
    num_tokens: int
    output_tokens: int
    names: tuple[
        bytes, ...
    ]  # of full blocks: the prompt's, and those of its output that a later prompt is known to begin with
    session: str = ""
    tenant: str = ""
    weight: float = 1.0  # of the tenant
    outcome: str = "running"  # or done, overloaded, slo, deadline, error
    first_s: float = math.nan
    end_s: float = math.nan
    cached_tokens: int = 0  # of the prompt, at the first attempt that brought a token
    tier_tokens: int = 0  # of those, loaded from a lower tier
    is_local: bool = False  # its decode worker computed the prompt
    num_attempts: int = 0
    retry_after_s: float = 0.0
    _chain: list[bytes] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        return (self.end_s - self.first_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    def chain(self, block_size: int) -> list[bytes]:
        """Names of all full blocks of its prompt and whole output.

        Output that no later prompt begins with is named uniquely.
        """
        if not self._chain:
            total = (self.num_tokens + self.output_tokens) // block_size
            first = _OUTPUT_NAME | self.index << 32
            self._chain = [*self.names, *(_name(first + place) for place in range(len(self.names), total))]
        return self._chain

    def request(self, request_id: str, block_size: int, max_tokens: int, num_emitted: int) -> SimulatedSequenceRequest:
        """The request that is sent to a worker: the prompt, and the output so far to continue from."""
        return SimulatedSequenceRequest(
            request_id=request_id,
            token_ids=counted(self.num_tokens + num_emitted),
            num_prompt_tokens=self.num_tokens,
            block_hashes=self.chain(block_size),
            sampling=wire.Sampling(max_tokens=max_tokens),
            tokens_per_hash=block_size,
            tenant=self.tenant,
            weight=self.weight,
            output_tokens=self.output_tokens,
        )


def continued(entries: Sequence[TraceEntry]) -> dict[int, tuple[int, ...]]:
    """By index: hash ids of the blocks that an entry's output fills, if the next prompt of its session continues it."""
    last: dict[str, int] = {}
    outputs: dict[int, tuple[int, ...]] = {}
    for index, entry in enumerate(entries):
        if not entry.session:
            continue
        before = last.get(entry.session)
        last[entry.session] = index
        if before is None:
            continue
        earlier, size = entries[before], entry.block_tokens
        first, end = earlier.input_tokens // size, (earlier.input_tokens + earlier.output_tokens) // size
        is_continued = entry.input_tokens >= earlier.input_tokens + earlier.output_tokens and len(entry.hash_ids) >= end
        if is_continued and entry.hash_ids[:first] == earlier.hash_ids[:first]:
            outputs[before] = entry.hash_ids[first:end]
    return outputs


def _name(number: int) -> bytes:
    """Like a hash, so that placement by block name is spread."""
    return hashlib.blake2b(number.to_bytes(HASH_BYTES, "little"), digest_size=HASH_BYTES).digest()


def jobs_of(
    entries: Iterable[TraceEntry], block_size: int, weights: Mapping[str, float] = MappingProxyType({})
) -> Iterator[SimulatedRequest]:
    """The load, one request for each entry, in order of arrival. weights: tenants', by name.

    Raises ConfigError: the trace cannot be simulated.

    Hash ids must name prefixes, as Mooncake's do: an id always follows the same other one. In a sequence of entries
    (not an iterator), later prompts of a session name the blocks of earlier outputs: see `continued`.
    """
    outputs = continued(entries) if isinstance(entries, Sequence) else {}
    known: dict[int, bytes] = {}
    parents: dict[int, int] = {}
    last_s, tenants = 0.0, lru_cache(1024)(tenant_of)
    for index, entry in zip(count(), entries):
        if entry.hash_ids and entry.block_tokens != block_size:
            raise ConfigError(f"the trace has blocks of {entry.block_tokens} tokens, the workers of {block_size}")
        if entry.arrival_s < last_s:
            raise ConfigError(f"request {index} of the trace arrives before its predecessor")
        last_s = entry.arrival_s
        num_tokens, output_tokens = max(1, entry.input_tokens), max(1, entry.output_tokens)
        names = _names(index, entry, num_tokens // block_size, known, parents)
        names += tuple(
            known.get(hash_id) or known.setdefault(hash_id, _name(hash_id)) for hash_id in outputs.get(index, ())
        )
        yield SimulatedRequest(
            index,
            entry.arrival_s,
            num_tokens,
            output_tokens,
            names,
            session=entry.session,
            tenant=tenants(entry.tenant),
            weight=weights.get(entry.tenant, 1.0),
        )


def _names(
    index: int, entry: TraceEntry, num_blocks: int, known: dict[int, bytes], parents: dict[int, int]
) -> tuple[bytes, ...]:
    ids = entry.hash_ids[:num_blocks]
    above = -1
    for hash_id in ids:
        if parents.setdefault(hash_id, above) != above:
            raise ConfigError(
                f"request {index} of the trace: hash id {hash_id} follows {above}, before it followed another"
            )
        above = hash_id
    named = [known.get(hash_id) or known.setdefault(hash_id, _name(hash_id)) for hash_id in ids]
    first = _PROMPT_NAME | index << 32
    return (*named, *(_name(first + place) for place in range(len(named), num_blocks)))


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
    worker_id: str

    def abort(self, attempt_id: str) -> None: ...


class SimulatedAttempt:
    """`id` is unique. flow: the transfer of its KV, when the prompt is computed on another worker than decodes it. Its
    15 attributes are a record of one try.
    """

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
