"""Conversions go to a folder of each test's own."""

import pytest

from kvrelay.engine.checkpoints import conversions


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(conversions, "cache_dir", lambda: tmp_path / "cache")
