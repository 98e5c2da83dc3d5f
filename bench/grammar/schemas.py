"""200 JSON schemas of our own: scalars, bounds, patterns, formats, enums, unions, references, recursion, records."""

import json
from pathlib import Path
from typing import Any


def schemas() -> dict[str, Any]:
    """The schemas by name; every one is supported, and most outputs that a model likes are invalid without masks."""
    found = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))
    return {one["name"]: one["schema"] for one in found}
