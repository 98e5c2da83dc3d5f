"""What a request is promised, and what it is predicted to see: frozen records. Pure."""

from dataclasses import dataclass
from typing import Literal

OnMiss = Literal["refuse", "queue"]
VerdictKind = Literal["admitted", "degraded", "probe", "queued", "refused"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """For one request on its workers. None: not known, since a worker is unmeasured or there is no such time."""

    ttft_s: float | None
    tpot_s: float | None
    ttft_factor: float  # that observed times stay below with the confidence that is asked for, over the above
    tpot_factor: float
    queue_s: float  # of the TTFT: prompts ahead
    batch: float  # sequences expected on the decode worker when the prefill ends, this one with them
    crowded_tpot_s: float | None = None  # a promise made to another there that this one would break
    is_ttft_stale: bool = False  # the computing worker has been silent: nothing says that it still holds
    is_tpot_stale: bool = False  # the decode worker has
    raw_ttft_s: float = 0.0  # as the model has it, without the worker's bias
    raw_tpot_s: float = 0.0
    own_sequences: int = 1  # of the batch, those that are its own or come with it

    @property
    def safe_ttft_s(self) -> float:
        """With the margin; 0 when unknown."""
        return (self.ttft_s or 0.0) * self.ttft_factor

    @property
    def safe_tpot_s(self) -> float:
        return (self.tpot_s or 0.0) * self.tpot_factor

    @property
    def idle_ttft_s(self) -> float:
        """With the margin, if nobody were ahead of it."""
        return self.safe_ttft_s * max(0.0, 1.0 - self.queue_s / self.raw_ttft_s) if self.raw_ttft_s else 0.0


@dataclass(frozen=True, slots=True)
class SloTarget:
    """A class of service: most seconds to the first token, and per token after it. None: as it comes."""

    name: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    priority: int | None = None  # in the workers' lines, of who is served under it; None: as the request says


@dataclass(frozen=True, slots=True)
class SloRequirement:
    """What a request wants: its class, then those that it degrades to; and what becomes of it when all are missed."""

    targets: tuple[SloTarget, ...]
    on_miss: OnMiss = "refuse"


@dataclass(frozen=True, slots=True)
class RejectedCandidate:
    """A way that was looked at and not taken, and what would have been missed there. Times without the margin."""

    prefill: str | None
    decode: str | None
    missed: tuple[str, ...]
    ttft_s: float | None
    tpot_s: float | None


@dataclass(frozen=True, slots=True)
class SloVerdict:
    """What was decided. `target` is the promise: None when there is none."""

    kind: VerdictKind
    wanted: SloTarget
    target: SloTarget | None
    prediction: Prediction
    missed: tuple[str, ...] = ()  # of the wanted: "ttft", "tpot", "others" (a promise to somebody else)
    retry_after_s: float = 0.0
    is_hopeless: bool = False  # idle workers would not meet it either
    rejected_candidates: tuple[RejectedCandidate, ...] = ()  # other ways that were looked at
