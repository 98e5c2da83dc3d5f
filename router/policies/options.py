"""A policy's options as a pydantic model, validated when the policy is built."""

import difflib
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kvrelay.errors import ConfigError
from kvrelay.router.policies.base import Options


class PolicyOptions(BaseModel):
    """Options of one policy: unknown names and wrong types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Model = TypeVar("Model", bound=PolicyOptions)


def parse_options(model: type[Model], policy: str, options: Options) -> Model:
    """The options with their defaults. Raises ConfigError, which names the first invalid one."""
    try:
        return model.model_validate(options)
    except ValidationError as error:
        raise ConfigError(f"router.policy_options of {policy}: {_first_problem(error, model)}") from error


def _first_problem(error: ValidationError, model: type[PolicyOptions]) -> str:
    problem = error.errors(include_url=False)[0]
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] != "extra_forbidden":
        return f"{name}: {problem['msg']}"
    near = difflib.get_close_matches(name, model.model_fields, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(model.model_fields) or 'none'}"
    return f"there is no option {name}; {hint}"
