"""What bench.router.policies compares, and on which terms: contenders, levels, and the scenario of both.

Levels:

    a   placement alone: one split for all, workers first come, first served, nothing deferred or refused, every prompt
        computed by a prefill worker
    b   the product's queue rules, deferral and limits for all, each contender at its own best split of the same number
        of workers; decode workers that compute prompts of their own accord, and, under an SLO, workers that do
        both and share requests, are `joint`'s alone
    c   as b, and each contender with its project's own conditional disaggregation and admission

On all of them a worker has the profile's memory. Contenders that assume KV to be fetched have the profile's host memory
below the pool, and the cluster's store; so has one of ours, for comparison.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from kvrelay.cluster.commands.settings_flags import with_pairs
from kvrelay.cluster.profiles.profile import SimulatorProfile
from kvrelay.cluster.simulator.scenario import Scenario, scenario_from
from kvrelay.router.policies.base import CostModel, Options, RoutingContext, RoutingPolicy, WorkerTable
from kvrelay.router.policies.cost import UNSET_SHARE, targets
from kvrelay.router.policies.selection import build_policy
from kvrelay.router.types import Candidate, RouteRequest
from kvrelay.settings.router import RouterSettings

PEERS = "bench.router.peer_policies"
"""Policies of other projects, named by their paths."""
NO_LIMIT = 1_000_000


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy with its options."""

    policy: str
    options: Options | None = None
    own: tuple[Options, ...] = ()  # at level c: the project's defaults, then others that are tried
    has_admission: bool = False  # of its project, with the targets as its limits, at level c
    has_store: bool = False
    is_ours: bool = False


_DYNAMO = (
    {"conditional": "isl_bounding"},
    *({"conditional": "isl_or_load", "prefill_busy_threshold": busy} for busy in (1.0, 4.0, 16.0, 40.0)),
    {"conditional": "prefill_load", "prefill_busy_threshold": 16.0, "decode_busy_threshold": 0.9},
)
_LLM_D: tuple[Options, ...] = tuple({"non_cached_tokens": tokens} for tokens in (16, 2048, 8192))
_MOONCAKE: tuple[Options, ...] = tuple({"balancing_threshold": threshold} for threshold in (1.0, 4.0))

CONTENDERS: dict[str, Contender] = {
    **{name: Contender(name) for name in ("round_robin", "least_loaded", "power_of_two", "session", "prefix_affinity")},
    "sglang": Contender(f"{PEERS}.sglang:Sglang"),
    "llm_d": Contender(f"{PEERS}.llm_d:LlmD", own=_LLM_D),
    "dynamo": Contender(f"{PEERS}.dynamo:Dynamo", own=_DYNAMO),
    "dynamo, credit 4": Contender(f"{PEERS}.dynamo:Dynamo", {"credit": 4.0}, own=_DYNAMO),
    "mooncake": Contender(f"{PEERS}.mooncake:Mooncake", own=_MOONCAKE, has_admission=True, has_store=True),
    "mooncake, no store": Contender(
        f"{PEERS}.mooncake:Mooncake", {"balancing_threshold": float("inf")}, own=({},), has_admission=True
    ),
    "queue + 16 x prefill": Contender(f"{PEERS}.queue_plus_prefill:QueuePlusPrefill"),
    "joint": Contender("joint", is_ours=True),
    "joint, store": Contender("joint", has_store=True, is_ours=True),
}


@dataclass(frozen=True, slots=True)
class Level:
    """See the module."""

    title: str
    has_rules: bool = True  # the product's queue rules, deferral and limits
    has_own: bool = False  # each project's own conditional disaggregation and admission

    def variants(self, contender: Contender) -> tuple[Options, ...]:
        """The options of which the best are searched, the project's defaults first."""
        return contender.own or ({},) if self.has_own else ({},)


LEVELS = {
    "a": Level("placement alone", has_rules=False),
    "b": Level("each at its best split, with the same queue rules and deferral"),
    "c": Level("with each project's own conditional disaggregation and admission", has_own=True),
}


class Targets(NamedTuple):
    """What counts as in time, seconds, and whether they are the cluster's settings (slo.*)."""

    ttft_s: float
    tpot_s: float
    has_slo: bool


def knows_targets(level: Level, contender: Contender) -> bool:
    """Whether a contender can do anything with targets: without the product's rules only our placement can."""
    return level.has_rules or contender.is_ours


def scenario_of(
    level: Level,
    contender: Contender,
    variant: Options,
    wanted: Targets,
    profile: SimulatorProfile,
    *,
    prefill: int,
    workers: int,
    seed: int = 0,
    pairs: tuple[str, ...] = (),
) -> Scenario:
    """The cluster: `prefill` of the `workers` are prefill workers; 0: all compute the prompts that they decode,
    or, under an SLO, also others' (joint).

    pairs: settings over the level's, as in --set.
    """
    is_bound = not level.has_rules or not (contender.is_ours or (level.has_own and contender.own))
    options: Options = {"of": contender.policy, "rules": level.has_rules, "remote": bool(prefill) and is_bound}
    options |= (contender.options or {}) | variant
    has_admission = level.has_own and contender.has_admission
    if has_admission:
        options |= {"ttft_slo_s": wanted.ttft_s, "tbt_slo_s": wanted.tpot_s}
    router: dict[str, Any] = {"policy": f"{__name__}:OnTerms", "policy_options": options, "max_inflight": NO_LIMIT}
    settings: dict[str, dict[str, Any]] = {"router": router}
    if not level.has_rules:
        router["max_queue_s"] = 3600.0
    if wanted.has_slo:
        on_miss = "refuse" if level.has_rules and not has_admission else "queue"
        settings["slo"] = {"ttft_s": wanted.ttft_s, "tpot_s": wanted.tpot_s, "on_miss": on_miss}
    if contender.has_store:
        host_bytes = profile.tier_blocks["host"] * profile.block_size * profile.kv_bytes_per_token
        settings["cache"] = {"host_memory": host_bytes, "remote": "cluster"}
    return scenario_from(
        {
            "prefill": prefill,
            "decode": workers - prefill,
            "seed": seed,
            "ttft_s": wanted.ttft_s,
            "tpot_s": wanted.tpot_s,
            "settings": with_pairs(settings, list(pairs)),
        }
    )


class OnTerms(RoutingPolicy):
    """A policy under a level's terms. Its options: `of` (the policy), `rules`, `remote`; all others are that policy's.

    rules: requests have latency targets, which is all that workers order their queues by and routers defer by, beyond
    order of arrival. remote: prompts are computed by prefill workers.
    """

    def __init__(self, options: Options, model: CostModel | None = None) -> None:
        self._model = model or CostModel()
        terms = {name: options[name] for name in ("of", "rules", "remote")}
        rest = {name: value for name, value in options.items() if name not in terms}
        self._has_rules, self._is_remote = terms["rules"], terms["remote"]
        self._policy = build_policy(RouterSettings(policy=terms["of"], policy_options=rest), self._model)
        self.name, self.term_names = self._policy.name, self._policy.term_names  # type: ignore[misc]
        self.weighs_both = self._policy.weighs_both  # type: ignore[misc]

    @classmethod
    def build(cls, options: Options, model: CostModel) -> Self:
        return cls(options, model)

    def rank(self, context: RoutingContext, prefills: WorkerTable, decodes: WorkerTable) -> list[Candidate]:
        if self._is_remote:
            context = replace(context, request=replace(context.request, force="remote"))
        return self._policy.rank(context, prefills, decodes)

    def latency_targets(self, request: RouteRequest) -> tuple[float, float] | None:
        return targets(request, self._model, UNSET_SHARE) if self._has_rules else None
