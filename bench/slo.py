"""SLO admission against none, beyond capacity, in virtual time: python -m bench.slo [TRACE]

TRACE: a file in Mooncake's format, such as its conversation trace; without one, a generated load. The router, the forecast and
the verdicts are the product's; the workers are a model (bench/slo_workers.py), so that an hour takes seconds and a seed
gives the same run. Capacity is the load at which goodput (requests within both SLOs, per second) is highest without
admission, found first. Then, at `--overload` times that load: without admission, and with it. A refusal is false if the request
would have met its SLOs: for every so many the run is forked, the request let in, and looked at. Whether it could have been let
in is another matter, for the next one, too, would have met them alone: the run is forked once more, all who would be refused in
the next `--window-s` are let in, and what becomes of everybody who comes until a while after is held against the run as it is.
"""

import argparse
import json
import math
import os
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.slo_workers import BLOCK_TOKENS, KV_BYTES_PER_TOKEN, Clock, DecodeModel, Job, PrefillModel, Speeds
from kvrelay.cluster.loadgen.sessions import SessionSpec, generate
from kvrelay.cluster.workloads.readers import parse_mooncake
from kvrelay.cluster.workloads.trace import MOONCAKE_BUCKET_S, TraceEntry, scale_entries, spread_buckets
from kvrelay.config import RouterSettings, SloSettings
from kvrelay.plane.messages import Timings
from kvrelay.router.decision.router import Router
from kvrelay.router.decision.types import Refusal, RouteRequest
from kvrelay.router.slo.promises import SloAsk, SloTarget

HOP_S = 0.001  # of a message
AFTER_WINDOW_S = 60.0  # so long, those who come are still concerned by who was let in
MAX_TOKENS = 4096  # what every client allows; the ingress does not know how long an output gets
LOADS = (0.6, 0.8, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0)


@dataclass(frozen=True, slots=True)
class Spec:
    """One run. `slo`: what counts as kept, whether or not it is enforced."""

    slo: SloTarget
    confidence: float
    num_prefill: int
    num_decode: int
    speeds: Speeds
    seed: int
    is_enforced: bool
    fork_every: int = 0  # of the refused; 0: none
    max_inflight: int = 512
    window_s: float = 10.0


@dataclass(slots=True)
class Looked:
    """What forked runs tell of refusals. Counts are requests."""

    num: int = 0
    num_false: int = 0
    false_by_cause: Counter[str] = field(default_factory=Counter)
    cause: Counter[str] = field(default_factory=Counter)
    ratios: dict[str, list[float]] = field(default_factory=lambda: {"ttft": [], "tpot": []})  # observed over predicted
    num_let_in: int = 0  # all who were refused in a window
    num_let_in_kept: int = 0
    kept_as_is: int = 0  # of those who came in the window or a while after
    kept_let_in: int = 0


class Run:
    """One load through one cluster."""

    def __init__(self, spec: Spec, entries: Sequence[TraceEntry]) -> None:
        self.spec, self.clock = spec, Clock()
        slo = SloSettings(ttft_s=spec.slo.ttft_s, tpot_s=spec.slo.tpot_s, confidence=spec.confidence)
        self.router = Router(RouterSettings(), tokens_per_hash=BLOCK_TOKENS, slo=slo if spec.is_enforced else None)
        speeds = spec.speeds
        self._prefill = {
            f"p{i}": PrefillModel(f"p{i}", self.router, self.clock, speeds, self._first_token)
            for i in range(spec.num_prefill)
        }
        self._decode = {
            f"d{i}": DecodeModel(
                f"d{i}", self.router, self.clock, speeds, self._done, random.Random(f"{spec.seed}:d{i}")
            )
            for i in range(spec.num_decode)
        }
        for worker in self._decode.values():
            worker.start()
        self.jobs = [self._job(index, entry) for index, entry in enumerate(entries)]
        for job in self.jobs:
            self.clock.at(job.arrival_s, lambda job=job: self._arrive(job))
        self._where: dict[int, DecodeModel] = {}
        self._inflight = self._num_refused = 0
        self._lets_in_until_s = -1.0
        self._let_in: list[Job] = []
        self.looked = Looked()

    def _job(self, index: int, entry: TraceEntry) -> Job:
        hashes = tuple(number.to_bytes(16, "little") for number in entry.hash_ids[: entry.input_tokens // BLOCK_TOKENS])
        job = Job(index, entry.arrival_s, entry.input_tokens, max(1, entry.output_tokens), hashes)
        job.factor = math.exp(random.Random(f"{self.spec.seed}:{index}").gauss(0, self.spec.speeds.noise))
        return job

    def run(self) -> "Run":
        while self.clock.step():
            continue
        assert not len(self.router._ledger), "requests are still counted"
        return self

    # ---- a request's life, as serve/requests/request_driver.py has it

    def _arrive(self, job: Job, *, is_forced: bool = False) -> None:
        if self._inflight >= self.spec.max_inflight:
            job.outcome = "full"
            return
        ask = SloAsk((self.spec.slo,)) if self.spec.is_enforced and not is_forced else None
        query = RouteRequest(job.id, job.hashes, job.num_tokens, MAX_TOKENS, force="remote", slo=ask)
        choice = self.router.select_and_reserve(query, self.clock.now_s)
        if isinstance(choice, Refusal) and choice.reason == "slo" and self.clock.now_s < self._lets_in_until_s:
            self._let_in.append(job)
            return self._arrive(job, is_forced=True)
        if isinstance(choice, Refusal):
            job.outcome = choice.reason
            self._refused(job, choice)
            return
        self._inflight += 1
        assert choice.prefill is not None and choice.decode is not None
        if choice.forecast is not None:
            job.predicted_ttft_s, job.predicted_tpot_s = choice.forecast.ttft_s, choice.forecast.tpot_s
        prefill, decode = self._prefill[choice.prefill], self._decode[choice.decode]
        self._where[job.index] = decode
        send = self.clock.now_s + 2 * HOP_S
        self.clock.at(
            send, lambda: decode.reserve(job, lambda: prefill.submit(job), lambda: self._over(job, "full"))
        )  # fmt: skip

    def _refused(self, job: Job, refusal: Refusal) -> None:
        if job.outcome != "slo":
            return
        self._num_refused += 1
        if self.spec.fork_every and self._num_refused % self.spec.fork_every == 0:
            self._look_at(job, refusal)

    def _look_at(self, job: Job, refusal: Refusal) -> None:
        looked, verdict = self.looked, refusal.verdict
        assert verdict is not None
        kept, ttft_s, tpot_s = self._forked(lambda: self._alone(job))
        cause = "+".join(verdict.missed)
        looked.num += 1
        looked.num_false += int(kept)
        looked.cause[cause] += 1
        looked.false_by_cause[cause] += int(kept)
        for name, seen, told in (
            ("ttft", ttft_s, verdict.prediction.ttft_s), ("tpot", tpot_s, verdict.prediction.tpot_s),
        ):  # fmt: skip
            if name in verdict.missed and told and seen > 0:
                looked.ratios[name].append(seen / told)
        until_s = self.clock.now_s + self.spec.window_s
        _, _, as_is = self._forked(lambda: self._window(job, until_s, lets_in=False))
        num, num_kept, let_in = self._forked(lambda: self._window(job, until_s, lets_in=True))
        looked.num_let_in += int(num)
        looked.num_let_in_kept += int(num_kept)
        looked.kept_as_is += int(as_is)
        looked.kept_let_in += int(let_in)

    def _forked(self, what: Callable[[], tuple[float, float, float]]) -> tuple[float, float, float]:
        """What it tells in a copy of this process, from this moment on."""
        read_end, write_end = os.pipe()
        if os.fork() == 0:
            try:
                self.spec = replace(self.spec, fork_every=0)
                os.write(write_end, json.dumps(what()).encode())
            finally:
                os._exit(0)  # without an answer the other side fails
        os.close(write_end)
        with os.fdopen(read_end, "rb") as told:
            one, two, three = json.loads(told.read())
        os.wait()
        return one, two, three

    def _alone(self, job: Job) -> tuple[float, float, float]:
        """(whether it meets its SLOs if it alone is let in, its TTFT, its TPOT)."""
        job.outcome = "running"
        self._arrive(job, is_forced=True)
        while job.outcome == "running" and self.clock.step():
            continue
        return float(is_kept(job, self.spec.slo)), job.ttft_s, job.tpot_s

    def _window(self, job: Job, until_s: float, *, lets_in: bool) -> tuple[float, float, float]:
        """(refused in the window and let in, those of them that kept their SLOs, all that kept theirs of who came until a while after)."""
        begin_s, end_s = self.clock.now_s, until_s + AFTER_WINDOW_S
        if lets_in:
            self._lets_in_until_s = until_s
            self._let_in.append(job)
            job.outcome = "running"
            self._arrive(job, is_forced=True)
        concerned = [one for one in self.jobs if begin_s <= one.arrival_s < end_s]
        while any(one.outcome == "running" for one in concerned) and self.clock.step():
            continue
        kept = [one for one in concerned if is_kept(one, self.spec.slo)]
        return len(self._let_in), sum(is_kept(one, self.spec.slo) for one in self._let_in), len(kept)

    def _first_token(self, job: Job, timings: Timings) -> None:
        job.first_s = self.clock.now_s + HOP_S
        read_s = job.num_tokens * KV_BYTES_PER_TOKEN / self.spec.speeds.link_bytes_per_s
        exposed_s = 0.05 * read_s + 0.95 * max(0.0, read_s - timings.compute_s)
        decode = self._where[job.index]
        self.clock.at(
            job.first_s,
            lambda: self.router.on_first_token(job.id, self.clock.now_s, timings=timings, cached_tokens=job.cached),
        )
        self.clock.at(job.first_s + exposed_s, lambda: decode.join(job))

    def _done(self, job: Job) -> None:
        self.router.on_finished(job.id, job.output_tokens, job.tpot_s, self.clock.now_s)
        self._over(job, "done")

    def _over(self, job: Job, outcome: str) -> None:
        job.outcome = outcome
        self._where.pop(job.index)
        self._inflight -= 1
        self.router.on_end(job.id)


def is_kept(job: Job, slo: SloTarget) -> bool:
    return job.outcome == "done" and job.ttft_s <= (slo.ttft_s or math.inf) and job.tpot_s <= (slo.tpot_s or math.inf)


def goodput(run: Run) -> float:
    """Requests within both SLOs, per second of arrivals."""
    return sum(is_kept(job, run.spec.slo) for job in run.jobs) / max(job.arrival_s for job in run.jobs)


def load_entries(trace: Path | None, num_requests: int, seed: int) -> list[TraceEntry]:
    if trace is None:
        return generate(SessionSpec(sessions_per_s=3.0, seed=seed), num_requests)
    with trace.open(encoding="utf-8") as lines:
        entries = list(parse_mooncake(lines))[:num_requests]
    return spread_buckets(entries, bucket_s=MOONCAKE_BUCKET_S, seed=seed)


def share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"


def describe(name: str, run: Run) -> None:
    jobs, slo = run.jobs, run.spec.slo
    done = [job for job in jobs if job.outcome == "done"]
    kept = sum(is_kept(job, slo) for job in jobs)
    ttft = statistics.quantiles([job.ttft_s for job in done], n=100)
    tpot = statistics.quantiles([job.tpot_s for job in done if job.output_tokens > 1], n=100)
    wasted = sum(job.num_tokens - job.cached for job in done if not is_kept(job, slo))
    computed = sum(job.num_tokens - job.cached for job in done)
    slo_refused = sum(job.outcome == "slo" for job in jobs)
    full = sum(job.outcome == "full" for job in jobs)
    print(
        f"{name:<24} {goodput(run):>8.2f} {share(kept, len(done)):>8} {share(slo_refused, len(jobs)):>8} "
        f"{share(full, len(jobs)):>8} {share(wasted, computed):>8} {ttft[49]:>7.2f} {ttft[98]:>7.2f} "
        f"{1e3 * tpot[49]:>7.0f} {1e3 * tpot[98]:>7.0f}",
        flush=True,
    )


def false_refusals(run: Run) -> None:
    """Of those that were looked at: who would have met the SLOs alone, and what letting in all of a window brings."""
    looked = run.looked
    if not looked.num:
        return
    causes = ", ".join(f"{name}: {looked.false_by_cause[name]} of {num}" for name, num in looked.cause.items())
    print(f"false refusals: {looked.num_false} of {looked.num} looked at, each alone ({causes})")
    for name, ratios in looked.ratios.items():
        if len(ratios) > 1:
            cuts = statistics.quantiles(ratios, n=10)
            print(
                f"  {name} of those refused for it, let in alone: observed/predicted p10 {cuts[0]:.2f}, p50 {cuts[4]:.2f}, p90 {cuts[8]:.2f}"
            )
    print(
        f"  all refused of {run.spec.window_s:g} s let in: {looked.num_let_in_kept} of {looked.num_let_in} keep their SLOs; of everybody "
        f"who came in it or {AFTER_WINDOW_S:g} s later {looked.kept_let_in} do, instead of {looked.kept_as_is}"
    )


def predictor_errors(run: Run) -> None:
    """|observed - predicted| / observed, of what was admitted."""
    done = [job for job in run.jobs if job.outcome == "done"]
    pairs = {
        "TTFT": [(job.ttft_s, job.predicted_ttft_s) for job in done],
        "TPOT": [(job.tpot_s, job.predicted_tpot_s) for job in done if job.output_tokens >= 4],
    }
    for name, values in pairs.items():
        errors = [abs(seen - told) / seen for seen, told in values if told is not None]
        cuts = statistics.quantiles(errors, n=10)
        bias = statistics.median(told / seen for seen, told in values if told is not None)
        print(
            f"{name} predictor: absolute error p50 {share_of(cuts[4])}, p90 {share_of(cuts[8])}, mean "
            f"{share_of(statistics.fmean(errors))}; median predicted/observed {bias:.2f}; {len(errors)} requests"
        )


def share_of(value: float) -> str:
    return f"{100 * value:.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--ttft-s", type=float, default=5.0)
    parser.add_argument("--tpot-s", type=float, default=0.06)
    parser.add_argument("--overload", type=float, default=1.5)
    parser.add_argument("--confidence", type=float, nargs="+", default=[SloSettings().confidence])
    parser.add_argument("--fork-every", type=int, default=10, help="look at every so many refusals; 0: none")
    parser.add_argument("--window-s", type=float, default=10.0, help="in which all are let in, too")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="times the trace's own rate")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    entries = load_entries(options.trace, options.requests, options.seed)
    slo = SloTarget("bench", options.ttft_s, options.tpot_s)

    def run(load: float, *, confidence: float = 0.5, is_enforced: bool = False, fork_every: int = 0) -> Run:
        spec = Spec(
            slo, confidence, options.prefill, options.decode, Speeds(), options.seed, is_enforced, fork_every,
            window_s=options.window_s,
        )  # fmt: skip
        return Run(spec, scale_entries(entries, time_scale=1 / load)).run()

    rate = len(entries) / max(entry.arrival_s for entry in entries)
    print(
        f"{len(entries)} requests, {rate:.2f}/s as recorded; {options.prefill} prefill and {options.decode} decode workers;"
    )
    print(f"SLO: TTFT {slo.ttft_s:g} s, TPOT {1e3 * (slo.tpot_s or 0):g} ms; seed {options.seed}")
    found: dict[float, float] = {}
    for load in options.loads:
        found[load] = goodput(run(load))
        print(f"  {load * rate:6.2f} req/s without admission: goodput {found[load]:.2f}/s", flush=True)
    capacity = max(found, key=lambda load: found[load])
    print(f"capacity: {capacity * rate:.2f} req/s. At {options.overload:g} times that:")
    print(
        f"{'':<24} {'goodput':>8} {'kept':>8} {'refused':>8} {'full':>8} {'wasted':>8} {'TTFT50':>7} {'99 s':>7} "
        f"{'TPOT50':>7} {'99 ms':>7}"
    )
    load = capacity * options.overload
    describe("without admission", run(load))
    for confidence in options.confidence:
        enforced = run(load, confidence=confidence, is_enforced=True, fork_every=options.fork_every)
        describe(f"with, confidence {confidence:g}", enforced)
        false_refusals(enforced)
        predictor_errors(enforced)
    describe("with, at capacity", run(capacity, confidence=options.confidence[0], is_enforced=True))


if __name__ == "__main__":
    main()
