"""docs/configuration.md lists every setting, default and meaning as they are in the code."""

from pathlib import Path

import pytest

from kvrelay.config import Settings, settings_table

pytestmark = pytest.mark.pure


DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_ends_with_the_generated_table():
    assert DOCS.read_text().endswith(settings_table().rstrip() + "\n")


def test_every_setting_says_what_it_means():
    for field in Settings.model_fields.values():
        for name, setting in field.annotation.model_fields.items():
            assert setting.description, name
