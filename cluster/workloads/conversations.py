"""Requests that continue each other, over shared system prompts: chats of readers, and tasks of agents. Pure.

The same spec gives the same requests. A conversation's prompts grow by its answers and what follows them. A task's
siblings begin with the whole prompt of their parent and arrive together; the parent continues when the last of them has
ended. Durations of answers are assumed. Blocks have Mooncake's 512 tokens.
"""

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice

from kvrelay.cluster.workloads.trace import MOONCAKE_BLOCK_TOKENS, GrowingPrompt, LogNormal, TraceEntry, drawn, length


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What chats are like."""

    starts_per_s: float = 1.0
    one_off_share: float = 0.4  # of sessions: one prompt, never continued
    first_continues: float = 0.55  # chance that a conversation's first answer gets a reply
    last_continues: float = 0.9  # what that chance grows to with the turns
    think_s: LogNormal = (60.0, 1.0)
    user_tokens: LogNormal = (400.0, 1.4)  # of each turn
    document_share: float = 0.3  # of first turns: with a document
    document_tokens: LogNormal = (8000.0, 1.0)
    output_tokens: LogNormal = (300.0, 0.8)
    num_apps: int = 20  # system prompts, the k-th asked for 1/k as often as the first
    system_tokens: LogNormal = (1500.0, 0.8)
    max_input_tokens: int = 120_000
    tokens_per_s: float = 40.0  # how fast an answer is written, before its reader thinks
    seed: int = 0


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """What agents' tasks are like."""

    starts_per_s: float = 0.1
    num_kinds: int = 8  # of agents: system prompts with tools, the k-th run 1/k as often as the first
    num_tenants: int = 4  # each with system prompts of its own; the k-th asks 1/k as often
    system_tokens: LogNormal = (6000.0, 0.4)
    task_tokens: LogNormal = (800.0, 1.0)
    mean_steps: float = 10.0  # geometric
    output_tokens: LogNormal = (120.0, 0.8)
    result_tokens: LogNormal = (600.0, 1.2)
    tool_s: LogNormal = (1.5, 1.0)
    fan_out_chance: float = 0.1  # of a step of a task; siblings do not split again
    fan_out: tuple[int, int] = (2, 6)
    sibling_steps: float = 4.0
    sibling_gap_s: float = 0.02
    first_token_s: float = 0.5
    tokens_per_s: float = 40.0
    max_input_tokens: int = 120_000
    seed: int = 0


Play = Callable[[int, float], list[TraceEntry]]
"""(number, when it starts) -> all requests of one conversation or task."""


def conversation_entries(spec: SessionSpec | AgentSpec, num_requests: int) -> list[TraceEntry]:
    """The first `num_requests` requests, in order of arrival, which is to a millisecond."""
    return list(islice(_in_order(spec), num_requests))


def requests_per_start(spec: SessionSpec | AgentSpec) -> float:
    """The mean number of requests of a conversation or task."""
    play, _ = _player(spec)
    num_starts = 1000 if isinstance(spec, SessionSpec) else 400
    return sum(len(play(number, 0.0)) for number in range(num_starts)) / num_starts


def _in_order(spec: SessionSpec | AgentSpec) -> Iterator[TraceEntry]:
    play, starts = _player(spec)
    due: list[tuple[float, int, TraceEntry]] = []
    tie, start_s = count(), 0.0
    for number in count():
        start_s += starts.expovariate(spec.starts_per_s)
        while due and due[0][0] <= start_s:
            yield heapq.heappop(due)[2]
        for entry in play(number, start_s):
            heapq.heappush(due, (entry.arrival_s, next(tie), entry))


def _player(spec: SessionSpec | AgentSpec) -> tuple[Play, random.Random]:
    """What makes its conversations, and what draws the gaps between their starts."""
    if isinstance(spec, SessionSpec):
        draw = random.Random(f"sessions:{spec.seed}")
        apps = _Systems([length(draw, spec.system_tokens) for _ in range(spec.num_apps)])
        return lambda number, start_s: _session(spec, number, apps, start_s), draw
    draw = random.Random(f"systems:{spec.seed}")
    kinds = _Systems([length(draw, spec.system_tokens) for _ in range(spec.num_kinds)])
    return lambda number, start_s: _Task(spec, number, kinds).play(start_s), random.Random(f"tasks:{spec.seed}")


class _Systems:
    """The system prompts that conversations share: whole blocks, made when first used."""

    def __init__(self, num_tokens: list[int]) -> None:
        self._num_tokens, self._fresh = num_tokens, count()
        self._ids: dict[tuple[int, int], tuple[int, ...]] = {}

    def prompt(self, kind: int, tenant: int = 0) -> tuple[GrowingPrompt, int]:
        """And how many tokens it has, of which the last block, if it is not full, is not shared."""
        if (kind, tenant) not in self._ids:
            num_blocks = self._num_tokens[kind] // MOONCAKE_BLOCK_TOKENS
            self._ids[kind, tenant] = tuple(islice(self._fresh, num_blocks))
        return GrowingPrompt(self._fresh, self._ids[kind, tenant]), self._num_tokens[kind]


def _zipf(draw: random.Random, size: int) -> int:
    return draw.choices(range(size), [1 / rank for rank in range(1, size + 1)])[0]


def _session(spec: SessionSpec, number: int, apps: _Systems, at_s: float) -> list[TraceEntry]:
    """One reader's conversation."""
    draw = random.Random(f"session:{spec.seed}:{number}")
    prompt, num_tokens = apps.prompt(_zipf(draw, spec.num_apps))
    continues = 0.0 if draw.random() < spec.one_off_share else spec.first_continues
    has_document = draw.random() < spec.document_share
    num_tokens += length(draw, spec.user_tokens) + (length(draw, spec.document_tokens) if has_document else 0)
    entries: list[TraceEntry] = []
    while True:
        num_tokens = min(num_tokens, spec.max_input_tokens)
        num_output = length(draw, spec.output_tokens)
        ids = prompt.ids(num_tokens)
        entries.append(TraceEntry(round(at_s, 3), num_tokens, num_output, ids, session=f"session-{number}"))
        if not continues or draw.random() >= continues or num_tokens >= spec.max_input_tokens:
            return entries
        continues = spec.last_continues - 0.7 * (spec.last_continues - continues)
        at_s += num_output / spec.tokens_per_s + drawn(draw, spec.think_s)
        num_tokens += num_output + length(draw, spec.user_tokens)


@dataclass(slots=True)
class _Loop:
    """One agent between two calls: what its next prompt is, and when."""

    prompt: GrowingPrompt
    num_tokens: int
    at_s: float


class _Task:
    """One task with all its siblings, played to its end."""

    def __init__(self, spec: AgentSpec, number: int, systems: _Systems) -> None:
        self._spec, self._draw, self._number = spec, random.Random(f"agent:{spec.seed}:{number}"), number
        kind, tenant = _zipf(self._draw, spec.num_kinds), _zipf(self._draw, spec.num_tenants)
        self._tenant, self._first = f"tenant-{tenant}", systems.prompt(kind, tenant)
        self._entries: list[TraceEntry] = []

    def play(self, start_s: float) -> list[TraceEntry]:
        prompt, system_tokens = self._first
        loop = _Loop(prompt, system_tokens + length(self._draw, self._spec.task_tokens), start_s)
        self._run(loop, self._spec.mean_steps, "", may_split=True)
        return self._entries

    def _run(self, loop: _Loop, mean_steps: float, name: str, *, may_split: bool) -> int:
        """Run the loop to its end; returns the length of its last answer."""
        spec, draw = self._spec, self._draw
        num_output, num_steps = 0, 1
        while draw.random() > 1 / mean_steps:
            num_steps += 1
        for _ in range(num_steps):
            if loop.num_tokens > spec.max_input_tokens:
                break
            num_output = self._call(loop, name)
            loop.num_tokens += num_output
            if may_split and draw.random() < spec.fan_out_chance:
                self._split(loop)
            else:
                loop.num_tokens += length(draw, spec.result_tokens)
                loop.at_s += drawn(draw, spec.tool_s)
        return num_output

    def _call(self, loop: _Loop, name: str) -> int:
        num_output, ids = length(self._draw, self._spec.output_tokens), loop.prompt.ids(loop.num_tokens)
        session = f"task-{self._number}{name}"
        entry = TraceEntry(round(loop.at_s, 3), loop.num_tokens, num_output, ids, session=session, tenant=self._tenant)
        self._entries.append(entry)
        loop.at_s += self._spec.first_token_s + num_output / self._spec.tokens_per_s
        return num_output

    def _split(self, parent: _Loop) -> None:
        """Siblings run concurrently; their last answers become the parent's next input."""
        spec, start_s = self._spec, parent.at_s
        parent.prompt.ids(parent.num_tokens)  # its blocks so far are the siblings', too
        for index in range(self._draw.randint(*spec.fan_out)):
            num_tokens = parent.num_tokens + length(self._draw, spec.task_tokens) // 4 + 1
            sibling = _Loop(parent.prompt.branch(), num_tokens, start_s + index * spec.sibling_gap_s)
            answer = self._run(sibling, spec.sibling_steps, f"-{len(self._entries)}", may_split=False)
            parent.num_tokens += answer
            parent.at_s = max(parent.at_s, sibling.at_s)
