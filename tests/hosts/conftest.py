"""Tests in this folder skip, with the reason, where hosts cannot be made."""

import pytest

from kvrelay.cluster.chaos.hosts.namespaces import why_not


@pytest.fixture(scope="session", autouse=True)
def _hosts_can_be_made():
    if why := why_not():
        pytest.skip(f"no hosts here: {why}")
