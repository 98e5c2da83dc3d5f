"""A cluster under a day's load, request by request: a queue of prefill workers, decode workers that share steps. For bench/planner_queue.py.

No second model of speed: service times are the speed curve's. Prompts wait in one line (as if the router always found the first free
worker); sequences are spread evenly over the decode workers and all advance by a token in a step. Workers take a while to start and
finish what they have before they stop; both are paid for. Caches, the network and misplacement are not in it.
"""

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field

from kvrelay.router.planning.capacity import context_of, prompts_of, room_of
from kvrelay.router.planning.types import Counts, Interval, Target, WorkerModel, Workload

LOOK_S = 10.0


@dataclass(frozen=True)
class Day:
    """A load that rises and falls, with two rushes and noise. Seconds; the shape is a day's, `length_s` long."""

    length_s: float
    shape: Workload  # its rate is the top of the usual day
    days: int
    seed: int

    def rate(self, now_s: float) -> float:
        """Requests per s, without the noise."""
        hour = now_s / self.length_s * 24 % 24
        usual = 0.15 + 0.85 * math.sin(math.pi * hour / 24) ** 4 * (1.0 - 0.25 * math.exp(-((hour - 12.5) ** 2) / 0.5))
        rush = 1.6 if 9.0 <= hour < 9.5 or 15.0 <= hour < 15.25 else 1.0
        return self.shape.rate * usual * rush

    def arrivals(self) -> list[tuple[float, int]]:
        """(time, index of the prompt's length among the model's points): Poisson within minutes that are 15 % off, as they come."""
        draw, times = random.Random(f"day:{self.seed}"), []
        minute = 0.0
        while minute < self.days * self.length_s:
            noise = draw.gammavariate(1 / 0.15**2, 0.15**2)
            at = minute
            while (at := at + draw.expovariate(max(self.rate(minute) * noise, 1e-9))) < minute + 60.0:
                times.append((at, draw.randrange(8)))
            minute += 60.0
        return times


@dataclass
class Outcome:
    """What came of a run. Worker-seconds are paid from a worker's start until it is gone."""

    served: int = 0
    good: int = 0
    worker_s: float = 0.0
    changes: list[int] = field(default_factory=lambda: [0, 0])
    turns: list[int] = field(default_factory=lambda: [0, 0])
    most: int = 0

    @property
    def kept(self) -> float:
        return self.good / max(self.served, 1)

    @property
    def good_per_worker_hour(self) -> float:
        return self.good / (self.worker_s / 3600)


class Cluster:
    """Runs one load under one way of choosing counts: `decide(interval, now_s) -> Counts` at every look."""

    def __init__(self, model: WorkerModel, target: Target, day: Day, start: Counts, *, startup_s: float) -> None:
        self.model, self.target, self.day, self.startup_s = model, target, day, startup_s
        self.prompt_s = prompts_of(day.shape, model.prefill, model.token_budget).alone_s
        self.context, self.room = context_of(day.shape), room_of(day.shape, model, target)
        self.draw = random.Random(f"outputs:{day.seed}")
        self.events: list[tuple[float, int, str, object]] = []
        self.number = 0
        self.line: deque[tuple[float, int]] = deque()
        self.free, self.busy = start.prefill, 0
        self.surplus = 0  # prefill workers that stop when they are done
        self.decoding = start.decode
        self.tokens_out, self.tokens_at = 0.0, 0.0  # of each sequence, since the beginning; and when
        self.ends: list[
            tuple[float, float, float, float]
        ] = []  # (tokens_out at the end, first token, ttft, its tokens)
        self.waiting: deque[tuple[float, float]] = deque()  # prefilled, no room
        self.version = 0
        self.counts, self.paid, self.paid_at = start, start.total, 0.0
        self.starting = 0
        self.outcome = Outcome(most=start.total)
        self.last_direction = [0, 0]
        self.seen = dict.fromkeys(("arrivals", "output", "ended", "firsts", "in_time", "tpot", "tpot_kept"), 0)
        self.measure_from = 0.0

    def run(self, decide, *, measure_from: float = 0.0) -> Outcome:
        self.measure_from = measure_from
        for at, size in self.day.arrivals():
            self._push(at, "arrival", size)
        looks = int(self.day.days * self.day.length_s / LOOK_S)
        for look in range(1, looks + 1):
            self._push(look * LOOK_S, "look", look)
        while self.events:
            now, _, kind, what = heapq.heappop(self.events)
            self._pay(now)
            if kind == "look":
                self._apply(decide(self._interval(now), now), now)
            else:
                getattr(self, f"_on_{kind}")(now, what)
        return self.outcome

    def _push(self, at: float, kind: str, what: object) -> None:
        self.number += 1
        heapq.heappush(self.events, (at, self.number, kind, what))

    def _pay(self, now: float) -> None:
        if now > self.measure_from:
            self.outcome.worker_s += self.paid * (now - max(self.paid_at, self.measure_from))
        self.paid_at = now

    # ---- prefill

    def _on_arrival(self, now: float, size: int) -> None:
        self.seen["arrivals"] += 1
        self.line.append((now, size))
        self._begin(now)

    def _begin(self, now: float) -> None:
        while self.free and self.line:
            arrived, size = self.line.popleft()
            self.free, self.busy = self.free - 1, self.busy + 1
            self._push(now + self.prompt_s[size], "prefilled", arrived)

    def _on_prefilled(self, now: float, arrived: float) -> None:
        self.busy -= 1
        if self.surplus:
            self.surplus, self.paid = self.surplus - 1, self.paid - 1
        else:
            self.free += 1
        self._begin(now)
        self.seen["firsts"] += 1
        self.seen["in_time"] += now - arrived <= self.target.ttft_s
        self.waiting.append((now, now - arrived))
        self._admit(now)

    # ---- decode: one batch, spread over the workers

    def _step_s(self) -> float:
        batch = len(self.ends) / max(self.decoding, 1)
        curve = self.model.decode
        return (
            curve.overhead_s + max(curve.weights_s, batch * curve.token_s)
            + batch * (self.context * curve.context_s + curve.sequence_s)
        )  # fmt: skip

    def _advance(self, now: float) -> None:
        """Tokens that each sequence has had until now. To be called before the batch or the workers change."""
        self.tokens_out += (now - self.tokens_at) / self._step_s()
        self.tokens_at = now

    def _next_end(self) -> None:
        self.version += 1
        if self.ends:
            left = max(self.ends[0][0] - self.tokens_out, 0.0)
            self._push(self.tokens_at + left * self._step_s(), "end", self.version)

    def _admit(self, now: float) -> None:
        self._advance(now)
        while self.waiting and len(self.ends) < self.room * self.decoding:
            first, ttft = self.waiting.popleft()
            tokens = max(1.0, self.draw.expovariate(1 / self.day.shape.output_tokens))
            heapq.heappush(self.ends, (self.tokens_out + tokens, first, ttft, tokens))
        self._next_end()

    def _on_end(self, now: float, version: int) -> None:
        if version != self.version:
            return
        self._advance(now)
        while self.ends and self.ends[0][0] <= self.tokens_out + 1e-6:
            _, first, ttft, tokens = heapq.heappop(self.ends)
            tpot_s = (now - first) / tokens
            self.seen["ended"] += 1
            self.seen["output"] += round(tokens)
            self.seen["tpot"] += 1
            self.seen["tpot_kept"] += tpot_s <= self.target.tpot_s
            if first - ttft >= self.measure_from:
                self.outcome.served += 1
                self.outcome.good += ttft <= self.target.ttft_s and tpot_s <= self.target.tpot_s
        self._admit(now)

    # ---- counts

    def _interval(self, now: float) -> Interval:
        seen, self.seen = self.seen, dict.fromkeys(self.seen, 0)
        shape = self.day.shape
        squares = seen["arrivals"] * shape.input_tokens**2 * (1 + shape.input_cv2)
        return Interval(
            now - LOOK_S, now, seen["arrivals"], round(seen["arrivals"] * shape.input_tokens), squares,
            round(seen["arrivals"] * shape.input_tokens * shape.cached_share), seen["ended"], seen["output"],
            queued=len(self.line), ttft_kept=seen["in_time"] / seen["firsts"] if seen["firsts"] else None,
            tpot_kept=seen["tpot_kept"] / seen["tpot"] if seen["tpot"] else None, first_tokens=seen["firsts"],
            is_changing=self.starting > 0 or self.surplus > 0,
        )  # fmt: skip

    def _apply(self, wanted: Counts, now: float) -> None:
        for role, (new, old) in enumerate(zip(wanted, self.counts, strict=True)):
            if new == old:
                continue
            direction = 1 if new > old else -1
            if now >= self.measure_from:
                self.outcome.changes[role] += 1
                self.outcome.turns[role] += self.last_direction[role] == -direction
            self.last_direction[role] = direction
            if new > old:
                self.paid, self.starting = self.paid + new - old, self.starting + new - old
                self._push(now + self.startup_s, "up", (role, new - old))
            elif role == 0:
                for _ in range(old - new):
                    if self.free:
                        self.free, self.paid = self.free - 1, self.paid - 1
                    else:
                        self.surplus += 1
            else:
                residence = self.day.shape.output_tokens * self._step_s()
                self._push(now + residence, "down", old - new)
        self.counts = wanted
        self.outcome.most = max(self.outcome.most, wanted.total)

    def _on_up(self, now: float, what: tuple[int, int]) -> None:
        role, count = what
        self.starting -= count
        if role == 0:
            kept = min(count, self.surplus)  # whoever was to stop is told to stay
            self.surplus, self.paid = self.surplus - kept, self.paid - kept
            self.free += count - kept
            self._begin(now)
        else:
            self._advance(now)
            self.decoding += count
            self._admit(now)

    def _on_down(self, now: float, count: int) -> None:
        self._advance(now)
        self.decoding, self.paid = self.decoding - count, self.paid - count
        self._next_end()
