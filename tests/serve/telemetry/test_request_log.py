"""The log of requests is bounded, whatever comes: in requests, in stages, in words."""

import pytest

from kvrelay.errors import Overloaded
from kvrelay.plane.messages import Sampling, SequenceRequest, TokenOutput
from kvrelay.serve.api.ui import request_detail, request_row
from kvrelay.serve.telemetry.observer import STAGES_KEPT, WHY_CHARS, Arrival, RequestLog, RequestObserver, ServeStats

pytestmark = pytest.mark.pure


def request(name: str) -> SequenceRequest:
    return SequenceRequest(
        request_id=name, token_ids=[1, 2, 3], num_prompt_tokens=3, block_hashes=[], sampling=Sampling(max_tokens=5)
    )


class Observed:
    """One sequence under a clock that the test sets."""

    def __init__(self, log: RequestLog, now_s: float = 0.0, arrival: Arrival | None = None) -> None:
        self.now_s = now_s
        self.observer = RequestObserver(
            ServeStats(), log, request("r-0"), lambda: self.now_s, explain=None, arrival=arrival
        )
        (self.record,) = log.find("r-0")


def names(log: RequestLog, limit: int = 99) -> list[str]:
    return [record.request_id for record in log.newest(limit)]


def test_only_the_last_that_ended_are_kept():
    log = RequestLog(limit=3)
    for index in range(10):
        log.end(log.begin(request(f"r{index}-0"), float(index), None), "stop", index + 0.5)
    assert names(log) == ["r9-0", "r8-0", "r7-0"] and len(log) == 3
    assert log.find("r9-0") and not log.find("r6-0")


def test_what_runs_is_never_forgotten_for_what_has_ended():
    log = RequestLog(limit=2)
    long = log.begin(request("long-0"), 0.0, None)
    for index in range(5):
        log.end(log.begin(request(f"r{index}-0"), 1.0, None), "stop", 2.0)
    assert names(log) == ["long-0", "r4-0", "r3-0"] and names(log, 2) == ["long-0", "r4-0"]
    log.end(long, "client", 9.0)
    assert names(log) == ["long-0", "r4-0"] and len(log) == 2


def test_a_request_ends_once():
    log = RequestLog()
    record = log.begin(request("r-0"), 0.0, None)
    log.end(record, "client", 1.0)
    log.end(record, "stop", 2.0)
    assert (record.outcome, record.ended_s, len(log)) == ("client", 1.0, 1)


def test_a_request_that_is_tried_for_ever_keeps_its_first_and_last_stages():
    it = Observed(RequestLog())
    for index in range(3 * STAGES_KEPT):
        it.now_s = float(index)
        it.observer.attempt_failed("d0", "lost", f"{index}" + "x" * 9999)
    it.now_s = 999.0
    it.observer.ended("error")
    stages = request_detail(it.record, 999.0)["stages"]
    assert len(stages) == STAGES_KEPT and (stages[0]["name"], stages[-1]["name"]) == ("arrived", "ended")
    assert max(len(stage.get("because", "")) for stage in stages) == WHY_CHARS


def test_times_count_from_the_arrival_of_the_request_not_from_its_admission():
    it = Observed(RequestLog(), 5.0, (3.0, 4.5))
    it.now_s = 7.0
    it.observer.delivered(TokenOutput(request_id="r-0", position=0, token_ids=[1]))
    it.now_s = 8.0
    it.observer.ended("stop")
    row = request_row(it.record, 100.0)
    assert (row["ttft_s"], row["total_s"], row["age_s"]) == (4.0, 5.0, 97.0)
    assert [(stage["name"], stage["at_s"]) for stage in it.record.stages] == [
        ("arrived", 0.0),
        ("tokenised", 1.5),
        ("ended", 5.0),
    ]


def test_a_refusal_is_counted_by_its_code_and_told():
    log = RequestLog()
    record = log.begin(request("r-0"), 2.0, None)
    log.failed(record, Overloaded("the cluster is full", 1.0))
    log.end(record, "overloaded", 2.0)
    assert log.refusals == {"overloaded": 1} and log.newest(1)[0].why == "the cluster is full"
