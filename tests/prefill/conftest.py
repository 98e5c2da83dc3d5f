"""The KV plane's fixtures, for tests of its prefill end."""

from tests.kvtransfer.conftest import kv

__all__ = ["kv"]
