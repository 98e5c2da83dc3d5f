"""Synthetic chat: conversations over shared system prompts, and prompts that come once. Pure, seeded.

The same seed and settings give the same entries. Blocks have Mooncake's 512 tokens.
"""

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice

from kvrelay.cluster.workloads.trace import MOONCAKE_BLOCK_TOKENS, TraceEntry


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What the requests are like. Lengths are log-normal: median and sigma of the logarithm."""

    sessions_per_s: float = 1.0
    one_off_share: float = 0.4  # of sessions: one prompt, never continued
    first_continues: float = 0.55  # chance that a conversation's first answer gets a reply
    last_continues: float = 0.9  # what that chance grows to with the turns
    think_s: tuple[float, float] = (60.0, 1.0)
    user_tokens: tuple[float, float] = (400.0, 1.4)  # of each turn
    document_share: float = 0.3  # of first turns: with a document
    document_tokens: tuple[float, float] = (8000.0, 1.0)
    output_tokens: tuple[float, float] = (300.0, 0.8)
    num_apps: int = 20  # system prompts, the k-th asked for 1/k as often as the first
    system_tokens: tuple[float, float] = (1500.0, 0.8)
    max_input_tokens: int = 120_000
    tokens_per_s: float = 40.0  # how fast an answer is written, before its reader thinks
    seed: int = 0


class _Session:
    """One conversation: its prompt so far, and when its next request arrives."""

    def __init__(self, spec: SessionSpec, number: int, systems: list[int], start_s: float) -> None:
        self._spec = spec
        self._draw = random.Random(f"session:{spec.seed}:{number}")
        self._name = f"session-{number}"
        weights = [1 / rank for rank in range(1, spec.num_apps + 1)]
        self._app = self._draw.choices(range(spec.num_apps), weights)[0]
        self._shared_blocks = systems[self._app] // MOONCAKE_BLOCK_TOKENS
        self._is_one_off = self._draw.random() < spec.one_off_share
        self._tokens = systems[self._app] + self._user_tokens(is_first=True)
        self._ids: list[int] = []
        self._turn = 0
        self.at_s = start_s

    def _length(self, shape: tuple[float, float]) -> int:
        return max(1, round(self._draw.lognormvariate(math.log(shape[0]), shape[1])))

    def _user_tokens(self, *, is_first: bool = False) -> int:
        has_document = is_first and self._draw.random() < self._spec.document_share
        return self._length(self._spec.user_tokens) + (self._length(self._spec.document_tokens) if has_document else 0)

    def request(self, fresh: Iterator[int]) -> TraceEntry:
        self._tokens = min(self._tokens, self._spec.max_input_tokens)
        full, rest = divmod(self._tokens, MOONCAKE_BLOCK_TOKENS)
        while len(self._ids) < full:
            index = len(self._ids)
            shared = -(1 + self._app * 1000 + index)  # ids below 0: made positive when the trace is whole
            self._ids.append(shared if index < self._shared_blocks else next(fresh))
        ids = (*self._ids[:full], next(fresh)) if rest else tuple(self._ids[:full])
        self._output = self._length(self._spec.output_tokens)
        return TraceEntry(self.at_s, self._tokens, self._output, ids, session=self._name)

    def continues(self) -> bool:
        """Whether its reader replies; if so, `at_s` is when."""
        spec = self._spec
        chance = spec.last_continues + (spec.first_continues - spec.last_continues) * 0.7**self._turn
        if self._is_one_off or self._draw.random() >= chance or self._tokens >= spec.max_input_tokens:
            return False
        self._turn += 1
        thinks_s = self._draw.lognormvariate(math.log(spec.think_s[0]), spec.think_s[1])
        self.at_s += self._output / spec.tokens_per_s + thinks_s
        self._tokens += self._output + self._user_tokens()
        return True


def generate(spec: SessionSpec, num_requests: int) -> list[TraceEntry]:
    """The first `num_requests` requests, in order of arrival, which is to a millisecond."""
    draw = random.Random(f"sessions:{spec.seed}")
    systems = _system_lengths(spec, draw)
    fresh = count(0)
    entries = list(islice(_in_order(spec, systems, draw, fresh), num_requests))
    first_shared = next(fresh)
    shared = sorted({block for entry in entries for block in entry.hash_ids if block < 0}, reverse=True)
    names = {block: first_shared + index for index, block in enumerate(shared)}
    return [
        replace(
            entry,
            arrival_s=round(entry.arrival_s, 3),
            hash_ids=tuple(names.get(block, block) for block in entry.hash_ids),
        )
        for entry in entries
    ]


def _system_lengths(spec: SessionSpec, draw: random.Random) -> list[int]:
    median, sigma = spec.system_tokens
    return [min(round(draw.lognormvariate(math.log(median), sigma)), 500_000) for _ in range(spec.num_apps)]


def requests_per_session(spec: SessionSpec, num_sessions: int = 1000) -> float:
    """The mean over `num_sessions` sessions."""
    systems = _system_lengths(spec, random.Random(f"sessions:{spec.seed}"))
    sessions = [_Session(spec, number, systems, 0.0) for number in range(num_sessions)]
    num_requests = 0
    for session in sessions:
        session.request(count())
        num_requests += 1
        while session.continues():
            session.request(count())
            num_requests += 1
    return num_requests / num_sessions


def _in_order(spec: SessionSpec, systems: list[int], draw: random.Random, fresh: Iterator[int]) -> Iterator[TraceEntry]:
    due: list[tuple[float, int, _Session]] = []
    next_s, number = draw.expovariate(spec.sessions_per_s), 0
    while True:
        while not due or next_s <= due[0][0]:
            heapq.heappush(due, (next_s, number, _Session(spec, number, systems, next_s)))
            number += 1
            next_s += draw.expovariate(spec.sessions_per_s)
        _, index, session = due[0]
        yield session.request(fresh)
        if session.continues():
            heapq.heapreplace(due, (session.at_s, index, session))
        else:
            heapq.heappop(due)
