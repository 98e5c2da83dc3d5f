"""What every section of the settings shares: its base class, how a setting is described, and amounts of memory as users
write them: sizes, and shares of the free memory. Pure.
"""

import difflib
from collections.abc import Collection
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvrelay.errors import ConfigError


class Section(BaseModel):
    """A frozen section that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _off_is_no_boolean(cls, data: Any) -> Any:
        """YAML reads a bare `off` as false."""
        if not isinstance(data, dict) or False not in data.values():
            return data
        names = {name for name, field in cls.model_fields.items() if _may_be_off(field.annotation)}
        return {name: "off" if value is False and name in names else value for name, value in data.items()}


def setting(default: Any, meaning: str, *, unit: str = "", **bounds: Any) -> Any:
    """A setting's default, its meaning in one sentence, its unit, and pydantic's bounds (ge, gt, le, lt)."""
    return Field(default, description=meaning, json_schema_extra={"unit": unit}, **bounds)


def first_problem(
    error: ValidationError, whole: str, known: Collection[str], *, noun: str = "field", depth: int | None = None
) -> str:
    """The first problem as one sentence that names the field; for an unknown field with the nearest of `known`, the
    fields beside it. whole: the name of the whole. depth: parts of a field's path that users know.
    """
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    if first["type"] != "extra_forbidden":
        message = first["msg"].removeprefix("Value error, ").replace("\n", " ")
        return f"{'.'.join(path[:depth]) or whole}: {message}"
    near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.4)
    hint = f"; did you mean {'.'.join([*path[:-1], near[0]])}?" if near else ""
    return f"unknown {noun} {'.'.join(path)}{hint}"


def _may_be_off(annotation: Any) -> bool:
    parts = get_args(annotation)
    return "off" in parts or any(map(_may_be_off, parts))


_SIZES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str | int) -> int:
    """ "512MiB", "2g", "1.5GB" or a plain number, as bytes (powers of 1024). Raises ConfigError."""
    if isinstance(text, int):
        return text
    lowered = text.strip().lower().removesuffix("b").removesuffix("i")
    try:
        if lowered and lowered[-1] in _SIZES:
            return int(float(lowered[:-1]) * _SIZES[lowered[-1]])
        return int(lowered)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{text!r} is not a size; write for example 512MiB or 2GiB") from error


def memory_share(text: str | int | float) -> float | None:
    """ "50%" or "0.5" as 0.5, a share of the free memory; None: the text is a size. Raises ConfigError."""
    share = text if isinstance(text, float) else None
    if isinstance(text, str) and (stripped := text.strip()).endswith("%"):
        share = _number(stripped[:-1], text) / 100
    elif isinstance(text, str) and "." in stripped and not stripped[-1:].isalpha():
        share = _number(stripped, text)
    if share is not None and not 0 < share < 1:
        raise ConfigError(
            f"{text!r} is not a share of the free memory; write for example 0.5 or 50%, or a size: 512MiB"
        )
    return share


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{whole!r} is neither a size nor a share; write for example 512MiB, 0.5 or 50%") from error


def _checked_budget(text: str | int | float) -> str | int | float:
    """The text itself, if it is a positive size or a share. Raises ValueError, as `_checked_size` does."""
    try:
        share = memory_share(text)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return text if share is not None or isinstance(text, float) else _checked_size(text)


def _checked_size(text: str | int) -> str | int:
    """The text itself, if it is a positive size. Raises ValueError, to which pydantic adds the setting's name."""
    try:
        num_bytes = parse_bytes(text)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    if num_bytes < 1:
        raise ValueError(f"{text!r} is no size above zero; write for example 512MiB or 2GiB")
    return text


Size = Annotated[str | int, AfterValidator(_checked_size)]
Budget = Annotated[str | int | float, AfterValidator(_checked_budget)]
