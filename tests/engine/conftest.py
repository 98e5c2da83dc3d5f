"""Fixtures of the engine's tests."""

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    """Idle torch threads that spin take more time than such small products need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
