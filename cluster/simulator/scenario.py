"""What is simulated: the cluster, its settings, and what happens to it. From a YAML file or from flags."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvrelay.cluster.profiles.profile import SimulatorProfile
from kvrelay.cluster.simulator.clock import Clock
from kvrelay.cluster.simulator.network import Network
from kvrelay.cluster.simulator.tiers import BlockSources
from kvrelay.config import Settings, in_one_line, settings_from
from kvrelay.errors import ConfigError
from kvrelay.settings.section import first_problem
from kvrelay.types import Role

FaultKind = Literal["crash", "freeze", "slow", "link", "ingress_restart"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Fault(_Section):
    """A fault of a worker, its machine's links, or an ingress, for `for_s`."""

    kind: FaultKind
    at_s: float = Field(ge=0, allow_inf_nan=False)
    target: str = Field(description="a worker (p0, d3), or an ingress (i0)")
    for_s: float | None = Field(None, gt=0, allow_inf_nan=False, description="how long it lasts; none: to the end")
    share: float = Field(
        0.5, gt=0, le=1, description="slow: share of its speed; link: share of its machine's bandwidth, while it lasts"
    )


class Scaling(_Section):
    """The number of workers from `at_s` on; none: unchanged."""

    at_s: float = Field(ge=0, allow_inf_nan=False)
    prefill: int | None = Field(None, ge=0)
    decode: int | None = Field(None, ge=1)


class Scenario(_Section):
    """One cluster and what happens to it. Its attributes are the scenario file's fields."""

    prefill: int = Field(1, ge=0)
    decode: int = Field(1, ge=1)
    ingress: int = Field(1, ge=1)
    prefill_pool_tokens: int | None = Field(
        None, ge=1, description="KV tokens of a prefill worker's pool; default: the profile's"
    )
    decode_pool_tokens: int | None = Field(
        None, ge=1, description="KV tokens of a decode worker's pool; default: the profile's"
    )
    seed: int = 0
    max_tokens: int = Field(
        4096,
        ge=1,
        description="output tokens that every client allows; all that the cluster knows of an output's length",
    )
    message_s: float = Field(0.001, ge=0, description="delay of a message between ingress and worker")
    report_s: float = Field(0.05, gt=0, description="least time between load reports of a busy worker")
    noise: float = Field(0.0, ge=0, le=2, description="sigma of the logarithm of a random factor on each step's time")
    detect_s: float = Field(1.0, ge=0, description="time until ingresses know that a worker has crashed")
    freeze_limit_s: float = Field(1.3, gt=0, description="time after which a frozen worker is dropped")
    start_s: float = Field(60.0, ge=0, description="time until a started worker takes requests")
    ttft_s: float = Field(5.0, gt=0, description="TTFT that counts as kept, whether or not an SLO is set")
    tpot_s: float = Field(0.1, gt=0, description="mean time per further token that counts as kept")
    warm_up_s: float = Field(0.0, ge=0, description="requests that arrive before it are not counted")
    faults: tuple[Fault, ...] = ()
    scale: tuple[Scaling, ...] = ()
    drain_s: float = Field(120.0, ge=0, description="most time that a retiring worker has to finish")
    settings: dict[str, dict[str, Any]] = Field({}, description="settings by section: router, slo, engine, cache...")

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        workers = [name for name, _ in self.worker_ids()]
        ingresses = [f"i{number}" for number in range(self.ingress)]
        for fault in self.faults:
            if fault.target not in (ingresses if fault.kind == "ingress_restart" else workers):
                raise ValueError(f"{fault.kind} of {fault.target}: no such target")
        return self

    def product_settings(self) -> Settings:
        return settings_from(
            {
                **self.settings,
                "cluster": {**self.settings.get("cluster", {}), "prefill": self.prefill, "decode": self.decode},
            }
        )

    def profile_of(self, role: Role, profile: SimulatorProfile) -> SimulatorProfile:
        tokens = self.prefill_pool_tokens if role is Role.PREFILL else self.decode_pool_tokens
        if tokens is None:
            return profile
        return profile.model_copy(update={"num_blocks": max(1, tokens // profile.block_size)})

    def worker_ids(self) -> list[tuple[str, Role]]:
        prefills = [(f"p{number}", Role.PREFILL) for number in range(self.prefill)]
        return prefills + [(f"d{number}", Role.DECODE) for number in range(self.decode)]


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """What all parts of one simulation share."""

    scenario: Scenario
    profile: SimulatorProfile
    settings: Settings
    clock: Clock
    network: Network
    sources: BlockSources


def scenario_from(data: dict[str, Any], name: str = "scenario") -> Scenario:
    """A checked scenario. Raises ConfigError that names the field."""
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{name}: {first_problem(error, 'scenario', Scenario.model_fields)}") from error


def load_scenario(path: Path) -> dict[str, Any]:
    """A scenario file's fields, not checked yet. Raises ConfigError."""
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {in_one_line(error)}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a scenario is a mapping of fields")
    return data
