"""Settings of the router, of service-level objectives, and of the order of the workers' waiting queues."""

from functools import cached_property
from typing import Annotated, Self

from pydantic import Field, model_validator

from kvrelay.plane.messages import MAX_PRIORITY
from kvrelay.settings.choices import OnMiss, TenantBy
from kvrelay.settings.section import Section, setting


class SchedulerSettings(Section):
    """The order of the waiting queue on every worker: priorities, deadlines, and fair shares between tenants."""

    tenant_by: TenantBy = setting(
        "auto",
        "What identifies a tenant: cache_salt or user (fields of the body), or api_key (the bearer token); auto: the "
        "first of these that a request has. Of no effect with serve.api_keys_file: then the key does.",
    )
    tenant_weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = setting(
        {},
        "Shares of computing time by salt, user or key as clients send it; with serve.api_keys_file by name, for "
        "tenants without a weight there. Other tenants have weight 1.",
    )


class RouterSettings(Section):
    """How workers are chosen. Costs are seconds of predicted time to first token."""

    policy: str = setting(
        "joint",
        "The routing policy: joint, round_robin, least_loaded, power_of_two, prefix_affinity, session, or "
        "module:Class of your own; docs/design/routing.md.",
    )
    policy_options: dict[str, bool | int | float | str] = setting({}, "The policy's own options, by name.")
    local_prefill_tokens: int = setting(
        32, "Prompts with at most this many uncached tokens are prefilled on the decode worker.", unit="tokens", ge=0
    )
    max_inflight: int = setting(
        512,
        "Sequences admitted at once by one ingress, counting each of a request's n and prompts; more get 429.",
        unit="sequences",
        ge=1,
    )
    max_queue_s: float = setting(
        30.0,
        "Longest time that a request queues. One that is expected to queue longer gets 429 at once, one that has "
        "waited so long at the ingress gets it then; after half of it no later request passes an older one. In a "
        "lasting overload new ones may queue for a part of their TTFT target only. In a full cluster a request without "
        "an SLO that will miss the policy's TTFT target in any case, with twice the uncached tokens of others gets 429 "
        "if its first token would take longer than a quarter of this, and than twice the time on an idle worker.",
        unit="s",
        ge=0.1,
        le=3600,
    )


class SloClass(Section):
    """A class of service that requests may name."""

    ttft_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    tpot_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    degrade_to: str | None = None
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Queue priority of requests that set none themselves."""


class SloSettings(Section):
    """Service-level objectives. While none is set, no latency is predicted, and router.max_queue_s alone refuses."""

    ttft_s: float | None = setting(
        None, "TTFT target of requests that name no class (class `default`).", unit="s", gt=0, allow_inf_nan=False
    )
    tpot_s: float | None = setting(
        None,
        "Target of the mean time per token after the first, of the same class.",
        unit="s",
        gt=0,
        allow_inf_nan=False,
    )
    classes: dict[str, SloClass] = setting(
        {},
        "Other classes by name, each with `ttft_s` and `tpot_s` (absent: no target), `degrade_to` (the class that "
        "serves a request when this one's targets are out of reach) and `priority` (its queue priority, unless the "
        "request sets one).",
    )
    on_miss: OnMiss = setting(
        "refuse",
        "A request whose targets are out of reach: refuse (429 with Retry-After, before anything is computed) or "
        "queue (served without a promise; the response says so).",
    )

    @model_validator(mode="after")
    def _check_classes(self) -> Self:
        if "default" in self.classes:
            raise ValueError("slo.classes.default: the class `default` is slo.ttft_s and slo.tpot_s themselves")
        for name in self.classes:
            if not name or len(name) > 64 or not name.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"slo.classes: {name!r} is no name: letters, digits, - and _, up to 64")
            chain = [name]
            while (following := self.classes[chain[-1]].degrade_to) is not None:
                if following not in self.classes:
                    raise ValueError(f"slo.classes.{chain[-1]}.degrade_to: there is no class {following!r}")
                if following in chain:
                    raise ValueError(f"slo.classes.{name}.degrade_to: leads back to {following!r}")
                chain.append(following)
        return self

    @cached_property
    def is_on(self) -> bool:
        """Whether times are predicted at all."""
        return self.ttft_s is not None or self.tpot_s is not None or bool(self.classes)
