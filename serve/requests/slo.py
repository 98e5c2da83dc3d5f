"""A request's SLO: from its field `slo` and the settings to what the router is asked, and the refusal as an error.

Imports no sockets.
"""

from dataclasses import dataclass, replace
from typing import Any

from kvrelay.errors import InvalidRequest, RequestError
from kvrelay.router.objectives import SloRequirement, SloTarget, SloVerdict
from kvrelay.router.slo.admission import verdict_fields
from kvrelay.router.types import Refusal
from kvrelay.serve.api.schemas import SloFields
from kvrelay.settings.router import SloSettings

DEFAULT_CLASS = "default"


class SloUnreachable(RequestError):
    """The SLO that was asked for would be missed; nothing was computed. HTTP 429, with Retry-After."""

    def __init__(self, message: str, retry_after_s: float, slo: dict[str, Any]) -> None:
        super(RequestError, self).__init__(message, retry_after_s, slo)
        self.message, self.param, self.status, self.code = message, "slo", 429, "slo_unreachable"
        self.retry_after_s, self.slo = retry_after_s, slo


def slo_refusal(refusal: Refusal) -> SloUnreachable:
    """The error for a refusal of reason "slo"."""
    assert refusal.verdict is not None
    return SloUnreachable(refusal.message, refusal.retry_after_s, verdict_fields(refusal.verdict))


@dataclass(slots=True)
class SloRecord:
    """One HTTP request's SLO: judged once, with its first sequence; `verdict` is filled then."""

    ask: SloRequirement
    num_sequences: int = 1  # of the whole request
    verdict: SloVerdict | None = None

    @property
    def must_be_told(self) -> bool:
        """Whether the answer is not what was asked for."""
        return self.verdict is not None and self.verdict.target is not self.verdict.wanted

    @property
    def priority(self) -> int | None:
        """In line, as the class says under which it is served; as long as that is not known, its own class. None: says nothing."""
        target = self.verdict.target if self.verdict is not None else None
        return (target or self.ask.targets[0]).priority

    def told(self) -> dict[str, object] | None:
        """For the answer, under `kvrelay.slo`; None before it is judged."""
        return None if self.verdict is None else verdict_fields(self.verdict)


def slo_of(
    fields: SloFields | None, settings: SloSettings, num_sequences: int, *, own_priority: int | None = None
) -> SloRecord | None:
    """What the request asks; None when it asks for nothing and nothing is configured. Raises InvalidRequest.

    own_priority: of the body, over those of the classes.
    """
    if not settings.is_on:
        if fields is not None:
            raise InvalidRequest("slo: this server promises no times; see the settings slo.*", "slo")
        return None
    fields = fields or SloFields()
    targets = _targets(fields.class_name or DEFAULT_CLASS, settings)
    own = targets[0]
    ttft_s = own.ttft_s if fields.ttft_s is None else fields.ttft_s
    tpot_s = own.tpot_s if fields.tpot_s is None else fields.tpot_s
    asked = [SloTarget(own.name, ttft_s, tpot_s, own.priority), *targets[1:]]
    if own_priority is not None:
        asked = [replace(target, priority=None) for target in asked]
    return SloRecord(SloRequirement(tuple(asked), fields.on_miss or settings.on_miss), num_sequences)


def _targets(name: str, settings: SloSettings) -> list[SloTarget]:
    """The class and those that it degrades to. Raises InvalidRequest."""
    if name == DEFAULT_CLASS:
        return [SloTarget(name, settings.ttft_s, settings.tpot_s)]
    targets: list[SloTarget] = []
    following: str | None = name
    while following is not None:
        found = settings.classes.get(following)
        if found is None:
            known = ", ".join([DEFAULT_CLASS, *settings.classes])
            raise InvalidRequest(f"slo.class: there is no class {following[:64]!r}, only {known}", "slo.class")
        targets.append(SloTarget(following, found.ttft_s, found.tpot_s, found.priority))
        following = found.degrade_to
    return targets
