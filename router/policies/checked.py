"""A policy's options as a model of their own, checked when the policy is made."""

import difflib
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kvrelay.errors import ConfigError
from kvrelay.router.policies.base import Options


class Checked(BaseModel):
    """Options of one policy: nothing unknown, no text for a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Model = TypeVar("Model", bound=Checked)


def checked(model: type[Model], policy: str, options: Options) -> Model:
    """The options with their defaults. Raises ConfigError, which names the first one at fault."""
    try:
        return model.model_validate(options)
    except ValidationError as error:
        raise ConfigError(f"router.policy_options of {policy}: {_first(error, model)}") from error


def _first(error: ValidationError, model: type[Checked]) -> str:
    problem = error.errors(include_url=False)[0]
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] != "extra_forbidden":
        return f"{name}: {problem['msg']}"
    near = difflib.get_close_matches(name, model.model_fields, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(model.model_fields) or 'none'}"
    return f"there is no option {name}; {hint}"
