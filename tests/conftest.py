"""Of all tests: assertions of the stores' contract say what they compared, wherever it is used."""

import pytest

pytest.register_assert_rewrite("tests.kvcache.store_contract")
