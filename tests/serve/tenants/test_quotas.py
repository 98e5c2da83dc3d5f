"""Quotas over several ingresses: what each admits, with the sums of the others at most one exchange old."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidRequest, Overloaded
from kvrelay.serve.tenants.quotas import (
    EXPIRE_S,
    Meter,
    QuotaExceeded,
    QuotaLedger,
    StoreQuotaTable,
    TenantLimits,
    UsageTable,
)

pytestmark = pytest.mark.pure

NAME = "search"
FOUR = TenantLimits(max_running=4)
PER_MINUTE = TenantLimits(tokens_per_minute=600)  # ten a second


class Ingresses:
    """So many ledgers around one registry, and the time."""

    def __init__(self, count, limits):
        self.limits, self.now_s, self.table = limits, 0.0, UsageTable()
        self.ledgers = [QuotaLedger() for _ in range(count)]
        self.exchange()

    def exchange(self):
        """Twice, so that each has heard what all others reported."""
        for _ in range(2):
            for number, ledger in enumerate(self.ledgers):
                report = ledger.report()
                answer = self.table.exchange(str(number), report, self.now_s)
                ledger.heard(report, answer, {NAME: self.limits}, self.now_s)

    def admits(self, number, *, sequences=1, tokens=0):
        """Whether it admits, and else after how long it may be asked again."""
        try:
            self.ledgers[number].admit(NAME, self.limits, sequences, tokens, self.now_s)
        except QuotaExceeded as error:
            return error.retry_after_s
        return True


# ---- running sequences


def test_running_sequences_are_counted_over_all_ingresses():
    cluster = Ingresses(3, FOUR)
    assert cluster.admits(0, sequences=2) is True and cluster.admits(1) is True
    cluster.exchange()
    assert cluster.admits(2) is True
    assert cluster.admits(2) == 1.0
    cluster.ledgers[0].release(NAME, 2)
    assert cluster.admits(0) is True  # its own are known at once
    cluster.exchange()
    assert cluster.admits(2) is True
    assert cluster.admits(2) == 1.0


def test_between_two_exchanges_each_admits_as_if_it_were_alone():
    cluster = Ingresses(2, FOUR)
    assert [cluster.admits(number, sequences=4) for number in (0, 1)] == [True, True]
    cluster.exchange()
    cluster.ledgers[0].release(NAME, 4)
    assert cluster.admits(0) == 1.0


def test_more_sequences_than_may_ever_run_are_no_matter_of_time():
    with pytest.raises(InvalidRequest, match="5 sequences are more than the 4"):
        Ingresses(1, FOUR).admits(0, sequences=5)


def test_what_a_dead_ingress_ran_is_forgotten():
    cluster = Ingresses(2, FOUR)
    cluster.admits(1, sequences=4)
    cluster.exchange()
    cluster.ledgers.pop()
    assert cluster.admits(0) == 1.0
    cluster.now_s += EXPIRE_S
    cluster.exchange()
    assert cluster.admits(0) is True


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.booleans()), max_size=40))
def test_with_an_exchange_after_each_step_no_more_than_the_quota_run(steps):
    cluster, running = Ingresses(3, FOUR), [[], [], []]
    for number, sequences, is_end in steps:
        if is_end and running[number]:
            cluster.ledgers[number].release(NAME, running[number].pop())
        elif cluster.admits(number, sequences=sequences) is True:
            running[number].append(sequences)
        cluster.exchange()
        assert sum(map(sum, running)) <= 4
    for number, left in enumerate(running):
        for sequences in left:
            cluster.ledgers[number].release(NAME, sequences)
    cluster.exchange()
    assert cluster.admits(0, sequences=4) is True


# ---- tokens per minute


def test_tokens_flow_back_with_time_and_retry_after_is_when_they_have():
    cluster = Ingresses(1, PER_MINUTE)
    assert cluster.admits(0, tokens=600) is True
    wait_s = cluster.admits(0, tokens=50)
    assert wait_s == pytest.approx(5.0)
    cluster.now_s += wait_s - 0.1
    assert cluster.admits(0, tokens=50) == pytest.approx(0.1)
    cluster.now_s += 0.2
    assert cluster.admits(0, tokens=50) is True


def test_output_tokens_count_as_they_come():
    cluster = Ingresses(1, PER_MINUTE)
    cluster.admits(0, tokens=100)
    cluster.ledgers[0].charge(NAME, PER_MINUTE, 520, cluster.now_s)
    assert cluster.admits(0, tokens=10) == pytest.approx(3.0)


def test_a_prompt_longer_than_a_minutes_tokens_waits_for_a_full_bucket_and_is_paid_off_after_it():
    cluster = Ingresses(1, PER_MINUTE)
    assert cluster.admits(0, tokens=1200) is True
    assert cluster.admits(0, tokens=1) == pytest.approx(60.1)
    assert cluster.admits(0, tokens=1200) == pytest.approx(120.0)


def test_an_idle_tenant_saves_up_one_minute_and_no_more():
    cluster = Ingresses(1, PER_MINUTE)
    cluster.now_s = 3600.0
    assert cluster.admits(0, tokens=600) is True
    assert cluster.admits(0, tokens=10) == pytest.approx(1.0)


def test_tokens_are_counted_over_all_ingresses_once_each():
    cluster = Ingresses(3, PER_MINUTE)
    for number in range(3):
        cluster.admits(number, tokens=100)
    for _ in range(3):
        cluster.exchange()
    for number in range(3):
        assert cluster.admits(number, tokens=310) == pytest.approx(1.0)
    assert cluster.admits(0, tokens=300) is True


def test_a_report_that_does_not_arrive_is_made_again():
    cluster = Ingresses(2, PER_MINUTE)
    cluster.admits(0, tokens=600)
    cluster.ledgers[0].returned(cluster.ledgers[0].report())
    cluster.exchange()
    assert cluster.admits(1, tokens=10) == pytest.approx(1.0)


def test_a_registry_that_starts_again_charges_nothing_twice():
    cluster = Ingresses(2, PER_MINUTE)
    cluster.admits(0, tokens=300)
    cluster.exchange()
    cluster.table = UsageTable()
    cluster.exchange()
    assert cluster.admits(1, tokens=310) == pytest.approx(1.0)
    cluster.admits(0, tokens=200)
    cluster.exchange()
    assert cluster.admits(1, tokens=110) == pytest.approx(1.0)


def test_an_ingress_that_starts_is_not_charged_for_the_past():
    cluster = Ingresses(1, PER_MINUTE)
    cluster.admits(0, tokens=600)
    cluster.exchange()
    cluster.ledgers.append(QuotaLedger())
    cluster.exchange()
    assert cluster.admits(1, tokens=600) is True


def test_what_is_put_back_after_its_report_is_set_off_against_later_tokens():
    cluster = Ingresses(2, PER_MINUTE)
    cluster.admits(0, tokens=500)
    cluster.exchange()
    cluster.ledgers[0].charge(NAME, PER_MINUTE, -500, cluster.now_s)
    cluster.exchange()
    assert cluster.admits(0, tokens=600) is True
    assert cluster.admits(1, tokens=110) == pytest.approx(1.0)  # it learns that from the next tokens
    cluster.exchange()
    assert cluster.admits(1, tokens=10) == pytest.approx(1.0)


# ---- changes of the file


def test_a_tenant_that_is_removed_is_forgotten_once_nothing_runs():
    ledger = QuotaLedger()
    ledger.admit(NAME, FOUR, 1, 0, 0.0)
    ledger.heard({}, {}, {}, 0.0)
    assert ledger.report() == {NAME: (1, 0)}
    ledger.release(NAME, 1)
    ledger.heard({}, {}, {}, 0.0)
    assert ledger.report() == {} and not ledger._uses


# ---- one request


def test_a_request_that_is_refused_costs_nothing_and_one_that_fails_later_does():
    ledger = QuotaLedger()
    limits = TenantLimits(max_running=1, tokens_per_minute=600)
    for has_output in (False, True):
        meter = Meter(ledger, NAME, limits, lambda: 0.0)
        with pytest.raises(Overloaded), meter.running(1, 400):
            if has_output:
                meter.charge(1)
            raise Overloaded("full", 1.0)
    with pytest.raises(QuotaExceeded) as caught:
        ledger.admit(NAME, limits, 1, 300, 0.0)
    assert caught.value.retry_after_s == pytest.approx(10.1)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")


# ---- of the store


def test_of_what_ingresses_have_read_of_the_store_the_least_holds_and_the_last_when_all_are_gone():
    table = StoreQuotaTable()
    assert table.merged() is None  # not: no tenant has a quota
    table.put("one", {"a": 5, "b": 1}, 0.0)
    table.put("other", {"a": 3}, 0.0)
    assert table.merged() == {"a": 3, "b": 1}
    table.put("one", {"a": 5}, EXPIRE_S / 2)
    assert table.merged() == {"a": 3}
    table.put("one", {"a": 5}, EXPIRE_S)  # `other` is gone
    assert table.merged() == {"a": 5}
    table.put("one", {}, EXPIRE_S)
    assert table.merged() == {}
