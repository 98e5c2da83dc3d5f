"""Conversions go to a folder of each test's own."""

import pytest

from kvrelay.engine.checkpoints import checkpoint


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "cache_dir", lambda: tmp_path / "cache")
