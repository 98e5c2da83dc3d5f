"""Quotas of tenants over all ingresses: sequences that run at once, and tokens per minute. Pure: times are the caller's
clock, in seconds.

Each ingress keeps a QuotaLedger and exchanges it about once a second through a UsageTable, which the registry keeps.
What the other ingresses admit in between is unknown: for so long each admits as if it were alone with the last sums.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kvrelay.errors import InvalidRequest, TryLater

EXPIRE_S = 5.0  # an ingress that has reported nothing for so long runs nothing
_RETRY_RUNNING_S = 1.0
Report = dict[str, tuple[int, int]]
"""By tenant: sequences that run, and tokens since the last report. As an answer: those of the other ingresses, and all
tokens that were ever reported.
"""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """None: no limit, or what every tenant has. Workers keep `weight` and `pin_share`, which come with each request;
    the store's nodes keep `store_bytes`.
    """

    weight: float | None = None
    max_running: int | None = None
    tokens_per_minute: int | None = None
    pin_share: float | None = None
    store_bytes: int | None = None

    @property
    def are_counted(self) -> bool:
        """Whether ingresses count what the tenant uses."""
        return self.max_running is not None or self.tokens_per_minute is not None


class QuotaExceeded(TryLater):
    """The tenant has used up a quota of its own."""

    own_code = "rate_limit_exceeded"


@dataclass(slots=True)
class TenantUse:
    """What one tenant uses. `debt`: tokens taken from a bucket of one minute's tokens, and not yet flown back."""

    running: int = 0  # sequences, at this ingress
    running_elsewhere: int = 0
    debt: float = 0.0
    paid_s: float = 0.0  # until when `debt` is computed
    unreported: int = 0  # tokens
    total: int | None = None  # tokens that all ingresses had reported; None: nothing is heard yet

    def charge(self, num_tokens: int, tokens_per_minute: int, now_s: float) -> None:
        """Take tokens from the bucket; negative: put them back."""
        flown_back = (now_s - self.paid_s) * tokens_per_minute / 60.0
        self.debt = max(0.0, max(0.0, self.debt - flown_back) + num_tokens)
        self.paid_s = now_s


class QuotaLedger:
    """What the tenants with quotas use at this ingress, and as last heard at the others."""

    def __init__(self) -> None:
        self._uses: dict[str, TenantUse] = {}

    def admit(self, name: str, limits: TenantLimits, num_sequences: int, num_tokens: int, now_s: float) -> None:
        """Count sequences as running and charge their prompts. Raises QuotaExceeded; InvalidRequest: it never fits.

        A prompt of more than a minute's tokens is admitted when the bucket is full, and paid off by the wait after it.
        """
        use, most, per_minute = self._uses.setdefault(name, TenantUse()), limits.max_running, limits.tokens_per_minute
        if most is not None and num_sequences > most:
            raise InvalidRequest(f"{num_sequences} sequences are more than the {most} that may run at once")
        if most is not None and use.running + use.running_elsewhere + num_sequences > most:
            raise QuotaExceeded(f"the quota of {most} running sequences is used up", _RETRY_RUNNING_S)
        if per_minute is not None:
            use.charge(0, per_minute, now_s)
            excess = use.debt + min(num_tokens, per_minute) - per_minute
            if excess > 0:
                message = f"the quota of {per_minute} tokens per minute is used up"
                raise QuotaExceeded(message, excess * 60.0 / per_minute)
        use.running += num_sequences
        self.charge(name, limits, num_tokens, now_s)

    def charge(self, name: str, limits: TenantLimits, num_tokens: int, now_s: float) -> None:
        """Charge tokens of an admitted request; negative: it was not served."""
        if limits.tokens_per_minute is not None:
            use = self._uses[name]
            use.charge(num_tokens, limits.tokens_per_minute, now_s)
            use.unreported += num_tokens

    def release(self, name: str, num_sequences: int) -> None:
        """So many of an admitted request's sequences have ended."""
        self._uses[name].running -= num_sequences

    def report(self) -> Report:
        """What the other ingresses are to know; its tokens count as reported unless they are `returned`."""
        report: Report = {}
        for name, use in self._uses.items():
            tokens = max(0, use.unreported)  # what was put back after its report is set off against later tokens
            use.unreported -= tokens
            if use.running or tokens:
                report[name] = (use.running, tokens)
        return report

    def returned(self, report: Report) -> None:
        """This report did not arrive."""
        for name, (_, tokens) in report.items():
            self._uses[name].unreported += tokens

    def heard(self, report: Report, answer: Report, limits: Mapping[str, TenantLimits], now_s: float) -> None:
        """The answer to this report. limits: of the tenants that there are now."""
        for name, own in limits.items():
            elsewhere, total = answer.get(name, (0, 0))
            use = self._uses.setdefault(name, TenantUse())
            use.running_elsewhere = elsewhere
            if use.total is not None and own.tokens_per_minute is not None:
                before = use.total if total >= use.total else 0  # less than before: the registry has started again
                use.charge(max(0, total - before - report.get(name, (0, 0))[1]), own.tokens_per_minute, now_s)
            use.total = total
        for name in [name for name, use in self._uses.items() if name not in limits and not use.running]:
            del self._uses[name]


class UsageTable:
    """The registry's: what each ingress runs, and the tokens that all have reported, by tenant."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[float, dict[str, int]]] = {}  # by ingress: when it reported, and what
        self._tokens: Counter[str] = Counter()

    def exchange(self, ingress: str, report: Report, now_s: float) -> Report:
        """Take one ingress's report; returns what it is to know of the others."""
        self._tokens.update({name: tokens for name, (_, tokens) in report.items()})
        self._running[ingress] = (now_s, {name: running for name, (running, _) in report.items()})
        self._running = {key: one for key, one in self._running.items() if now_s - one[0] < EXPIRE_S}
        others: Counter[str] = Counter()
        for key, (_, running) in self._running.items():
            if key != ingress:
                others.update(running)
        return {name: (others[name], self._tokens[name]) for name in others.keys() | self._tokens.keys()}


class StoreQuotaTable:
    """The registry's: most bytes of each tenant in the cluster's store, as the ingresses have read them."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[float, dict[str, int]]] = {}  # by ingress: when it reported, and what

    def put(self, ingress: str, quotas: dict[str, int], now_s: float) -> None:
        """Take one ingress's quotas, by tenant, in place of those that it had."""
        self._read[ingress] = (now_s, quotas)
        self._read = {key: one for key, one in self._read.items() if now_s - one[0] < EXPIRE_S}

    def merged(self) -> dict[str, int] | None:
        """The least that any ingress has read, so that all agree while a changed file reaches one after the other.

        None: none has reported.
        """
        merged: dict[str, int] = {}
        for _, quotas in self._read.values():
            merged |= {tenant: min(most, merged.get(tenant, most)) for tenant, most in quotas.items()}
        return merged if self._read else None


class Meter:
    """Counts the requests of one tenant against its quotas."""

    def __init__(self, ledger: QuotaLedger, name: str, limits: TenantLimits, clock: Callable[[], float]) -> None:
        self._ledger, self._name, self._limits, self._clock = ledger, name, limits, clock
        self._is_served = False

    @contextlib.contextmanager
    def running(self, num_sequences: int, num_prompt_tokens: int) -> Iterator[None]:
        """Around the work of one request. Raises as QuotaLedger.admit. A refusal, from which the client learns that it
        may try later, costs no tokens.
        """
        self._ledger.admit(self._name, self._limits, num_sequences, num_prompt_tokens, self._clock())
        try:
            yield
        except TryLater:
            if not self._is_served:
                self._charge(-num_prompt_tokens)
            raise
        finally:
            self._ledger.release(self._name, num_sequences)

    def charge(self, num_tokens: int) -> None:
        """So many output tokens have come."""
        self._is_served = True
        self._charge(num_tokens)

    def _charge(self, num_tokens: int) -> None:
        self._ledger.charge(self._name, self._limits, num_tokens, self._clock())
