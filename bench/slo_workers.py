"""Prefill and decode workers in virtual time, for bench/slo.py. They alone are modelled: what they tell is the product's wire.

A prompt token costs `token_s`, and `pair_s` for each token that it attends to; a decode step costs `step_s`, `sequence_s` for
each sequence and `context_s` for each token of KV that it reads: roughly a 70B model on eight GPUs. Left out: pre-emption,
prompts computed by decode workers, lower tiers, failures.
"""

import heapq
import itertools
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.plane.messages import KvEvents, KvSnapshot, LoadReport, Timings, WorkerInfo
from kvrelay.router.decision.router import Router
from kvrelay.types import Fingerprint

BLOCK_TOKENS = 512
KV_BYTES_PER_TOKEN = 320 << 10
REPORT_S = 0.1  # at most so often
FINGERPRINT = Fingerprint(1, "m", "bfloat16", BLOCK_TOKENS, 2, 2, 8, "seed")


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of every worker; `noise` is the sigma of the logarithm of each prompt's, and each step's, own factor."""

    token_s: float = 1 / 9000
    pair_s: float = 1 / 9000 / 40000
    chunk_tokens: int = 2048
    cache_tokens: int = 1_000_000
    step_s: float = 0.012
    sequence_s: float = 0.0003
    context_s: float = 1e-7
    pool_tokens: int = 1_500_000
    max_running: int = 256
    link_bytes_per_s: float = 20e9
    reserve_timeout_s: float = 10.0
    noise: float = 0.05


class Clock:
    """Events in order of time; equal times in order of their making."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), call))

    def step(self) -> bool:
        """One event. False when there is none."""
        if not self._events:
            return False
        self.now_s, _, call = heapq.heappop(self._events)
        call()
        return True


@dataclass(slots=True, eq=False)
class Job:
    """One request, and what became of it."""

    index: int
    arrival_s: float
    num_tokens: int
    output_tokens: int
    hashes: tuple[bytes, ...]
    outcome: str = "running"  # done, slo (refused), full
    first_s: float = 0.0
    end_s: float = 0.0
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    remaining: int = 0  # prompt tokens, at the prefill worker
    cached: int = 0
    queued_s: float = 0.0
    started_s: float = -1.0
    factor: float = 1.0

    @property
    def id(self) -> str:
        return f"r{self.index}"

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        return (self.end_s - self.first_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


def info(worker_id: str, role: str, pool_tokens: int, max_running: int) -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker_id, role=role, epoch="e", host="h", port=1, node_id="n", model="m", fingerprint=FINGERPRINT,
        block_size=BLOCK_TOKENS, num_blocks=pool_tokens // BLOCK_TOKENS, max_model_len=1 << 20, max_running=max_running,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN, device="model", transports=["shm"],
    )  # fmt: skip


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else 0.8 * old + 0.2 * new


class PrefillModel:
    """One prompt at a time, in chunks, first come first served, with a prefix cache of its own."""

    def __init__(
        self, worker_id: str, router: Router, clock: Clock, speeds: Speeds, done: Callable[[Job, Timings], None]
    ) -> None:
        self.id, self._router, self._clock, self._speeds, self._done = worker_id, router, clock, speeds, done
        self._queue: deque[Job] = deque()
        self._cache: OrderedDict[bytes, None] = OrderedDict()
        self._queued_tokens, self._rate, self._seq, self._events = 0, 0.0, 0, 0
        router.worker_up(info(worker_id, "prefill", speeds.cache_tokens, 64))
        router.apply_snapshot(worker_id, KvSnapshot(seq=0, hashes=[]))
        self._report()

    def submit(self, job: Job) -> None:
        job.queued_s, job.remaining = self._clock.now_s, job.num_tokens
        self._queued_tokens += job.num_tokens
        self._queue.append(job)
        if len(self._queue) == 1:
            self._chunk()

    def _chunk(self) -> None:
        job, now_s = self._queue[0], self._clock.now_s
        if job.started_s < 0:
            job.started_s = now_s
            matched = len(list(itertools.takewhile(self._cache.__contains__, job.hashes)))
            job.cached = min(matched * BLOCK_TOKENS, (job.num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
            self._queued_tokens -= job.cached
            job.remaining -= job.cached
        take = min(job.remaining, self._speeds.chunk_tokens)
        context = job.num_tokens - job.remaining + take / 2
        seconds = (0.004 + take * (self._speeds.token_s + context * self._speeds.pair_s)) * job.factor
        self._clock.at(now_s + seconds, lambda: self._after(job, take, seconds))

    def _after(self, job: Job, take: int, seconds: float) -> None:
        job.remaining -= take
        self._queued_tokens -= take
        if take >= 64:
            self._rate = _blend(self._rate, take / seconds)
        if not job.remaining:
            self._queue.popleft()
            self._store(job.hashes)
            now_s = self._clock.now_s
            self._done(
                job, Timings(queue_s=job.started_s - job.queued_s, compute_s=now_s - job.started_s, num_chunks=1)
            )
        self._report()
        if self._queue:
            self._chunk()

    def _store(self, hashes: tuple[bytes, ...]) -> None:
        stored = [digest for digest in hashes if digest not in self._cache]
        for digest in reversed(hashes):  # a chain's beginning is the youngest: it goes last
            self._cache[digest] = None
            self._cache.move_to_end(digest)
        removed = []
        while len(self._cache) > self._speeds.cache_tokens // BLOCK_TOKENS:
            removed.append(self._cache.popitem(last=False)[0])
        self._events += 1
        self._router.apply_events(self.id, KvEvents(seq=self._events, stored=stored, removed=removed))

    def _report(self) -> None:
        self._seq += 1
        total = self._speeds.cache_tokens // BLOCK_TOKENS
        report = LoadReport(
            seq=self._seq, running=min(1, len(self._queue)), waiting=max(0, len(self._queue) - 1), free_blocks=total,
            total_blocks=total, queued_tokens=self._queued_tokens, prefill_tokens_per_s=self._rate,
        )  # fmt: skip
        self._router.apply_load(self.id, report, self._clock.now_s)


@dataclass(slots=True)
class DecodeModel:
    """Continuous batching: every running sequence gets a token at each step."""

    id: str
    router: Router
    clock: Clock
    speeds: Speeds
    done: Callable[[Job], None]
    rng: random.Random
    _line: deque[tuple[Job, Callable[[], None], float]] = field(default_factory=deque)
    _ends: list[tuple[int, int, Job]] = field(default_factory=list)  # by the step after which it is over
    _steps: int = 0
    _context: int = 0  # tokens of running sequences
    _reserved: int = 0  # tokens of those on their way
    _receiving: int = 0
    _is_stepping: bool = False
    _decode_step_s: float = 0.0
    _seq: int = 0
    _reported_s: float = -1.0
    _moved_bytes: int = 0

    def start(self) -> None:
        self.router.worker_up(info(self.id, "decode", self.speeds.pool_tokens, self.speeds.max_running))
        self.router.apply_snapshot(self.id, KvSnapshot(seq=0, hashes=[]))
        self._report()

    def reserve(self, job: Job, granted: Callable[[], None], refused: Callable[[], None]) -> None:
        """Room for the prompt, now or in line; `refused` when it took too long."""
        entry = (job, granted, self.clock.now_s)
        self._line.append(entry)
        self._grant()
        if entry in self._line:
            self.clock.at(self.clock.now_s + self.speeds.reserve_timeout_s, lambda: self._give_up(entry, refused))

    def _give_up(self, entry: tuple[Job, Callable[[], None], float], refused: Callable[[], None]) -> None:
        if entry in self._line:
            self._line.remove(entry)
            refused()

    def _grant(self) -> None:
        while self._line and self._context + self._reserved + self._line[0][0].num_tokens < self.speeds.pool_tokens:
            job, granted, _ = self._line.popleft()
            self._reserved += job.num_tokens
            self._receiving += 1
            granted()

    def join(self, job: Job) -> None:
        """Its KV is here; the first of its tokens is out already."""
        self._reserved -= job.num_tokens
        self._receiving -= 1
        self._moved_bytes += job.num_tokens * KV_BYTES_PER_TOKEN
        if job.output_tokens == 1:
            self._end(job)
            return
        self._context += job.num_tokens
        heapq.heappush(self._ends, (self._steps + job.output_tokens - 1 + self._is_stepping, job.index, job))
        if not self._is_stepping:
            self._begin_step()

    def _begin_step(self) -> None:
        self._is_stepping, speeds, num_running = True, self.speeds, len(self._ends)
        seconds = speeds.step_s + num_running * speeds.sequence_s + self._context * speeds.context_s
        seconds *= math.exp(self.rng.gauss(0, speeds.noise))
        self.clock.at(self.clock.now_s + seconds, lambda: self._end_step(seconds))

    def _end_step(self, seconds: float) -> None:
        self._steps += 1
        self._is_stepping = False
        self._context += len(self._ends)
        self._decode_step_s = _blend(self._decode_step_s, seconds)
        while self._ends and self._ends[0][0] <= self._steps:
            job = heapq.heappop(self._ends)[2]
            self._context -= job.num_tokens + job.output_tokens
            self._end(job)
        self._context = max(0, self._context) if self._ends else 0
        if self.clock.now_s - self._reported_s >= REPORT_S:
            self._report()
        if self._ends and not self._is_stepping:
            self._begin_step()

    def _end(self, job: Job) -> None:
        job.end_s = self.clock.now_s
        self.done(job)
        self._grant()

    def _report(self) -> None:
        self._seq += 1
        self._reported_s = self.clock.now_s
        total = self.speeds.pool_tokens // BLOCK_TOKENS
        used = min(total, (self._context + self._reserved) // BLOCK_TOKENS)
        report = LoadReport(
            seq=self._seq, running=len(self._ends), waiting=len(self._line), receiving=self._receiving,
            free_blocks=total - used, used_blocks=used, total_blocks=total, decode_step_s=self._decode_step_s,
            kv_bytes=self._moved_bytes, kv_seconds=self._moved_bytes / self.speeds.link_bytes_per_s,
        )  # fmt: skip
        self.router.apply_load(self.id, report, self.clock.now_s)
