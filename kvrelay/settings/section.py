"""What every section of the settings shares: its base class, and how a setting is described."""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator


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


def _may_be_off(annotation: Any) -> bool:
    parts = get_args(annotation)
    return "off" in parts or any(map(_may_be_off, parts))
