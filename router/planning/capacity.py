"""How much load a number of workers carries within its targets: queues for prefill, batches for decode. Pure.

Prefill is a queue with several servers (G/G/c): the probability of waiting is Sakasegawa's approximation ("An
approximation formula Lq = a rho^b / (1 - rho)", 1977), the mean wait Allen and Cunneen's (Allen, "Probability,
Statistics, and Queueing Theory", 1990; Kingman's for one server, 1961), and waits are assumed exponential beyond it.
Decode is a batch: as many sequences as arrive during one's stay (Little), and room for the swings of their number:
quantile `PlanningTarget.share` of a Poisson number, widened by the arrivals' burstiness. An aggregated worker does both
in the same steps, each lengthening the other.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from kvrelay.router.planning.types import PlanningTarget, SpeedCurve, StepWork, WorkerModel, Workload, pairs_of

FULLEST = 0.95  # utilisation of prefill that is planned for, at most
LINK_SHARE = 0.8  # of the network's bandwidth that is planned for
EXPOSED_SHARE = 0.25  # of a transfer, exposed after the prefill: workers announce a quarter of the layers at a time
POINTS = 8  # prompt lengths that represent all
LONGEST_TOKENS = 1 << 20
_STEPS = 40  # of a bisection, and of a fixed-point iteration
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prefill work of prompts on a worker that computes nothing else. Points stand for equal shares of the prompts."""

    alone_s: tuple[float, ...]  # seconds of a prompt alone, at each point
    work_s: float  # mean, with full chunks because others wait
    work_cv2: float
    computed_tokens: float  # mean, uncached
    pairs: float  # mean number of (token, earlier token) pairs

    @property
    def mean_s(self) -> float:
        return sum(self.alone_s) / len(self.alone_s)


def prompts_of(load: Workload, curve: SpeedCurve, token_budget: int) -> Prompts:
    """The prompts of this load on a worker with this speed."""
    return _prompts_of(load.at(0.0), curve, token_budget)


@lru_cache(maxsize=256)
def _prompts_of(load: Workload, curve: SpeedCurve, token_budget: int) -> Prompts:
    """Independent of the rate; cached, because searches repeat."""
    lengths = spread(load.input_tokens, load.input_cv2)
    cached = [min(length - 1, length * load.cached_share) for length in lengths]
    computed = [length - hit for length, hit in zip(lengths, cached, strict=True)]
    pairs = list(map(pairs_of, computed, cached))
    full_s = curve.step_s(StepWork(token_budget)) / token_budget
    alone = tuple(curve.prefill_s(length, hit, token_budget) for length, hit in zip(lengths, cached, strict=True))
    work = [own * full_s + area * curve.pair_s for own, area in zip(computed, pairs, strict=True)]
    mean = sum(work) / len(work)
    cv2 = sum((one / mean - 1) ** 2 for one in work) / len(work) if mean > 0 else 0.0
    return Prompts(alone, mean, cv2, sum(computed) / len(computed), sum(pairs) / len(pairs))


def spread(mean: float, cv2: float) -> tuple[float, ...]:
    """POINTS lengths, quantiles of a log-normal distribution with this mean; at least one token."""
    sigma = math.sqrt(math.log1p(max(cv2, 0.0)))
    raw = [math.exp(sigma * _NORMAL.inv_cdf((index + 0.5) / POINTS)) for index in range(POINTS)]
    factor = mean * POINTS / sum(raw)
    return tuple(min(max(one * factor, 1.0), LONGEST_TOKENS) for one in raw)


@dataclass(frozen=True, slots=True)
class Wait:
    """A queue with several servers: the probability of waiting, and the mean wait of those that wait."""

    chance: float
    mean_s: float

    def beyond(self, seconds: float) -> float:
        """Share that waits longer."""
        if seconds < 0:
            return 1.0
        return self.chance * math.exp(-seconds / self.mean_s) if self.mean_s > 0 else 0.0


def wait_of(work_s: float, work_cv2: float, rate: float, burstiness: float, servers: int) -> Wait | None:
    """The wait; None: the load exceeds the capacity."""
    busy = rate * work_s / servers
    if busy >= FULLEST:
        return None
    chance = busy ** (math.sqrt(2.0 * (servers + 1)) - 1.0) if busy > 0 else 0.0
    return Wait(chance, (burstiness + work_cv2) / 2.0 * work_s / (servers * (1.0 - busy)))


def missed_share(alone_s: tuple[float, ...], wait: Wait, ttft_s: float) -> float:
    """Share of prompts whose wait and computation exceed ttft_s."""
    return sum(wait.beyond(ttft_s - own) for own in alone_s) / len(alone_s)


def hopeless_share(alone_s: tuple[float, ...], ttft_s: float) -> float:
    """Share of prompts that miss the target with an empty queue: no number of workers helps these."""
    return sum(own > ttft_s for own in alone_s) / len(alone_s)


def allowed_share(prompts: "Prompts | Mixed", target: PlanningTarget) -> float:
    """Share of misses that is planned for. Where hopeless prompts use it up, waiting may add a quarter of it."""
    missing = 1.0 - target.share
    return max(missing, hopeless_share(prompts.alone_s, target.ttft_s) + missing / 4)


def prefill_fits(load: Workload, model: WorkerModel, target: PlanningTarget, workers: int) -> bool:
    """Whether so many prefill workers meet the TTFT target and their links carry the KV."""
    if load.rate * load.input_tokens * model.kv_bytes_per_token > LINK_SHARE * model.link_bytes_per_s * workers:
        return False
    return _ttft_fits(prompts_of(load, model.prefill, model.token_budget), load, target, workers)


def refused_share(prompts: "Prompts | Mixed", load: Workload, target: PlanningTarget, workers: int) -> float:
    """Share of prompts that are refused because their first token would be late, so that no other waits longer.

    The queue's work is taken as a Brownian motion between none and the longest wait in time (Harrison, "Brownian Motion
    and Stochastic Flow Systems", 1985).
    """
    timely = [own for own in prompts.alone_s if own <= target.ttft_s]
    share = 1.0 - hopeless_share(prompts.alone_s, target.ttft_s)
    busy = load.rate * share * prompts.work_s / workers
    if not busy:
        return 1.0 - share
    longest_s = target.ttft_s - sum(timely) / len(timely) + prompts.work_s / workers  # the last one may exceed it
    variance_s = max(busy * prompts.work_s / workers * (load.burstiness + prompts.work_cv2), 1e-9)  # of a second's work
    depth = 2.0 * (1.0 - busy) * longest_s / variance_s
    lost = (1.0 - busy) / math.expm1(min(depth, 500.0)) if abs(depth) > 1e-9 else variance_s / (2.0 * longest_s)
    return 1.0 - share * (1.0 - min(lost / busy, 1.0))


def _ttft_fits(prompts: "Prompts | Mixed", load: Workload, target: PlanningTarget, workers: int) -> bool:
    if target.refuses_late:
        return refused_share(prompts, load, target, workers) <= allowed_share(prompts, target)
    wait = wait_of(prompts.work_s, prompts.work_cv2, load.rate, load.burstiness, workers)
    return wait is not None and missed_share(prompts.alone_s, wait, target.ttft_s) <= allowed_share(prompts, target)


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Sequences per decode worker, on average and at the peak of their swings, and the time per token at the peak."""

    sequences: float
    peak: float
    tpot_s: float  # at the peak


def context_of(load: Workload) -> float:
    """Mean context of a decoding sequence: half of its output, and long outputs are length-biased."""
    return load.input_tokens + load.output_tokens * (1.0 + load.output_cv2) / 2.0


def room_of(load: Workload, model: WorkerModel, target: PlanningTarget) -> float:
    """Sequences that a pool holds, with room for the swings of their lengths; at most max_running."""
    held = context_of(load)
    swing = _z(target) * math.sqrt(load.input_cv2 * load.input_tokens**2 + load.output_cv2 * load.output_tokens**2)
    root = (math.sqrt(swing * swing + 4 * held * model.pool_tokens) - swing) / (2 * held)
    return min(root * root, float(model.max_running))


def decode_fits(load: Workload, model: WorkerModel, target: PlanningTarget, workers: int) -> bool:
    """Whether so many decode workers meet the TPOT target, hold all sequences, and receive the KV in time."""
    if load.rate * load.input_tokens * model.kv_bytes_per_token > LINK_SHARE * model.link_bytes_per_s * workers:
        return False
    reserved = load.rate / workers * prompts_of(load, model.prefill, model.token_budget).mean_s
    batch = batch_of(load, model, target, workers)
    if batch is None or batch.peak + reserved > room_of(load, model, target):
        return False
    exposed_s = EXPOSED_SHARE * load.input_tokens * model.kv_bytes_per_token / model.link_bytes_per_s
    return batch.tpot_s + exposed_s / load.output_tokens <= target.tpot_s


def batch_of(load: Workload, model: WorkerModel, target: PlanningTarget, workers: int) -> DecodeBatch | None:
    """Each decode worker's batch; None: sequences arrive faster than they end."""
    context = context_of(load)

    def step_s(sequences: float) -> float:
        return model.decode.decode_step_s(sequences, sequences * context)

    sequences = _settled(lambda held: load.rate / workers * load.output_tokens * step_s(held), 2.0 * model.max_running)
    if sequences is None:
        return None
    peak = _peak(sequences, load, target, workers)
    return DecodeBatch(sequences, peak, step_s(peak))


def _z(target: PlanningTarget) -> float:
    return _NORMAL.inv_cdf(min(max(target.share, 0.5), 0.999))


def _peak(sequences: float, load: Workload, target: PlanningTarget, workers: int) -> float:
    """One worker's share of the peak of all sequences: they are spread evenly, so its swing is small."""
    total = sequences * workers
    return (total + _z(target) * math.sqrt(total * (1.0 + load.burstiness) / 2.0)) / workers


def _settled(following: Callable[[float], float], most: float) -> float | None:
    """The least fixed point of an increasing function, from 0 up; None: above `most`."""
    value = 0.0
    for _ in range(_STEPS):
        new = following(value)
        if new > most:
            return None
        if new - value <= 1e-6 * max(new, 1.0):
            return new
        value = new
    return value


def aggregated_fits(load: Workload, model: WorkerModel, target: PlanningTarget, workers: int) -> bool:
    state = mixed_of(load, model, target, workers)
    if state is None or not _ttft_fits(state, load, target, workers):
        return False
    reserved = load.rate / workers * sum(state.alone_s) / len(state.alone_s)
    return state.peak + reserved <= room_of(load, model, target) and state.tpot_s <= target.tpot_s


@dataclass(frozen=True, slots=True)
class Mixed:
    """An aggregated worker: sequences at the peak, time per token, and prompts beside decoding."""

    peak: float
    tpot_s: float
    alone_s: tuple[float, ...]
    work_s: float
    work_cv2: float


def mixed_of(load: Workload, model: WorkerModel, target: PlanningTarget, workers: int) -> Mixed | None:
    """None: the load exceeds the capacity."""
    prompts = prompts_of(load, model.decode, model.token_budget)
    rate = load.rate / workers

    def held(sequences: float) -> float:
        steps = _steps(load, model, prompts, rate, sequences)
        return rate * load.output_tokens * steps.tpot_s if steps else math.inf

    sequences = _settled(held, 2.0 * model.max_running)
    if sequences is None:
        return None
    peak = _peak(sequences, load, target, workers)
    usual, full = (_steps(load, model, prompts, rate, number) for number in (sequences, peak))
    if usual is None or full is None:
        return None
    stretch = full.mixed_s / full.chunk_s
    tpot_s = max(full.tpot_s, usual.tpot_s_at(target, load.output_tokens, load.input_cv2))
    alone = tuple(one * stretch for one in prompts.alone_s)
    return Mixed(peak, tpot_s, alone, prompts.work_s * stretch, prompts.work_cv2)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of an aggregated worker with and without a prefill chunk, and the share that has one."""

    plain_s: float
    mixed_s: float
    chunk_s: float  # of a step with the chunk alone
    mixed_share: float  # of the steps
    chunks: float  # per prompt

    @property
    def tpot_s(self) -> float:
        return self.plain_s + self.mixed_share * (self.mixed_s - self.plain_s)

    def tpot_s_at(self, target: PlanningTarget, output_tokens: float, input_cv2: float) -> float:
        """For the request that meets more chunks than share `target.share` of requests: chunks arrive in prompts."""
        met = output_tokens * self.mixed_share
        swing = _z(target) * math.sqrt(met * max(1.0, self.chunks * (1.0 + input_cv2)))
        return self.plain_s + min(met + swing, output_tokens) / output_tokens * (self.mixed_s - self.plain_s)


def _steps(load: Workload, model: WorkerModel, prompts: Prompts, rate: float, sequences: float) -> _Steps | None:
    """None: prefill alone takes all steps."""
    context, curve = context_of(load), model.decode
    chunk = min(prompts.computed_tokens, max(model.token_budget - sequences, model.token_budget / 4))
    chunks = prompts.computed_tokens / chunk
    chunk_s = curve.step_s(StepWork(chunk, prompts.pairs / chunks))
    mixed_s = curve.step_s(StepWork(chunk, prompts.pairs / chunks, sequences, sequences * context))
    plain_s = curve.decode_step_s(sequences, sequences * context)
    busy = rate * chunks * mixed_s  # share of the time
    if busy >= FULLEST:
        return None
    mixed, plain = busy / mixed_s, (1.0 - busy) / plain_s  # steps per s
    return _Steps(plain_s, mixed_s, chunk_s, mixed / (mixed + plain), chunks)


Fits = Callable[[Workload, WorkerModel, PlanningTarget, int], bool]


def workers_for(fits: Fits, load: Workload, model: WorkerModel, target: PlanningTarget, most: int) -> int | None:
    """The least number of workers that carries this load, at most `most`; None: `most` do not."""
    found = bisect_left(range(1, most + 1), True, key=lambda workers: fits(load, model, target, workers)) + 1
    return found if found <= most else None


def rate_of(fits: Fits, load: Workload, model: WorkerModel, target: PlanningTarget, workers: int) -> float:
    """The highest rate, requests per s, that so many workers carry; 0: none."""
    if workers < 1:
        return 0.0
    high = max(load.rate, 1e-3)
    for _ in range(_STEPS):
        if not fits(load.at(high), model, target, workers):
            break
        high *= 2.0
    low = 0.0
    for _ in range(_STEPS):
        middle = (low + high) / 2.0
        if fits(load.at(middle), model, target, workers):
            low = middle
        else:
            high = middle
    return low
