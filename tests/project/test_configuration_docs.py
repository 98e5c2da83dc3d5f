"""docs/configuration.md lists every setting, default and meaning as they are in the code.

`python -m tests.project.test_configuration_docs` writes the table anew.
"""

import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from kvrelay.config import Settings

pytestmark = pytest.mark.pure


DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


def settings_table() -> str:
    """Every setting with its default, values, unit and meaning, as Markdown."""
    lines: list[str] = []
    for name, field in Settings.model_fields.items():
        if name == "decode":  # stands beside `prefill`
            continue
        model: Any = field.annotation
        section = "prefill" if name == "prefill" else name
        title = "`prefill`, `decode`" if name == "prefill" else f"`{name}`"
        lines += [f"## {title}", "", " ".join((model.__doc__ or "").split()), ""]
        lines += ["| key | default | values | meaning |", "|---|---|---|---|"]
        for key, one in model.model_fields.items():
            default = "–" if one.default is None else f"`{_shown(one.default) if _is_size(one) else one.default}`"
            lines.append(f"| `{section}.{key}` | {default} | {_values(one)} | {one.description or ''} |")
        lines.append("")
    return "\n".join(lines)


def _values(field: FieldInfo) -> str:
    """What a setting may be: its choices, or its kind with bounds and unit."""
    kinds = _kinds(field.annotation)
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices:
        choices += [True, False] * (bool in kinds)
        return ", ".join(f"`{choice}`" for choice in choices)
    extra = field.json_schema_extra
    unit = str(extra.get("unit") or "") if isinstance(extra, dict) else ""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [
        f"{sign} {getattr(one, name):g}" for one in field.metadata for name, sign in signs.items() if hasattr(one, name)
    ]
    word = "size" if _is_size(field) else _kind_word(kinds)
    return " ".join(filter(None, (word + " or share" * (float in kinds and word == "size"), ", ".join(bounds), unit)))


def _is_size(field: FieldInfo) -> bool:
    """Whether users write an amount of memory, which is read as bytes."""
    kinds = get_args(field.annotation)
    found = (*field.metadata, *(one for kind in kinds for one in getattr(kind, "__metadata__", ())))
    return any(isinstance(one, BeforeValidator) for one in found)


def _shown(num_bytes: int) -> str:
    return f"{num_bytes >> 30}GiB" if num_bytes % (1 << 30) == 0 else f"{num_bytes >> 20}MiB"


def _kinds(annotation: Any) -> set[Any]:
    """The types of a union, without annotations and None."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return set().union(*map(_kinds, get_args(annotation)))
    return {annotation} - {types.NoneType}


def _kind_word(kinds: set[Any]) -> str:
    """A word for a type; none for a number, which has bounds or a unit."""
    if bool in kinds:
        return "`True`, `False`"
    if any(get_origin(kind) is dict for kind in kinds):
        return "mapping"
    return "text" if str in kinds else ""


def test_the_page_ends_with_the_generated_table():
    assert DOCS.read_text().endswith(settings_table().rstrip() + "\n")


def test_every_setting_says_what_it_means():
    for field in Settings.model_fields.values():
        for name, setting in field.annotation.model_fields.items():
            assert setting.description, name


if __name__ == "__main__":
    page = DOCS.read_text()
    DOCS.write_text(page[: page.index("## `model`")] + settings_table().rstrip() + "\n")
