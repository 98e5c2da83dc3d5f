"""SLO admission: what is predicted, how the prediction learns, and who is let in. Time is a number that we pass."""

import random
from dataclasses import replace
from itertools import count

import pytest

from kvrelay.config import settings_from
from kvrelay.errors import ConfigError, InvalidRequest
from kvrelay.plane.messages import Timings
from kvrelay.plane.reports import KvSnapshot, LoadReport, WorkerInfo
from kvrelay.router.decision.router import Router
from kvrelay.router.slo.admission import MAX_RETRY_S, judge
from kvrelay.router.slo.forecast import MIN_EVIDENCE, SILENT_S
from kvrelay.router.slo.learning import EVIDENCE_HALF_LIFE_S, WINDOW, Bias, DurationFit, Errors, LengthDistribution
from kvrelay.router.types import Decision, Prediction, RouteRequest, RoutingRefusal, SloRequirement, SloTarget
from kvrelay.serve.api.parameters import slo_of
from kvrelay.serve.api.schemas import SloFields
from kvrelay.serve.requests.retries import error_of_refusal
from kvrelay.serve.telemetry.explain import SloRecord
from kvrelay.settings.router import RouterSettings, SloSettings
from kvrelay.types import Fingerprint

pytestmark = pytest.mark.pure


BLOCK = 16
FINGERPRINT = Fingerprint(1, "m", "bfloat16", BLOCK, 2, 2, 8, "seed")
RATE = 1000.0  # prompt tokens a second
NUMBERS = count()


@pytest.fixture(autouse=True)
def no_margin(monkeypatch):
    """The median of the errors, which is 1."""
    monkeypatch.setattr("kvrelay.router.slo.forecast.TPOT_CONFIDENCE", 0.5)


def info(worker_id, role, epoch="e1"):
    return WorkerInfo(
        worker_id=worker_id,
        role=role,
        epoch=epoch,
        host="h",
        port=1,
        node_id="n",
        model="m",
        fingerprint=FINGERPRINT,
        block_size=BLOCK,
        num_blocks=100_000,
        max_model_len=100_000,
        max_running=256,
        kv_bytes_per_token=16,
        device="cpu",
        transports=["shm"],
    )


class Cluster:
    """A router over one worker of each role, and a clock. `TARGET` is what requests ask for, unless they say
    otherwise.
    """

    def __init__(self, *, is_measured=True):
        slo = SloSettings(ttft_s=5.0)
        self.router = Router(RouterSettings(local_prefill_tokens=0), tokens_per_hash=BLOCK, slo=slo)
        self.now_s, self.seconds_per_token = 100.0, 1 / RATE
        for worker_id, role in (("p", "prefill"), ("d", "decode")):
            self.router.worker_up(info(worker_id, role))
            self.router.apply_snapshot(worker_id, KvSnapshot(seq=0, hashes=[]))
        self.load("p", prefill_tokens_per_s=RATE)
        self.load("d", decode_step_s=0.01, running=1, used_blocks=10)
        if is_measured:
            self.measure()

    def measure(self):
        for tokens in (1000, 2000, 3000, 4000, 500):
            self.serve(self.ask(tokens))
        self.steps(lambda batch: 0.01 + 0.001 * batch)

    def load(self, worker_id, **fields):
        report = LoadReport(seq=1, free_blocks=100_000, total_blocks=100_000, **fields)
        self.router.apply_load(worker_id, report, self.now_s)

    def steps(self, step_s):
        """The decode worker tells what batches of 1 to 40 take."""
        for batch in range(1, 41):
            self.load("d", decode_step_s=step_s(batch), running=batch, used_blocks=batch)
        self.load("d", decode_step_s=step_s(1))  # and it is idle now

    def ask(self, tokens=1000, *, prompt=None, slo=None, max_tokens=100, **rest):
        name = prompt or f"own{next(NUMBERS)}"
        hashes = tuple(f"{name}-{i}".encode().ljust(16) for i in range(tokens // BLOCK))
        return RouteRequest(f"r{next(NUMBERS)}", hashes, tokens, max_tokens, force="remote", slo=slo, **rest)

    def send(self, request):
        return self.router.select_and_reserve(request, self.now_s)

    def first_token(self, request, decision):
        """The prompt is computed, alone, at the worker's true speed."""
        seconds = (request.num_tokens - decision.cached_tokens_prefill) * self.seconds_per_token
        self.now_s += seconds
        timings = Timings(queue_s=0.0, compute_s=seconds, num_chunks=1)
        self.router.on_first_token(
            request.request_id, self.now_s, timings=timings, cached_tokens=decision.cached_tokens_prefill
        )

    def serve(self, request, *, tpot_s=0.011, num_tokens=100):
        """All of it; returns what was decided."""
        choice = self.send(request)
        if isinstance(choice, Decision):
            self.first_token(request, choice)
            self.router.on_finished(request.request_id, num_tokens, tpot_s, self.now_s)
            self.router.on_end(request.request_id)
        return choice


def wants(ttft_s=None, tpot_s=None, *rest, on_miss="refuse"):
    return SloRequirement((SloTarget("c", ttft_s, tpot_s), *rest), on_miss)


def verdict(choice):
    found = choice.verdict
    assert (found.kind == "refused") == isinstance(choice, RoutingRefusal)
    return found.kind


# ---- what learns


def test_a_fit_finds_the_cost_of_each_feature():
    fit = DurationFit((1.0, 1000.0))
    for tokens in (100, 5000, 900, 2500, 40, 7000) * 8:
        fit.observe((1.0, tokens), 0.5 + tokens * 0.001, (0.0, 0.1), 0.0)
    fixed, each = fit.coefficients((0.0, 0.1), 0.0)
    assert fixed == pytest.approx(0.5, rel=0.05)
    assert each == pytest.approx(0.001, rel=0.05)


def test_a_fit_without_evidence_is_its_prior_and_goes_back_to_it():
    fit = DurationFit((1.0, 1000.0))
    assert fit.coefficients((0.0, 0.002), 0.0) == pytest.approx((0.0, 0.002))
    for _ in range(20):
        fit.observe((1.0, 1000.0), 10.0, (0.0, 0.002), 0.0)
    assert fit.coefficients((0.0, 0.002), 0.0)[1] * 1000 > 4
    assert fit.coefficients((0.0, 0.002), 40 * EVIDENCE_HALF_LIFE_S)[1] == pytest.approx(0.002, rel=0.01)


def test_no_cost_is_negative_whatever_is_observed():
    draw = random.Random(3)
    fit = DurationFit((1.0, 10.0, 100.0))
    for step in range(300):
        fit.observe(
            (1.0, draw.random() * 50, draw.random() * 500), draw.expovariate(5) + 1e-4, (0.01, 0.0, 0.0), step * 0.1
        )
        assert min(fit.coefficients((0.01, 0.0, 0.0), step * 0.1)) >= 0


@pytest.mark.parametrize(("before_s", "after_s"), [(0.1, 1.0), (1.0, 0.1)])
def test_a_fit_believes_a_change_up_as_soon_as_one_down(before_s, after_s):
    fit = DurationFit((1.0, 1.0, 1.0))
    for seconds, times in ((before_s, 150), (after_s, 150)):
        for _ in range(times):
            fit.observe((1.0, 1.0, 1.0), seconds, (0.3, 0.0, 0.0), 0.0)
    assert sum(fit.coefficients((0.3, 0.0, 0.0), 0.0)) == pytest.approx(after_s, rel=0.3)


@pytest.mark.parametrize("factor", [3.0, 0.4])
def test_a_bias_follows_a_worker_that_changes_and_comes_back(factor):
    bias = Bias(floor_s=0.0)
    for _ in range(40):
        bias.observe(1.0, factor, 0.0)
    assert bias.corrected(2.0, 0.0) == pytest.approx(2 * factor, rel=0.05)
    for _ in range(40):
        bias.observe(1.0, 1.0, 0.0)
    assert bias.corrected(2.0, 0.0) == pytest.approx(2.0, rel=0.05)


def test_a_bias_is_forgotten_in_time():
    bias = Bias(floor_s=0.0)
    for _ in range(40):
        bias.observe(1.0, 3.0, 0.0)
    assert bias.corrected(1.0, 600.0) == pytest.approx(1.0, rel=0.01)


def test_a_short_overhead_does_not_pass_for_a_slow_worker():
    bias = Bias(floor_s=0.05)
    for _ in range(40):
        bias.observe(0.001, 0.01, 0.0)  # ten times
    assert bias.corrected(10.0, 0.0) < 12.5


def test_the_margin_is_what_a_share_of_the_errors_stays_below_and_memory_is_bounded():
    errors = Errors()
    assert errors.quantile(0.9) == 1.0
    for _ in range(3 * WINDOW):
        errors.observe(1.0, 5.0)
    for step in range(WINDOW):
        errors.observe(1.0, 1 + step / WINDOW)
    assert errors.quantile(0.9) == pytest.approx(1.9, abs=0.02)  # the fives are out of the window
    assert {len(values) for window in errors._windows.values() for values in window} == {WINDOW}
    assert sum(errors.counts) == 4 * WINDOW


def test_a_margin_is_learned_from_predictions_of_about_the_same_size():
    errors = Errors()
    for _ in range(WINDOW):
        errors.observe(0.1, 0.15)
    assert errors.quantile(0.5, 2.0) == errors.quantile(0.5, 0.0) == pytest.approx(1.5)  # no other is known
    for _ in range(20):
        errors.observe(2.2, 2.0)
    assert errors.quantile(0.5, 1.9) == pytest.approx(2.0 / 2.2)
    assert errors.quantile(0.5, 0.12) == pytest.approx(1.5)
    assert errors.quantile(0.5, 8.0) == errors.quantile(0.5)


def test_an_output_that_is_longer_than_most_goes_on_for_longer():
    lengths = LengthDistribution()
    for _ in range(200):
        lengths.observe(100)
    for _ in range(20):
        lengths.observe(2000)
    assert lengths.survival(10, 30) > 0.9
    assert lengths.survival(10, 200) < 0.25
    assert lengths.survival(300, 200) > 0.8
    assert lengths.survival(1000, 0) == 1.0


# ---- TTFT


def test_what_is_not_measured_is_not_refused_for():
    cluster = Cluster(is_measured=False)
    for _ in range(3):
        choice = cluster.send(cluster.ask(50_000, slo=wants(ttft_s=0.01, tpot_s=1e-6)))
        assert (verdict(choice), choice.forecast.ttft_s, choice.forecast.tpot_s) == ("admitted", None, None)


def test_the_queue_and_the_own_prompt_are_predicted_together():
    cluster = Cluster()
    cluster.send(cluster.ask(4000))
    choice = cluster.send(cluster.ask(2000))
    assert choice.forecast.ttft_s == pytest.approx(6.0, rel=0.05)


def test_what_is_computed_of_the_first_in_line_no_longer_counts():
    cluster = Cluster()
    cluster.send(cluster.ask(4000))
    cluster.now_s += 3.0
    assert cluster.send(cluster.ask(2000)).forecast.ttft_s == pytest.approx(3.0, rel=0.05)


def test_a_request_is_refused_for_the_queue_and_told_when_it_would_fit():
    cluster = Cluster()
    assert verdict(cluster.send(cluster.ask(2000, slo=wants(ttft_s=5.0)))) == "admitted"
    for _ in range(2):
        cluster.send(cluster.ask(4000))
    refusal = cluster.send(cluster.ask(2000, slo=wants(ttft_s=5.0)))
    assert verdict(refusal) == "refused"
    assert refusal.reason == "slo" and refusal.verdict.missed == ("ttft",)
    assert refusal.retry_after_s == pytest.approx(7.0, rel=0.1)


def test_a_request_fits_once_its_retry_after_has_passed():
    cluster = Cluster()
    ahead = cluster.ask(8000)
    decision = cluster.send(ahead)
    refusal = cluster.send(cluster.ask(1000, slo=wants(ttft_s=5.0)))
    assert refusal.retry_after_s == pytest.approx(4.0, rel=0.1)
    cluster.now_s += refusal.retry_after_s - 0.5
    assert verdict(cluster.send(cluster.ask(1000, slo=wants(ttft_s=5.0)))) == "refused"
    cluster.now_s += 0.7
    assert verdict(cluster.send(cluster.ask(1000, slo=wants(ttft_s=5.0)))) == "admitted"
    assert decision.prefill == "p"


def test_a_cached_prompt_is_admitted_where_a_new_one_is_refused():
    cluster = Cluster()
    cached = cluster.ask(8000, prompt="seen", slo=wants(ttft_s=5.0))
    cluster.router.apply_snapshot("p", KvSnapshot(seq=1, hashes=list(cached.block_hashes)))
    assert verdict(cluster.send(cluster.ask(8000, slo=wants(ttft_s=5.0)))) == "refused"
    assert verdict(cluster.send(cached)) == "admitted"


def test_what_idle_workers_would_miss_too_is_said_to_be_hopeless():
    cluster = Cluster()
    refusal = cluster.send(cluster.ask(20_000, slo=wants(ttft_s=5.0)))
    assert refusal.verdict.is_hopeless and refusal.retry_after_s == MAX_RETRY_S
    assert "idle workers" in refusal.message
    cluster.send(cluster.ask(4000))
    refusal = cluster.send(cluster.ask(2000, slo=wants(ttft_s=5.0)))
    assert not refusal.verdict.is_hopeless


def test_a_prompt_that_costs_more_than_its_length_is_learned():
    """Attention: 8,000 tokens take more than eight times what 1,000 take."""
    cluster = Cluster(is_measured=False)
    for tokens in (500, 2000, 6000, 1000, 4000, 8000) * 6:
        cluster.seconds_per_token = (1 + tokens / 4000) / RATE
        cluster.serve(cluster.ask(tokens))
    for tokens in (700, 7000):
        seen_s = tokens * (1 + tokens / 4000) / RATE
        request = cluster.ask(tokens)
        assert cluster.send(request).forecast.ttft_s == pytest.approx(seen_s, rel=0.15)
        cluster.router.on_end(request.request_id)


# ---- TPOT: the batch when the prefill ends, not the one of now


def decoding(cluster, count, **asked):
    """So many sequences that have just begun to decode."""
    requests = [cluster.ask(16, **asked) for _ in range(count)]
    for request in requests:
        cluster.first_token(request, cluster.send(request))
    return requests


def test_the_step_is_predicted_from_the_batch():
    cluster = Cluster()
    decoding(cluster, 20, max_tokens=100_000)
    forecast = cluster.send(cluster.ask(16)).forecast
    assert forecast.batch == pytest.approx(21, rel=0.1)
    assert forecast.tpot_s == pytest.approx(0.031, rel=0.1)


def test_sequences_that_will_have_ended_do_not_count():
    """30 run now and have 100 tokens to go, which is over in 4 s; a prompt of 8,000 tokens is computed in 8."""
    cluster = Cluster()
    decoding(cluster, 30, max_tokens=100)
    assert verdict(cluster.send(cluster.ask(100, slo=wants(tpot_s=0.025)))) == "refused"
    assert verdict(cluster.send(cluster.ask(8000, slo=wants(tpot_s=0.025)))) == "admitted"


def test_sequences_that_will_have_come_do_count():
    """Nothing decodes now, but thirty prompts are on their way."""
    cluster = Cluster()
    assert verdict(cluster.send(cluster.ask(16, slo=wants(tpot_s=0.025)))) == "admitted"
    for _ in range(30):
        cluster.send(cluster.ask(16, max_tokens=100_000))
    refusal = cluster.send(cluster.ask(1000, slo=wants(tpot_s=0.025)))
    assert verdict(refusal) == "refused" and refusal.verdict.missed == ("tpot",)


def test_the_sequences_that_come_along_count():
    cluster = Cluster()
    assert verdict(cluster.send(cluster.ask(16, slo=wants(tpot_s=0.025)))) == "admitted"
    assert verdict(cluster.send(cluster.ask(16, slo=wants(tpot_s=0.025), companions=20))) == "refused"


def test_retry_after_of_a_full_batch_is_when_enough_of_it_will_have_ended():
    cluster = Cluster()
    decoding(cluster, 30, max_tokens=200)  # at 11 ms a token: over in 2.2 s
    refusal = cluster.send(cluster.ask(16, slo=wants(tpot_s=0.02)))
    assert 1.0 <= refusal.retry_after_s <= 4.0
    cluster = Cluster()
    for _ in range(300):
        cluster.router.forecast.lengths.observe(50_000)
    decoding(cluster, 30, max_tokens=100_000)
    assert cluster.send(cluster.ask(16, slo=wants(tpot_s=0.02))).retry_after_s == MAX_RETRY_S


def test_a_request_of_a_loose_class_does_not_break_the_promise_to_another():
    cluster = Cluster()
    decoding(cluster, 7, max_tokens=100_000, slo=wants(tpot_s=0.02))
    loose = [cluster.send(cluster.ask(16, max_tokens=100_000, slo=wants(tpot_s=1.0))) for _ in range(6)]
    assert verdict(loose[0]) == "admitted"
    assert verdict(loose[-1]) == "refused" and loose[-1].verdict.missed == ("others",)
    assert "another request" in loose[-1].message


def stalled(cluster, tpot_s, *, slo, times=40):
    """Outputs of which every second one shared its steps with prompts, and took `tpot_s` per token."""
    for number in range(times):
        request = cluster.ask(50, slo=slo)
        choice = cluster.send(request)
        if isinstance(choice, Decision):
            cluster.first_token(request, choice)
            cluster.router.on_finished(request.request_id, 100, tpot_s if number % 2 else 0.011, cluster.now_s)
            cluster.router.on_end(request.request_id)
    return cluster.send(cluster.ask(50, slo=slo))


@pytest.fixture
def seven_of_ten(monkeypatch):
    monkeypatch.setattr("kvrelay.router.slo.forecast.TPOT_CONFIDENCE", 0.7)


@pytest.mark.usefixtures("seven_of_ten")
def test_a_worker_that_holds_its_steps_to_the_target_refuses_nobody_for_them():
    """Steps with prompts take nearly the target, others a tenth: a margin over the mean would be beyond it."""
    choice = stalled(Cluster(), 0.095, slo=wants(tpot_s=0.1))
    prediction = choice.verdict.prediction
    assert verdict(choice) == "admitted" and prediction.tpot_s * prediction.tpot_factor > 0.1
    assert prediction.safe_tpot_s(0.1) == pytest.approx(0.095)
    unbounded = judge(wants(tpot_s=0.1), replace(prediction, raw_tpot_s=1.0), clears_in_s=None)
    assert (unbounded.kind, unbounded.missed) == ("refused", ("tpot",)), "the control: its decode steps are no shorter"


@pytest.mark.usefixtures("seven_of_ten")
def test_a_worker_that_does_not_hold_its_steps_to_the_target_is_not_believed_to():
    choice = stalled(Cluster(), 0.3, slo=wants(tpot_s=0.1))
    assert verdict(choice) == "refused" and choice.verdict.missed == ("tpot",)


# ---- long prompts


def queued(tokens, **asked):
    """The verdict on a prompt of so many tokens behind prompts of 3 s, where a mean one takes half a second."""
    cluster = Cluster()
    for _ in range(200):
        cluster.serve(cluster.ask(500))
    cluster.ahead = [cluster.ask(500) for _ in range(6)]
    cluster.sent = [cluster.send(request) for request in cluster.ahead]
    return cluster, cluster.send(cluster.ask(tokens, slo=wants(ttft_s=5.0, **asked)))


def test_a_long_prompt_leaves_a_long_queue_to_shorter_ones():
    for tokens, kind in ((500, "admitted"), (1000, "admitted"), (1900, "refused")):
        _, choice = queued(tokens)
        assert (verdict(choice), choice.verdict.prediction.safe_ttft_s < 5.0) == (kind, True)
    assert choice.verdict.missed == ("length",) and "several others late" in choice.message
    assert verdict(queued(1900, on_miss="queue")[1]) == "admitted"
    assert verdict(Cluster().send(Cluster().ask(1900, slo=wants(ttft_s=5.0)))) == "admitted"


def test_a_long_prompt_is_admitted_once_its_retry_after_has_passed():
    cluster, refusal = queued(1900)
    assert 1.0 <= refusal.retry_after_s < 3.0
    until_s = cluster.now_s + refusal.retry_after_s
    for request, decision in zip(cluster.ahead, cluster.sent, strict=True):
        if cluster.now_s + 0.5 <= until_s:
            cluster.first_token(request, decision)
    cluster.now_s = until_s
    assert verdict(cluster.send(cluster.ask(1900, slo=wants(ttft_s=5.0)))) == "admitted"


# ---- verdicts


def test_a_class_degrades_to_the_next_that_fits():
    cluster = Cluster()
    cluster.send(cluster.ask(8000))
    chain = [SloTarget("slow", 6.0), SloTarget("batch", 60.0), SloTarget("never", None)]
    choice = cluster.send(cluster.ask(1000, slo=wants(2.0, None, *chain)))
    assert verdict(choice) == "degraded" and choice.verdict.target.name == "batch"
    assert verdict(cluster.send(cluster.ask(1000, slo=wants(2.0, None, chain[0])))) == "refused"


def test_who_would_rather_wait_is_queued_without_a_promise():
    cluster = Cluster()
    cluster.send(cluster.ask(8000))
    choice = cluster.send(cluster.ask(1000, slo=wants(ttft_s=2.0, on_miss="queue")))
    assert verdict(choice) == "queued" and choice.verdict.target is None and choice.verdict.missed == ("ttft",)


def test_a_margin_hardly_shortens_a_prediction():
    """Else a queue that builds up would look short until its requests have ended."""
    cluster = Cluster()
    errors = cluster.router.forecast.ttft_errors
    for _ in range(WINDOW):
        errors.observe(1.0, 0.5)
    assert errors.quantile(0.5, 1.0) == pytest.approx(0.5)
    assert cluster.send(cluster.ask(1000, slo=wants(ttft_s=2.0))).forecast.ttft_factor == 0.95


def test_the_margin_grows_with_the_errors_and_with_the_confidence(monkeypatch):
    """Times vary by a factor of two either way: who wants to be sure refuses earlier."""
    kinds = {}
    for confidence in (0.5, 0.95):
        monkeypatch.setattr("kvrelay.router.slo.forecast.TTFT_CONFIDENCE", confidence)
        cluster, draw = Cluster(), random.Random(1)
        for _ in range(100):
            cluster.seconds_per_token = 2 ** draw.uniform(-1, 1) / RATE
            cluster.serve(cluster.ask(2000))
        choice = cluster.send(cluster.ask(2000, slo=wants(ttft_s=2.6)))
        kinds[confidence] = verdict(choice)
    assert kinds == {0.5: "admitted", 0.95: "refused"}


def test_without_an_slo_nobody_is_refused():
    """So it is with the attempts after a worker's death: the request has been let in."""
    cluster = Cluster()
    for _ in range(5):
        cluster.send(cluster.ask(8000))
    assert isinstance(cluster.send(cluster.ask(8000)), Decision)
    assert isinstance(cluster.send(cluster.ask(8000, slo=wants(ttft_s=1.0))), RoutingRefusal)


@pytest.mark.parametrize("ttft", [1.0, None])
def test_a_verdict_needs_no_times_that_were_not_asked_for(ttft):
    prediction = Prediction(None, None, 1.0, 1.0, 0.0, 1.0)
    assert judge(wants(ttft_s=ttft), prediction, clears_in_s=None).kind == "admitted"


# ---- recovery


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_the_forecast_follows_a_worker_that_gets_slower_or_faster(factor):
    cluster = Cluster()
    cluster.seconds_per_token = factor / RATE
    for _ in range(25):
        cluster.serve(cluster.ask(2000))
    request = cluster.ask(2000)
    assert cluster.send(request).forecast.ttft_s == pytest.approx(2 * factor, rel=0.2)
    cluster.router.on_end(request.request_id)
    cluster.seconds_per_token = 1 / RATE
    for _ in range(25):
        cluster.serve(cluster.ask(2000))
    assert cluster.send(cluster.ask(2000)).forecast.ttft_s == pytest.approx(2.0, rel=0.2)


def test_who_was_slow_once_is_not_refused_for_ever():
    """Everybody wants 4 s. A worker that took 20 is refused for; after a silence one request may try."""
    cluster = Cluster()
    cluster.seconds_per_token = 10 / RATE
    for _ in range(20):
        cluster.serve(cluster.ask(2000))
    cluster.seconds_per_token = 1 / RATE  # it is well again, but nobody knows
    assert verdict(cluster.send(cluster.ask(2000, slo=wants(ttft_s=4.0)))) == "refused"
    kinds = []
    for _ in range(40):
        cluster.now_s += SILENT_S / 2
        kinds.append(verdict(cluster.serve(cluster.ask(2000, slo=wants(ttft_s=4.0)))))
    assert kinds[0] == "refused" and "probe" in kinds
    assert kinds[-1] == "admitted"


def test_who_computes_no_prompt_because_it_was_slow_once_is_tried_again_though_it_decodes():
    cluster = Cluster()

    def ask_decode_worker(tokens=2000, **rest):
        return replace(cluster.ask(tokens, **rest), force="local")

    running = cluster.ask(2000)
    cluster.first_token(running, cluster.send(running))
    cluster.load("d", prefill_tokens_per_s=RATE, decode_step_s=0.01)
    cluster.seconds_per_token = 10 / RATE
    for _ in range(20):
        cluster.serve(ask_decode_worker())
    for waited_s, expected in ((0.0, "refused"), (SILENT_S, "probe"), (0.0, "refused")):
        cluster.now_s += waited_s
        cluster.load("d", decode_step_s=0.01 + cluster.now_s / 1e6, running=1, used_blocks=125)
        assert verdict(cluster.send(ask_decode_worker(slo=wants(ttft_s=4.0)))) == expected


def test_a_prompt_that_another_passed_took_only_what_was_left_of_it():
    """Workers tell how long a prompt was under way, with the steps of prompts that went before it."""
    cluster = Cluster()
    long, short = cluster.ask(10_000), cluster.ask(1000)
    cluster.send(long)
    cluster.send(short)
    for request, seconds in ((long, 10.0), (short, 1.0)):
        cluster.now_s += seconds
        timings = Timings(queue_s=0.0, compute_s=10.0, num_chunks=1)
        cluster.router.on_first_token(request.request_id, cluster.now_s, timings=timings)
    costs = cluster.router.forecast._workers["p"].prefill_costs(cluster.now_s)
    assert costs[0] + 1000 * costs[1] == pytest.approx(1.0, rel=0.05)


def test_only_one_request_tries_at_a_time():
    cluster = Cluster()
    cluster.seconds_per_token = 10 / RATE
    for _ in range(20):
        cluster.serve(cluster.ask(2000))
    cluster.now_s += SILENT_S
    kinds = [verdict(cluster.send(cluster.ask(2000, slo=wants(ttft_s=4.0)))) for _ in range(3)]
    assert kinds == ["probe", "refused", "refused"]


def test_a_worker_that_starts_anew_is_measured_anew():
    cluster = Cluster()
    assert verdict(cluster.send(cluster.ask(20_000, slo=wants(ttft_s=1.0)))) == "refused"
    cluster.router.worker_up(info("p", "prefill", epoch="e1"))  # only reconnected
    assert verdict(cluster.send(cluster.ask(20_000, slo=wants(ttft_s=1.0)))) == "refused"
    cluster.router.worker_up(info("p", "prefill", epoch="e2"))
    assert verdict(cluster.send(cluster.ask(20_000, slo=wants(ttft_s=1.0)))) == "admitted"


# ---- nothing leaks


def test_whatever_happens_nothing_is_left():
    draw, cluster = random.Random(7), Cluster()
    open_ids = []
    for step in range(600):
        cluster.now_s += draw.random()
        request = cluster.ask(draw.randrange(1, 3000), slo=wants(ttft_s=draw.choice([0.5, 20.0])))
        if isinstance(cluster.send(request), Decision):
            open_ids.append(request.request_id)
        if open_ids and draw.random() < 0.5:
            request_id = open_ids.pop(draw.randrange(len(open_ids)))
            if draw.random() < 0.7:
                cluster.router.on_first_token(request_id, cluster.now_s, timings=Timings(compute_s=0.5))
                cluster.router.on_finished(request_id, 30, 0.01, cluster.now_s)
            cluster.router.on_end(request_id)
        if step % 100 == 99:
            cluster.router.worker_down("p")
            cluster.router.worker_up(info("p", "prefill", epoch=f"e{step}"))
    forecast = cluster.router.forecast
    assert len(forecast) == len(open_ids) > 0
    for request_id in open_ids:
        cluster.router.on_end(request_id)
    assert len(forecast) == 0
    assert not any(worker.queue or worker.running for worker in forecast._workers.values())
    cluster.router.worker_down("p")
    cluster.router.worker_down("d")
    assert not forecast._workers


def test_a_refused_request_is_counted_nowhere():
    cluster = Cluster()
    cluster.send(cluster.ask(8000))
    before = [(view.assigned_requests, view.assigned_tokens) for view in cluster.router.workers()]
    assert isinstance(cluster.send(cluster.ask(8000, slo=wants(ttft_s=1.0))), RoutingRefusal)
    assert [(view.assigned_requests, view.assigned_tokens) for view in cluster.router.workers()] == before
    assert len(cluster.router.forecast) == 1


def test_without_settings_there_is_no_forecast():
    assert Router(RouterSettings(), tokens_per_hash=BLOCK, slo=SloSettings()).forecast is None
    assert MIN_EVIDENCE > 1


# ---- settings and requests

CLASSES = {"chat": {"ttft_s": 1.0, "tpot_s": 0.05, "degrade_to": "batch"}, "batch": {"ttft_s": 60.0}}


@pytest.mark.parametrize(
    ("slo", "told"),
    [
        ({"ttft_s": 0}, "slo.ttft_s"),
        ({"tpot_s": float("inf")}, "slo.tpot_s"),
        ({"on_miss": "drop"}, "slo.on_miss"),
        ({"ttft": 1}, "slo.ttft_s"),
        ({"classes": {"a": {"ttft": 1}}}, "slo.classes.a.ttft"),
        ({"classes": {"a": {"degrade_to": "b"}}}, "no class 'b'"),
        ({"classes": {"a": {"degrade_to": "b"}, "b": {"degrade_to": "a"}}}, "leads back"),
        ({"classes": {"default": {}}}, "slo.classes.default"),
        ({"classes": {"a b": {}}}, "is no name"),
        ({"classes": {"a": {"priority": 9}}}, "slo.classes: .*less than or equal to 8"),
    ],
)
def test_settings_that_cannot_be_are_named(slo, told):
    with pytest.raises(ConfigError, match=told):
        settings_from({"slo": slo})


def asked(fields, slo, num_sequences=1, **own):
    fields = SloFields.model_validate(fields) if fields is not None else None
    settings = SloSettings(**slo)
    return slo_of(fields, settings if settings.is_on else None, num_sequences, **own)


def test_a_request_takes_its_class_and_may_override_its_times():
    assert asked(None, {"ttft_s": 2.0}).requirement == SloRequirement((SloTarget("default", 2.0, None),))
    record = asked({"class": "chat", "tpot_s": 0.2, "on_miss": "queue"}, {"classes": CLASSES}, 3)
    assert record.requirement == SloRequirement((SloTarget("chat", 1.0, 0.2), SloTarget("batch", 60.0, None)), "queue")
    assert record.num_sequences == 3


def test_a_class_may_say_where_its_requests_stand_in_line():
    slo = {"classes": {"chat": CLASSES["chat"] | {"priority": -2}, "batch": {"priority": 3}, "plain": {}}}
    assert asked({"class": "chat", "ttft_s": 9.0}, slo).priority == -2
    assert asked({"class": "plain"}, slo).priority is asked(None, slo).priority is None
    assert asked({"class": "chat"}, slo, own_priority=0).priority is None, "the body's own counts"


@pytest.mark.parametrize(
    ("queue", "rest", "priority"), [(0, (), -2), (8000, (SloTarget("batch", 60.0, None, 3),), 3), (8000, (), -2)]
)
def test_who_is_served_under_another_class_stands_where_that_one_says(queue, rest, priority):
    cluster = Cluster()
    if queue:
        cluster.send(cluster.ask(queue))
    record = SloRecord(SloRequirement((SloTarget("chat", 2.0, None, -2), *rest), "queue"))
    record.verdict = cluster.send(cluster.ask(1000, slo=record.requirement)).verdict
    assert record.priority == priority


def test_a_class_that_is_not_there_is_refused_and_so_is_an_slo_where_none_is_configured():
    with pytest.raises(InvalidRequest, match="only default, chat, batch"):
        asked({"class": "gold"}, {"classes": CLASSES})
    with pytest.raises(InvalidRequest, match="no SLOs configured"):
        asked({"ttft_s": 1.0}, {})
    assert asked(None, {}) is None


def test_a_refusal_tells_what_was_wanted_and_what_is_predicted():
    cluster = Cluster()
    cluster.send(cluster.ask(8000))
    error = error_of_refusal(cluster.send(cluster.ask(1000, slo=wants(ttft_s=2.0))))
    assert (error.status, error.code) == (429, "slo_unreachable")
    assert error.slo["wanted"] == {"ttft_s": 2.0, "tpot_s": None}
    assert error.slo["predicted"]["ttft_s"] == pytest.approx(9.0, rel=0.1)
    assert error.slo["missed"] == ["ttft"]


def test_only_an_answer_without_its_promise_is_told_unasked():
    for on_miss, is_told in (("queue", True), ("refuse", False)):
        cluster = Cluster()
        if is_told:
            cluster.send(cluster.ask(8000))
        record = SloRecord(wants(ttft_s=2.0, on_miss=on_miss))
        assert not record.must_be_reported and record.report() is None
        record.verdict = cluster.send(cluster.ask(1000, slo=record.requirement)).verdict
        assert record.must_be_reported is is_told


def test_a_few_outcomes_that_were_stalled_do_not_close_a_worker():
    """A worker is chosen, refused, and never heard of again: one in three requests went so."""
    cluster = Cluster()
    for _ in range(6):
        request = cluster.ask(500, slo=wants(ttft_s=5.0, tpot_s=0.1))
        decision = cluster.send(request)
        assert isinstance(decision, Decision)
        cluster.first_token(request, decision)
        cluster.router.on_finished(request.request_id, 5, 0.3, cluster.now_s)  # twenty times what a step takes
        cluster.router.on_end(request.request_id)
    assert verdict(cluster.send(cluster.ask(500, slo=wants(ttft_s=5.0, tpot_s=0.1)))) in ("admitted", "degraded")


@pytest.mark.parametrize(("idle", "kind"), [(2, "queued"), (1, "refused")])
def test_a_prompt_that_is_late_on_any_worker_is_served_while_another_one_stays_idle(idle, kind):
    cluster = Cluster()
    cluster.router.worker_up(info("q", "prefill"))
    cluster.router.apply_snapshot("q", KvSnapshot(seq=0, hashes=[]))
    cluster.load("q", prefill_tokens_per_s=RATE / 2, queued_tokens=0 if idle == 2 else 100, waiting=int(idle == 1))
    assert verdict(cluster.send(cluster.ask(9000, slo=wants(ttft_s=5.0)))) == kind


@pytest.mark.parametrize(("busy", "kind"), [(3, "queued"), (4, "refused")])
def test_a_prompt_that_is_late_on_any_worker_is_refused_where_less_than_half_of_them_is_idle(busy, kind):
    """Two or three of six are: what comes next would soon wait for the one that it takes."""
    cluster = Cluster()
    for place, name in enumerate("qrstu"):
        cluster.router.worker_up(info(name, "prefill"))
        cluster.router.apply_snapshot(name, KvSnapshot(seq=0, hashes=[]))
        is_busy = place < busy
        cluster.load(name, prefill_tokens_per_s=RATE / 2, queued_tokens=100 * is_busy, waiting=int(is_busy))
    assert verdict(cluster.send(cluster.ask(9000, slo=wants(ttft_s=5.0)))) == kind
