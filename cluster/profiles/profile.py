"""A worker's speed, memory and links as a JSON file: what the simulator and the planner compute with.

`kvrelay profile --fit` measures one on a real engine. published/ has ready-made ones of datacentre GPUs: each constant
stands there with its source. Their curves are rooflines whose two efficiencies (matrix products, memory) are fitted to
NVIDIA's throughput tables; the error is in each file's `fit`. Never imports torch or Ray.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kvrelay.errors import ConfigError
from kvrelay.router.planning.types import SpeedCurve, StepWork
from kvrelay.settings.section import first_problem
from kvrelay.types import Role

if TYPE_CHECKING:
    from kvrelay.engine.scheduling.plan import StepPlan

PUBLISHED = Path(__file__).parent / "published"
Tier = Literal["host", "disk", "remote"]
StepKind = Literal["prefill", "decode"]
Seconds = Annotated[float, Field(ge=0, le=1e4, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Slowdown = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Curve(_File):
    """The fields of a SpeedCurve, as a file has them: all but `sequence_s` must be there."""

    overhead_s: Seconds
    weights_s: Seconds
    token_s: Seconds
    pair_s: Seconds
    context_s: Seconds
    sequence_s: Seconds = 0.0


def _checked_curve(value: Any) -> SpeedCurve:
    fields = _Curve.model_validate(value, from_attributes=True)
    if fields.token_s == 0 and fields.weights_s == 0:
        raise ValueError("weights_s and token_s are both 0: steps would take no time")
    return SpeedCurve(**fields.model_dump())


Curve = Annotated[SpeedCurve, BeforeValidator(_checked_curve)]


class ConstantSource(_File):
    """Where one constant comes from: a datasheet, a paper, a measurement, or, said as such, an assumption."""

    constant: str
    value: float
    unit: str = ""
    origin: str


class FitError(_File):
    """Error of the curve in one kind of step, as shares of the measured time."""

    num_samples: Count
    median: float = Field(ge=0)
    p90: float = Field(ge=0)


class Fit(_File):
    """What was measured, and how well the curve fits. errors: by kind of step (prefill, decode, mixed)."""

    model: str
    dtype: str
    device: str
    threads: int = Field(ge=0, description="CPU threads; 0: not a CPU")
    date: str
    errors: dict[str, FitError]
    spread: float | None = Field(
        None, ge=0, description="of steps of the same work: p90 - p10, as a share of their median"
    )


class SimulatorProfile(_File):
    """One kind of worker, in both roles, and what moves its KV. Bytes, tokens, seconds. A record: its attributes are
    the file's fields.
    """

    name: str = Field(min_length=1)
    source: tuple[ConstantSource, ...] = ()
    fit: Fit | None = None
    prefill: Curve
    decode: Curve
    block_size: Count = Field(description="tokens; traces of longer blocks are simulated with theirs")
    num_blocks: Count = Field(description="of a worker's pool")
    tier_blocks: dict[Tier, Count] = Field(
        {}, description="blocks that a worker's lower tiers hold; none: no such tier"
    )
    token_budget: Count = Field(description="most tokens in one step")
    max_running: Count
    max_model_len: Count
    kv_bytes_per_token: Count
    link_bytes_per_s: Speed = Field(description="of KV between machines, each way, of one worker")
    local_bytes_per_s: Speed = Field(description="of KV between workers of one machine")
    load_bytes_per_s: dict[Tier, Speed] = Field({}, description="of KV from a tier into the pool")
    workers_per_node: Count = Field(1, description="that share a machine")
    slowdown: dict[StepKind, tuple[Slowdown, ...]] = Field(
        {}, description="factor on a step's time while 1, 2... of a machine's workers compute; none: no effect"
    )
    cost_per_hour: float = Field(1.0, ge=0, allow_inf_nan=False, description="of a worker, in any currency")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_running > self.token_budget:
            raise ValueError(f"max_running {self.max_running} is above token_budget {self.token_budget}")
        for tier in self.tier_blocks:
            if tier not in self.load_bytes_per_s:
                raise ValueError(f"tier_blocks has {tier}, but load_bytes_per_s does not")
        return self

    def slowdown_of(self, role: Role) -> tuple[float, ...]:
        """Of a worker's steps, by how many of its machine's workers compute; empty: it does not matter."""
        return self.slowdown.get("prefill" if role is Role.PREFILL else "decode", ())

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def with_block_size(self, block_size: int) -> "SimulatorProfile":
        """The same memory in blocks of another size, rounded down; at least one block."""

        def blocks(count: int) -> int:
            return max(1, count * self.block_size // block_size)

        tiers = {tier: blocks(count) for tier, count in self.tier_blocks.items()}
        update = {"block_size": block_size, "num_blocks": blocks(self.num_blocks), "tier_blocks": tiers}
        return SimulatorProfile.model_validate(self.model_copy(update=update), from_attributes=True)

    def text(self) -> str:
        """As the file has it."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True), indent=1) + "\n"


def work_of(plan: "StepPlan", num_others: int = 0, context_tokens: int = 0) -> StepWork:
    """What a plan computes, beside `num_others` sequences that decode and attend to `context_tokens`.

    A prompt's last token that is computed alone counts as decoding.
    """
    prompt_tokens = pairs = 0
    for item in plan.work[plan.num_single :]:
        size = item.num_tokens
        prompt_tokens += size
        pairs += size * item.start + size * (size + 1) // 2
    for item in plan.work[: plan.num_single]:
        context_tokens += item.start + 1
    return StepWork(prompt_tokens, pairs, num_others + plan.num_single, context_tokens)


def parse_profile(text: str, name: str) -> SimulatorProfile:
    """Raises ConfigError that begins with `name` and says which field is wrong, and how."""
    try:
        return SimulatorProfile.model_validate(json.loads(text, parse_constant=_refuse_constant))
    except ValidationError as error:
        models: dict[str, type[_File]] = {"prefill": _Curve, "decode": _Curve, "source": ConstantSource, "fit": Fit}
        known = models.get(str(next(iter(error.errors()[0]["loc"]), "")), SimulatorProfile).model_fields
        raise ConfigError(f"{name}: {first_problem(error, 'profile', known)}") from error
    except ValueError as error:  # json's errors are of this kind
        raise ConfigError(f"{name} is not JSON: {error}") from error


def load_profile(path: str | Path) -> SimulatorProfile:
    """A profile file. Raises ConfigError: it is not there, or not a profile."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"profile {path}: {error}") from error
    return parse_profile(text, f"profile {path}")


def published_profile(name: str) -> SimulatorProfile:
    """A ready-made profile. Raises ConfigError that lists the names."""
    names = sorted(path.stem for path in PUBLISHED.glob("*.json"))
    if name not in names:
        raise ConfigError(f"no ready-made profile {name}; there are {', '.join(names)}")
    return load_profile(PUBLISHED / f"{name}.json")


def find_profile(name: str) -> SimulatorProfile:
    """A ready-made profile by its name, else the file of that name. Raises ConfigError."""
    if Path(name).suffix != ".json" and not Path(name).is_file():
        return published_profile(name)
    return load_profile(name)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")
