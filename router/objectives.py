"""Service-level objectives of requests, and predictions of the latency they will see: frozen records. Pure."""

from dataclasses import dataclass
from typing import Literal

OnMiss = Literal["refuse", "queue"]
VerdictKind = Literal["admitted", "degraded", "probe", "queued", "refused"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted latency of one request on its workers. None: unknown (an unmeasured worker), or not applicable."""

    ttft_s: float | None
    tpot_s: float | None
    ttft_factor: float  # margin: observed over predicted TTFT stays below it with the configured confidence
    tpot_factor: float
    queue_s: float  # part of the TTFT: prompts ahead
    batch: float  # sequences expected on the decode worker when the prefill ends, this one included
    crowded_tpot_s: float | None = None  # another request's TPOT target there that this one would break
    is_ttft_stale: bool = False  # nothing was learned of the computing worker for a while
    is_tpot_stale: bool = False  # nothing was learned of the decode worker for a while
    raw_ttft_s: float = 0.0  # the model's, without the worker's bias
    raw_tpot_s: float = 0.0
    own_sequences: int = 1  # of the batch, those of this request and its companions

    @property
    def safe_ttft_s(self) -> float:
        """With the margin; 0 if unknown."""
        return (self.ttft_s or 0.0) * self.ttft_factor

    @property
    def safe_tpot_s(self) -> float:
        return (self.tpot_s or 0.0) * self.tpot_factor

    @property
    def idle_ttft_s(self) -> float:
        """With the margin, with an empty queue."""
        return self.safe_ttft_s * max(0.0, 1.0 - self.queue_s / self.raw_ttft_s) if self.raw_ttft_s else 0.0


@dataclass(frozen=True, slots=True)
class SloTarget:
    """A service class: longest TTFT, and longest time per token after it, in seconds. None: no target."""

    name: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    priority: int | None = None  # of its requests, in the workers' queues; None: the request's own


@dataclass(frozen=True, slots=True)
class SloRequirement:
    """A request's service class, then those that it may degrade to; and what happens if all are missed."""

    targets: tuple[SloTarget, ...]
    on_miss: OnMiss = "refuse"


@dataclass(frozen=True, slots=True)
class RejectedCandidate:
    """A candidate that was evaluated and not chosen, and the targets that it would miss. Times without the margin."""

    prefill: str | None
    decode: str | None
    missed: tuple[str, ...]
    ttft_s: float | None
    tpot_s: float | None


@dataclass(frozen=True, slots=True)
class SloVerdict:
    """The decision under an SLO. `target` is the accepted target; None: none."""

    kind: VerdictKind
    wanted: SloTarget
    target: SloTarget | None
    prediction: Prediction
    missed: tuple[str, ...] = ()  # of the wanted target: "ttft", "tpot", "others" (the target of another request)
    retry_after_s: float = 0.0
    is_hopeless: bool = False  # idle workers would not meet it either
    rejected_candidates: tuple[RejectedCandidate, ...] = ()  # other candidates that were evaluated
