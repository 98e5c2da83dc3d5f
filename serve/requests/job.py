"""One HTTP request, checked and tokenised: its prompts, KV hints, queue rank and SLO. Imports no sockets."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvrelay.errors import InvalidRequest
from kvrelay.plane.messages import Beams, KvHints, Sampling
from kvrelay.router.objectives import SloRequirement, SloTarget, SloVerdict
from kvrelay.router.slo.admission import verdict_fields
from kvrelay.serve.telemetry.explain import Explain
from kvrelay.serve.telemetry.observer import RequestArrival
from kvrelay.serve.text.tokenizer import TextOptions
from kvrelay.settings.router import SloSettings

DEFAULT_CLASS = "default"
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready to be computed. `text` is what `echo` repeats."""

    token_ids: list[int]
    text: str
    sampling: Sampling
    discards_output: bool = False  # max_tokens 0: only the prompt's log-probabilities are wanted


@dataclass(frozen=True, slots=True)
class QueueRank:
    """What decides a request's place in the workers' queues; as in wire.SequenceRequest.

    `deadline_s` counts from the sequence's submission.
    """

    priority: int = 0
    deadline_s: float | None = None
    tenant: str = ""


# ---- SLO


class SloFields(BaseModel):
    """The request's field `slo`: the targets that a client wants, and what happens when they cannot be met."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    class_name: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(None, alias="class")
    ttft_s: Seconds | None = None  # overrides that of the class
    tpot_s: Seconds | None = None  # overrides that of the class
    on_miss: Literal["refuse", "queue"] | None = None


@dataclass(slots=True)
class SloRecord:
    """One HTTP request's SLO: judged once, with its first sequence; `verdict` is filled then."""

    requirement: SloRequirement
    num_sequences: int = 1  # of the whole request
    verdict: SloVerdict | None = None

    @property
    def must_be_reported(self) -> bool:
        """Whether the promise differs from the request."""
        return self.verdict is not None and self.verdict.target is not self.verdict.wanted

    @property
    def priority(self) -> int | None:
        """The queue priority of the promised class, or of the requested one before the verdict.

        None: the class has none.
        """
        target = self.verdict.target if self.verdict is not None else None
        return (target or self.requirement.targets[0]).priority

    def report(self) -> dict[str, object] | None:
        """For the response, under `kvrelay.slo`; None before the verdict."""
        return None if self.verdict is None else verdict_fields(self.verdict)


def slo_of(
    fields: SloFields | None, settings: SloSettings, num_sequences: int, *, own_priority: int | None = None
) -> SloRecord | None:
    """What the request asks; None when it asks for nothing and nothing is configured. Raises InvalidRequest.

    own_priority: of the body; overrides those of the classes.
    """
    if not settings.is_on:
        if fields is not None:
            raise InvalidRequest("slo: this server has no SLOs configured; see the settings slo.*", "slo")
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


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One HTTP request, checked and tokenised. Choices are numbered prompt by prompt.

    `num_samples` are computed for each prompt (OpenAI's `best_of`); the endpoint keeps those that it answers.
    """

    request_id: str
    prompts: list[Prompt]
    num_samples: int
    options: TextOptions
    echo: bool = False
    salt: str = ""
    hints: KvHints = field(default_factory=KvHints)
    rank: QueueRank = field(default_factory=QueueRank)
    force: Literal["local", "remote"] | None = None
    explain: Explain | None = None
    traceparent: str = ""
    beams: Beams | None = None  # then the samples are the results of one beam search
    arrival: RequestArrival | None = None
    slo: SloRecord | None = None

    def report(self) -> dict[str, Any] | None:
        """The response's field `kvrelay`: the explanation if requested, and the SLO verdict if it differs from the
        request.
        """
        report = {} if self.explain is None else self.explain.report()
        if self.slo is not None and (self.explain is not None or self.slo.must_be_reported):
            report["slo"] = self.slo.report()
        return report or None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.num_samples
