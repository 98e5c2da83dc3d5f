"""Predicts the TTFT and TPOT that a request would see on given workers. Pure: times are arguments, of one clock.

TTFT: the prompts ahead of it at the computing worker, its own, the hand-over and the wait for blocks. TPOT: a step of
the decode worker with the batch expected there when the prefill ends, not the current one (Mooncake, FAST 2025, section
7: rejecting by the current load makes load oscillate). Both learn: the workers' speeds from first tokens and load
reports, a bias per worker and a margin over all workers from predictions against outcomes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvrelay.plane.messages import Timings
from kvrelay.plane.reports import LoadReport, WorkerInfo
from kvrelay.router.fleet.account import WorkerAccount
from kvrelay.router.slo.learning import Bias, DurationFit, Errors, LengthDistribution
from kvrelay.router.types import LONG_PROMPT, Decision, Prediction, RouteRequest, tpot_bound_s

TTFT_CONFIDENCE, TPOT_CONFIDENCE = 0.5, 0.7
"""Shares of requests whose latency is to stay below the `safe_*` predictions; a higher share refuses earlier."""
LEAST_MARGIN = 0.95  # on a TTFT: else a queue that grows looks short, and the cluster admits all, then refuses all
MIN_EVIDENCE = 3  # durations observed before a worker counts as measured
SILENT_S = 10.0  # time without an outcome after which a prediction is too old to refuse by
MIN_TPOT_TOKENS = 4  # shorter outputs do not measure steps
_TTFT_FLOOR_S = 0.05
_TPOT_SCALES = (1.0, 0.02)
_TPOT_PULL = 2.0  # prior outcomes as predicted: a few stalled short outputs predict little
_MOST_OFF = 2.0  # bound of one outcome over its expectation
_AS_PREDICTED = (0.0, 1.0)
_TPOT_KEEP = 0.99  # outcomes come late and vary: about a hundred count
_COMPUTE_SCALES = (1.0, 2000.0, 2000.0 * 4000.0)
_STEP_SCALES = (1.0, 16.0, 16.0 * 2000.0)
Features = tuple[float, float, float]


@dataclass(slots=True)
class _Open:
    """A request that was assigned and has not ended."""

    request: RouteRequest
    prediction: Prediction
    compute: "_Worker"
    decode: "_Worker | None"
    features: Features
    assigned_at_s: float
    target_tpot_s: float | None
    width: int  # sequences that decode, or will
    first_token_s: float | None = None


@dataclass(slots=True)
class _Worker:
    """What is known of one incarnation of one worker: 13 attributes, a record."""

    info: WorkerInfo
    compute: DurationFit = field(default_factory=lambda: DurationFit(_COMPUTE_SCALES))
    step: DurationFit = field(default_factory=lambda: DurationFit(_STEP_SCALES))
    ttft_bias: Bias = field(default_factory=lambda: Bias(_TTFT_FLOOR_S))
    tpot: DurationFit = field(default_factory=lambda: DurationFit(_TPOT_SCALES, keep=_TPOT_KEEP, pull=_TPOT_PULL))
    num_prefills: int = 0  # durations observed
    num_steps: int = 0
    rate: float = 0.0  # tokens/s, as reported
    step_s: float = 0.0  # of a decode step, as reported
    freed_at_s: float = 0.0  # when it last finished a prompt
    learned_at_s: float = float("-inf")
    queue: dict[str, _Open] = field(default_factory=dict)  # without a first token; in order
    running: dict[str, _Open] = field(default_factory=dict)  # decoding here, or will

    def is_silent(self, now_s: float) -> bool:
        """Whether nothing was learned of it for a while, and no request there will change that."""
        return not (self.queue or self.running) and now_s - self.learned_at_s >= SILENT_S

    def learn_prefill(self, features: Features, seconds: float, now_s: float) -> None:
        self.compute.observe(features, seconds, self._prefill_prior, now_s)
        self.num_prefills += 1

    def learn_step(self, features: Features, seconds: float, now_s: float) -> None:
        self.step.observe(features, seconds, (self.step_s, 0.0, 0.0), now_s)
        self.num_steps += 1
        self.learned_at_s = now_s

    def shared_tokens(self) -> float:
        """Tokens that steps read once per further member of a group, though they are stored once."""
        started = (item for item in self.running.values() if item.first_token_s is not None)
        return float(sum((item.width - 1) * item.request.num_tokens for item in started))

    @property
    def _prefill_prior(self) -> Features:
        return 0.0, 1.0 / self.rate if self.rate else 0.0, 0.0

    def prefill_costs(self, now_s: float) -> tuple[float, ...]:
        """Seconds per unit of each feature of a prompt."""
        return self.compute.coefficients(self._prefill_prior, now_s)

    def tpot_s(self, raw_s: float, now_s: float) -> float:
        """TPOT of sequences that join a step of `raw_s`: it counts in part, because batches rise and fall."""
        fixed_s, share = self.tpot.coefficients(_AS_PREDICTED, now_s)
        return fixed_s + share * raw_s

    def step_costs(self, now_s: float) -> tuple[float, ...]:
        return self.step.coefficients((self.step_s, 0.0, 0.0), now_s)


def _dot(costs: tuple[float, ...], features: Features) -> float:
    return sum(cost * feature for cost, feature in zip(costs, features, strict=True))


def _prompt_features(num_tokens: int, cached_tokens: int) -> Features:
    """(1, uncached tokens, uncached tokens times the mean context that they attend to)."""
    uncached = max(1, num_tokens - cached_tokens)
    return 1.0, float(uncached), uncached * (num_tokens - uncached / 2)


class Forecast:
    """Predicts latency, and learns from outcomes. Written by Router alone."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._open: dict[str, _Open] = {}
        self.lengths = LengthDistribution()
        self.ttft_errors, self.tpot_errors, self.bound_errors = Errors(), Errors(), Errors()

    def __len__(self) -> int:
        return len(self._open)

    # ---- messages of workers

    def worker_up(self, info: WorkerInfo) -> None:
        """A restarted worker is measured anew."""
        known = self._workers.get(info.worker_id)
        if known is None or known.info.epoch != info.epoch:
            self._workers[info.worker_id] = _Worker(info)

    def worker_down(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)

    def apply_load(self, worker_id: str, report: LoadReport, now_s: float) -> None:
        """Speeds, and one sample of a decode step with such a batch."""
        worker = self._workers[worker_id]
        worker.rate = report.prefill_tokens_per_s or worker.rate
        is_new = report.decode_step_s > 0 and report.decode_step_s != worker.step_s
        worker.step_s = report.decode_step_s or worker.step_s
        if is_new and report.running:
            share = report.running / (report.running + report.receiving)
            tokens = report.used_blocks * worker.info.block_size * share + worker.shared_tokens()
            worker.learn_step((1.0, float(report.running), tokens), report.decode_step_s, now_s)

    # ---- predictions

    def predict(
        self,
        request: RouteRequest,
        decision: Decision,
        compute: WorkerAccount,
        decode: WorkerAccount | None,
        now_s: float,
        *,
        mean_tokens: float,
    ) -> Prediction:
        """The latency that `request` would see now. It must not have been assigned yet. mean_tokens: of a prompt, not
        cached.
        """
        source = self._workers[compute.info.worker_id]
        costs = source.prefill_costs(now_s)
        features = _prompt_features(request.num_tokens, decision.cached_tokens_prefill)
        own_s = _dot(costs, features)
        queue_s = self._queue_s(source, costs, now_s) + compute.foreign_tokens * costs[1]
        raw_ttft_s = decision.terms["handoff"] + decision.terms["decode_wait"] + queue_s + own_s
        ttft_s = source.ttft_bias.corrected(raw_ttft_s, now_s)
        is_known = source.num_prefills >= MIN_EVIDENCE
        of_ttft = Prediction(
            ttft_s if is_known else None,
            None,
            max(self.ttft_errors.quantile(TTFT_CONFIDENCE, ttft_s), LEAST_MARGIN),
            1.0,
            queue_s,
            1.0,
            is_ttft_stale=not source.queue and now_s - source.freed_at_s >= SILENT_S,
            raw_ttft_s=raw_ttft_s,
            excess_s=own_s * max(0.0, 1 - LONG_PROMPT * mean_tokens / features[1]) if is_known else 0.0,
        )
        if decode is None:
            return of_ttft
        target, transfer_s = self._workers[decode.info.worker_id], decision.terms["transfer"]
        others = self._batch_at(target, decode, request.num_tokens, ttft_s + transfer_s, now_s)
        own = request.width + request.companions
        features = (1.0, others[0] + own, others[1] + own * request.num_tokens)
        costs = target.step_costs(now_s)
        raw_tpot_s = _dot(costs, features) + transfer_s / max(1.0, min(request.max_tokens, self.lengths.mean_tokens))
        crowded = self._broken_target(target, _dot(costs, (1.0, *others)), raw_tpot_s, now_s)
        is_known = target.num_steps >= MIN_EVIDENCE and request.max_tokens > 1
        return replace(
            of_ttft,
            tpot_s=target.tpot_s(raw_tpot_s, now_s) if is_known else None,
            tpot_factor=self.tpot_errors.quantile(TPOT_CONFIDENCE),
            batch=features[1],
            crowded_tpot_s=crowded if is_known else None,
            is_tpot_stale=target.is_silent(now_s),
            raw_tpot_s=raw_tpot_s,
            own_sequences=own,
            bound_factor=self.bound_errors.quantile(TPOT_CONFIDENCE),
        )

    @staticmethod
    def _queue_s(worker: _Worker, costs: tuple[float, ...], now_s: float) -> float:
        """Seconds until the prompts assigned there are computed; the first one is partly done."""
        if not worker.queue:
            return 0.0
        head = next(iter(worker.queue.values()))
        done_s = now_s - max(head.assigned_at_s, worker.freed_at_s)
        head_s = max(0.0, _dot(costs, head.features) - max(0.0, done_s))
        return head_s + sum(_dot(costs, item.features) for item in worker.queue.values() if item is not head)

    def _batch_at(
        self, worker: _Worker, account: WorkerAccount, typical_tokens: int, horizon_s: float, now_s: float
    ) -> tuple[float, float]:
        """(sequences, context tokens) expected on a decode worker in `horizon_s`; future arrivals are left out."""
        sequences, tokens = 0.0, 0.0
        for likely, context in self._survivors(worker, horizon_s, now_s):
            sequences += likely
            tokens += likely * context
        foreign = account.foreign_sequences
        own_sequences = sum(item.width for item in worker.running.values())
        own_tokens = sum(item.width * item.request.num_tokens for item in worker.running.values())
        mean_tokens = own_tokens / own_sequences if own_sequences else typical_tokens
        return min(sequences + foreign, float(worker.info.max_running)), tokens + foreign * mean_tokens

    def _survivors(self, worker: _Worker, horizon_s: float, now_s: float) -> Iterator[tuple[float, float]]:
        """(expected sequences, context of each) of every request assigned there."""
        step_s = max(worker.step_s, 1e-4)
        for item in worker.running.values():
            began_s = item.first_token_s
            if began_s is None:
                began_s = max(now_s, item.assigned_at_s + item.prediction.raw_ttft_s)
            have = max(0.0, now_s - began_s) / step_s
            more = max(0.0, now_s + horizon_s - max(began_s, now_s)) / step_s
            is_over = have + more >= item.request.max_tokens or began_s > now_s + horizon_s
            if not is_over:
                yield item.width * self.lengths.survival(have, more), item.request.num_tokens + have + more

    @staticmethod
    def _broken_target(worker: _Worker, without_s: float, with_s: float, now_s: float) -> float | None:
        """The tightest TPOT target there that is met without the new request and not with it."""
        targets = (item.target_tpot_s for item in worker.running.values() if item.target_tpot_s is not None)
        tightest = min(targets, default=None)
        if tightest is None:
            return None
        return tightest if worker.tpot_s(without_s, now_s) <= tightest < worker.tpot_s(with_s, now_s) else None

    def clears_in(
        self, account: WorkerAccount, request: RouteRequest, prediction: Prediction, tpot_s: float, now_s: float
    ) -> float | None:
        """Seconds until `tpot_s` would be met on the decode worker, without further arrivals; None: not in a minute.
        prediction: for now, as made by `predict`.
        """
        worker = self._workers[account.info.worker_id]
        costs = worker.step_costs(now_s)
        own = prediction.own_sequences
        for wait_s in (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0):
            others = self._batch_at(worker, account, request.num_tokens, wait_s, now_s)
            raw_s = _dot(costs, (1.0, others[0] + own, others[1] + own * request.num_tokens))
            later = replace(prediction, tpot_s=worker.tpot_s(raw_s, now_s), raw_tpot_s=raw_s)
            if later.safe_tpot_s(tpot_s) <= tpot_s:
                return wait_s
        return None

    # ---- outcomes

    def assign(self, request: RouteRequest, decision: Decision, now_s: float) -> None:
        """The request is assigned, with its prediction and target; `end` must follow. An earlier attempt of the same id
        ends.
        """
        self.end(request.request_id)
        prediction, verdict = decision.forecast, decision.verdict
        assert prediction is not None
        target_tpot_s = verdict.target.tpot_s if verdict is not None and verdict.target is not None else None
        compute = self._workers[decision.prefill or decision.decode or ""]
        decode = self._workers[decision.decode] if decision.decode is not None else None
        features = _prompt_features(request.num_tokens, decision.cached_tokens_prefill)
        item = _Open(request, prediction, compute, decode, features, now_s, target_tpot_s, request.width)
        self._open[request.request_id] = item
        compute.queue[request.request_id] = item
        if decode is not None:
            decode.running[request.request_id] = item

    def first_token(self, request_id: str, now_s: float, timings: Timings | None, cached_tokens: int) -> None:
        """The prompt is computed; `timings` are reported by the worker. Counts once."""
        item = self._open.get(request_id)
        if item is None or item.first_token_s is not None:
            return
        item.first_token_s, worker, prediction = now_s, item.compute, item.prediction
        worker.queue.pop(request_id, None)
        if timings is not None and timings.compute_s > 0:
            features = _prompt_features(item.request.num_tokens, cached_tokens)
            worker.learn_prefill(features, min(timings.compute_s, now_s - worker.freed_at_s), now_s)
        worker.freed_at_s = worker.learned_at_s = now_s
        observed_s = now_s - item.assigned_at_s
        if prediction.ttft_s is not None:
            self.ttft_errors.observe(prediction.ttft_s, observed_s)
            worker.ttft_bias.observe(prediction.raw_ttft_s, observed_s, now_s)

    def finished(self, request_id: str, num_tokens: int, tpot_s: float, now_s: float) -> None:
        """It finished, with `num_tokens` of output."""
        item = self._open.get(request_id)
        if item is None or item.decode is None:
            return
        self.lengths.observe(num_tokens)
        if num_tokens < MIN_TPOT_TOKENS or item.prediction.tpot_s is None:
            return
        self.tpot_errors.observe(item.prediction.tpot_s, tpot_s)
        if item.target_tpot_s is not None:
            self.bound_errors.observe(tpot_bound_s(item.prediction.raw_tpot_s, item.target_tpot_s), tpot_s)
        expected_s = item.decode.tpot_s(item.prediction.raw_tpot_s, now_s)
        seen_s = min(max(tpot_s, expected_s / _MOST_OFF), expected_s * _MOST_OFF)
        item.decode.tpot.observe((1.0, item.prediction.raw_tpot_s), seen_s, _AS_PREDICTED, now_s)
        item.decode.learned_at_s = now_s

    def narrow(self, request_id: str, width: int) -> None:
        if (item := self._open.get(request_id)) is not None:
            item.width = max(1, min(item.width, width))

    def end(self, request_id: str) -> None:
        """Forget it. Idempotent."""
        item = self._open.pop(request_id, None)
        if item is None:
            return
        item.compute.queue.pop(request_id, None)
        if item.decode is not None:
            item.decode.running.pop(request_id, None)
