"""The planner's target, rules and worker model: from settings, from a profile, or learned from the workers' reports;
and what all of it has learned, as bytes.

Pure.

Learned without a profile: the time of a prompt token, and a decode step's time as a constant plus a share for each
sequence, to which a chunk in the same step adds its tokens' time. Until batches of different sizes have been seen, a
sequence is assumed to cost a step at least what a token costs a prompt.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from kvrelay.cluster.autoscaling.feed import (
    KV_BYTES_PER_TOKEN,
    MAX_RUNNING,
    POOL_TOKENS,
    PREFILL_SPEED,
    RUNNING,
    STEP_S,
    Feed,
)
from kvrelay.cluster.autoscaling.retirement import Retiring
from kvrelay.cluster.autoscaling.room import Room
from kvrelay.cluster.autoscaling.start_times import StartTimes
from kvrelay.cluster.profiles.profile import SimulatorProfile
from kvrelay.config import Settings
from kvrelay.router.planning.planner import PlannerRules, PlannerState
from kvrelay.router.planning.types import PlanningTarget, SpeedCurve, WorkerModel
from kvrelay.router.slo.learning import DurationFit
from kvrelay.settings.cluster import PlannerSettings
from kvrelay.types import Role

DEFAULT_TTFT_S, DEFAULT_TPOT_S = 5.0, 0.1
ATTAINMENT = 0.9  # share of the requests to meet both targets; the usual P90 of an SLO
INTERVAL_S = 10.0  # between two observations of the load: some requests each, and short against a worker's start
PREFILL_GAIN = 0.2
_TYPICAL_BATCH = 8.0
_BUDGET = 512  # tokens per step without a profile: large enough that the fixed cost of a step vanishes


def planner_settings(settings: Settings) -> PlannerSettings:
    """The planner's settings, with the SLO's targets where it has none."""
    own = settings.planner
    return own.model_copy(
        update={
            "ttft_s": own.ttft_s or settings.slo.ttft_s or DEFAULT_TTFT_S,
            "tpot_s": own.tpot_s or settings.slo.tpot_s or DEFAULT_TPOT_S,
        }
    )


def target_of(settings: PlannerSettings) -> PlanningTarget:
    return PlanningTarget(settings.ttft_s or DEFAULT_TTFT_S, settings.tpot_s or DEFAULT_TPOT_S, ATTAINMENT)


def rules_of(settings: PlannerSettings, start_s: float) -> PlannerRules:
    """start_s: how long a worker's start takes."""
    return PlannerRules(horizon_s=start_s, hold_s=settings.scale_down_delay_s, switch_roles=settings.switch_roles)


def interval_of(settings: PlannerSettings) -> float:
    """Seconds between two observations: a count falls after two of them at least."""
    return min(INTERVAL_S, settings.scale_down_delay_s / 2)


def model_of(profile: SimulatorProfile) -> WorkerModel:
    """The worker that a profile describes, with the network between machines."""
    return WorkerModel(
        profile.prefill,
        profile.decode,
        pool_tokens=profile.pool_tokens,
        token_budget=profile.token_budget,
        max_running=profile.max_running,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        link_bytes_per_s=profile.link_bytes_per_s,
        workers_per_node=profile.workers_per_node,
        prefill_slowdown=profile.slowdown_of(Role.PREFILL),
        decode_slowdown=profile.slowdown_of(Role.DECODE),
    )


@dataclass(slots=True)
class LearnedModel:
    """A worker model from reports alone, without the network."""

    token_s: float = 0.0
    step: DurationFit = field(default_factory=lambda: DurationFit((1.0, _TYPICAL_BATCH)))
    step_s: float = 0.0  # the latest, whatever its batch

    def observe(self, workers: Iterable[Mapping[str, float]], now_s: float) -> None:
        """The latest report of every worker, of either role."""
        for values in workers:
            if (speed := values.get(PREFILL_SPEED, 0.0)) > 0:
                new = 1.0 / speed
                self.token_s += (PREFILL_GAIN if self.token_s else 1.0) * (new - self.token_s)
            step_s, running = values.get(STEP_S, 0.0), values.get(RUNNING, 0.0)
            if step_s > 0 and running >= 1:
                self.step_s = step_s
                self.step.observe((1.0, running), step_s, self._prior(), now_s)

    def _prior(self) -> tuple[float, float]:
        return max(self.step_s - self.token_s, self.step_s / 2), self.token_s

    def model(self, workers: Iterable[Mapping[str, float]], now_s: float) -> WorkerModel | None:
        """None while no prompt or no step has been measured. Sizes are the smallest worker's."""
        known = [values for values in workers if values.get(POOL_TOKENS, 0.0) > 0]
        if not known or self.token_s <= 0 or self.step_s <= 0:
            return None
        fixed_s, sequence_s = self.step.coefficients(self._prior(), now_s)
        return WorkerModel(
            prefill=SpeedCurve(0.0, 0.0, self.token_s, 0.0, 0.0),
            decode=SpeedCurve(fixed_s, 0.0, self.token_s, 0.0, 0.0, sequence_s - self.token_s),
            pool_tokens=round(min(values[POOL_TOKENS] for values in known)),
            token_budget=_BUDGET,
            max_running=round(min(values.get(MAX_RUNNING, 1.0) for values in known)),
            kv_bytes_per_token=round(max(values.get(KV_BYTES_PER_TOKEN, 0.0) for values in known)),
        )


logger = logging.getLogger("ray.serve")  # it runs in Serve's controller
VERSION = 2  # of the saved state


@dataclass(frozen=True, slots=True)
class PlannerMemory:
    """The policy's whole state, except the counts, which Serve keeps."""

    planner: PlannerState | None  # None: it has made no decision yet
    feed: Feed
    learned: LearnedModel
    retiring: dict[str, Retiring]  # by role
    ordered: dict[str, Role]  # the role that each worker was ordered to take
    rooms: dict[str, Room] = field(default_factory=dict)  # by role
    starts: StartTimes = field(default_factory=StartTimes)
    version: int = VERSION


def encoded(memory: PlannerMemory) -> bytes:
    return msgspec.msgpack.encode(memory)


def decoded(data: bytes) -> PlannerMemory | None:
    """None: nothing was saved, or another version wrote it."""
    if not data:
        return None
    try:
        memory = msgspec.msgpack.decode(data, type=PlannerMemory)
    except msgspec.DecodeError as error:  # another version's fields, too
        logger.warning("kvrelay planner: its saved state cannot be read, so it learns again: %s", error)
        return None
    return memory if memory.version == VERSION else None
