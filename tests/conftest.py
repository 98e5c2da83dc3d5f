"""Of all tests: assertions of the stores' contract say what they compared, wherever it is used."""

import pytest

pytest.register_assert_rewrite("tests.kvcache.store_contract")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
