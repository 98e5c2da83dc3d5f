"""Agents: loops over tool calls behind shared system prompts, which at times fan out into siblings. Pure, seeded.

A task's prompts grow by the model's output and the tool's result. Siblings begin with the whole prompt of their parent
and arrive together; the parent continues when the last of them has ended. Durations of answers are assumed.
"""

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

from kvrelay.cluster.workloads.trace import MOONCAKE_BLOCK_TOKENS, GrowingPrompt, TraceEntry

LogNormal = tuple[float, float]
"""Median, and sigma of the logarithm."""


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """What the tasks are like. Tokens and seconds."""

    tasks_per_s: float = 0.1
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


@dataclass(slots=True)
class _Loop:
    """One agent between two calls: what its next prompt is, and when."""

    prompt: GrowingPrompt
    num_tokens: int
    at_s: float


class _Task:
    """One task with all its siblings, played to its end."""

    def __init__(self, spec: AgentSpec, number: int, systems: "_Systems", fresh: Iterator[int]) -> None:
        self._spec, self._draw, self._number = spec, random.Random(f"agent:{spec.seed}:{number}"), number
        kind = _zipf(self._draw, spec.num_kinds)
        tenant = _zipf(self._draw, spec.num_tenants)
        self._tenant = f"tenant-{tenant}"
        self._first = systems.prompt(tenant, kind, fresh)
        self.entries: list[TraceEntry] = []

    def play(self, start_s: float) -> None:
        prompt, system_tokens = self._first
        loop = _Loop(prompt, system_tokens + self._length(self._spec.task_tokens), start_s)
        self._run(loop, self._spec.mean_steps, "", may_split=True)

    def _run(self, loop: _Loop, mean_steps: float, name: str, *, may_split: bool) -> int:
        """Run the loop to its end; returns the length of its last answer."""
        spec, draw = self._spec, self._draw
        num_output = 0
        for _ in range(_geometric(draw, mean_steps)):
            if loop.num_tokens > spec.max_input_tokens:
                break
            num_output = self._call(loop, name)
            loop.num_tokens += num_output
            if may_split and draw.random() < spec.fan_out_chance:
                self._split(loop)
            else:
                loop.num_tokens += self._length(spec.result_tokens)
                loop.at_s += draw.lognormvariate(math.log(spec.tool_s[0]), spec.tool_s[1])
        return num_output

    def _call(self, loop: _Loop, name: str) -> int:
        spec = self._spec
        num_output = self._length(spec.output_tokens)
        self.entries.append(
            TraceEntry(
                round(loop.at_s, 3),
                loop.num_tokens,
                num_output,
                loop.prompt.ids(loop.num_tokens),
                session=f"task-{self._number}{name}",
                tenant=self._tenant,
            )
        )
        loop.at_s += spec.first_token_s + num_output / spec.tokens_per_s
        return num_output

    def _split(self, parent: _Loop) -> None:
        """Siblings run concurrently; their last answers become the parent's next input."""
        spec, start_s = self._spec, parent.at_s
        parent.prompt.ids(parent.num_tokens)  # its blocks so far are the siblings', too
        for index in range(self._draw.randint(*spec.fan_out)):
            sibling = _Loop(
                parent.prompt.branch(),
                parent.num_tokens + self._length(spec.task_tokens) // 4 + 1,
                start_s + index * spec.sibling_gap_s,
            )
            answer = self._run(sibling, spec.sibling_steps, f"-{len(self.entries)}", may_split=False)
            parent.num_tokens += answer
            parent.at_s = max(parent.at_s, sibling.at_s)

    def _length(self, shape: LogNormal) -> int:
        return max(1, round(self._draw.lognormvariate(math.log(shape[0]), shape[1])))


class _Systems:
    """The system prompts that agents share: whole blocks, made when first used."""

    def __init__(self, spec: AgentSpec) -> None:
        draw = random.Random(f"systems:{spec.seed}")
        self._tokens = [
            max(1, round(draw.lognormvariate(math.log(spec.system_tokens[0]), spec.system_tokens[1])))
            for _ in range(spec.num_kinds)
        ]
        self._ids: dict[tuple[int, int], tuple[int, ...]] = {}

    def prompt(self, tenant: int, kind: int, fresh: Iterator[int]) -> tuple[GrowingPrompt, int]:
        """And how many tokens it has, of which the last block, if it is not full, is not shared."""
        num_blocks = self._tokens[kind] // MOONCAKE_BLOCK_TOKENS
        if (tenant, kind) not in self._ids:
            self._ids[tenant, kind] = tuple(islice(fresh, num_blocks))
        return GrowingPrompt(fresh, self._ids[tenant, kind]), self._tokens[kind]


def _zipf(draw: random.Random, size: int) -> int:
    return draw.choices(range(size), [1 / rank for rank in range(1, size + 1)])[0]


def _geometric(draw: random.Random, mean: float) -> int:
    """At least 1."""
    steps = 1
    while draw.random() > 1 / mean:
        steps += 1
    return steps


def agent_entries(spec: AgentSpec, num_requests: int) -> list[TraceEntry]:
    """The first `num_requests` requests, in order of arrival."""
    return list(islice(_in_order(spec), num_requests))


def requests_per_task(spec: AgentSpec, num_tasks: int = 400) -> float:
    """The mean over `num_tasks` tasks."""
    systems, fresh = _Systems(spec), count()
    tasks = [_Task(spec, number, systems, fresh) for number in range(num_tasks)]
    for task in tasks:
        task.play(0.0)
    return sum(len(task.entries) for task in tasks) / num_tasks


def _in_order(spec: AgentSpec) -> Iterator[TraceEntry]:
    arrivals, systems, fresh, tie = random.Random(f"tasks:{spec.seed}"), _Systems(spec), count(), count()
    due: list[tuple[float, int, TraceEntry]] = []
    start_s = 0.0
    for number in count():
        start_s += arrivals.expovariate(spec.tasks_per_s)
        while due and due[0][0] <= start_s:
            yield heapq.heappop(due)[2]
        task = _Task(spec, number, systems, fresh)
        task.play(start_s)
        for entry in task.entries:
            heapq.heappush(due, (entry.arrival_s, next(tie), entry))
