"""What every section of the settings shares: its base class, how a setting is described, and amounts of memory as users
write them: sizes, and shares of the free memory. Pure.
"""

import difflib
from collections.abc import Collection
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator


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


def parse_bytes(text: Any) -> Any:
    """ "512MiB", "2g" or "1.5GB" as bytes (powers of 1024). What is no text pydantic checks.

    Raises ValueError, to which pydantic adds the setting's name.
    """
    num_bytes = text
    if isinstance(text, str):
        lowered = text.strip().lower().removesuffix("b").removesuffix("i")
        try:
            is_plain = not lowered or lowered[-1] not in _SIZES
            num_bytes = int(lowered) if is_plain else int(float(lowered[:-1]) * _SIZES[lowered[-1]])
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{text!r} is not a size; write for example 512MiB or 2GiB") from error
    if isinstance(num_bytes, int | float) and num_bytes < 1:
        raise ValueError(f"{text!r} is no size above zero; write for example 512MiB or 2GiB")
    return num_bytes


def _parse_budget(text: Any) -> Any:
    """ "50%", "0.5" or 0.5 as 0.5, a share of the free memory; sizes as `parse_bytes`. Raises ValueError."""
    share = text if isinstance(text, float) else None
    if isinstance(text, str) and (stripped := text.strip()).endswith("%"):
        share = _number(stripped[:-1], text) / 100
    elif isinstance(text, str) and "." in stripped and not stripped[-1:].isalpha():
        share = _number(stripped, text)
    if share is not None and not 0 < share < 1:
        raise ValueError(f"{text!r} is not a share of the free memory; write for example 0.5 or 50%, or a size: 512MiB")
    return parse_bytes(text) if share is None else share


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"{whole!r} is neither a size nor a share; write for example 512MiB, 0.5 or 50%") from error


Size = Annotated[int, BeforeValidator(parse_bytes)]  # bytes
Budget = Annotated[int | float, BeforeValidator(_parse_budget)]  # bytes, or a share below 1
