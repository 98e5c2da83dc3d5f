"""The contract's assertions say what they compared."""

import pytest

pytest.register_assert_rewrite("tests.kvcache.store_contract")
