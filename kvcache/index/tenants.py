"""Quotas of rows for each tenant. Pure."""

from collections import Counter
from collections.abc import Mapping


class TenantQuotas:
    """How many rows each tenant uses (reserved and cached ones), and may use."""

    def __init__(self, quotas: Mapping[str, int | None], default_quota: int | None) -> None:
        """`quotas`: most rows of each tenant; `default_quota`: of every other tenant. None, in both: unlimited."""
        self._quotas, self._default_quota = dict(quotas), default_quota
        self._num_rows: Counter[str] = Counter()

    def has_quota(self, tenant: str) -> bool:
        return self._quotas.get(tenant, self._default_quota) is not None

    def num_over(self, tenant: str, count: int) -> int:
        """Rows of its own that this tenant must give up before it gets `count` more."""
        quota = self._quotas.get(tenant, self._default_quota)
        return 0 if quota is None else max(0, self._num_rows[tenant] + count - quota)

    def add(self, tenant: str, count: int) -> None:
        self._num_rows[tenant] += count

    def remove(self, tenant: str) -> bool:
        """One row less; whether it was the last."""
        self._num_rows[tenant] -= 1
        if self._num_rows[tenant]:
            return False
        del self._num_rows[tenant]
        return True

    def check(self, num_rows: Mapping[str, int]) -> None:
        """Raise AssertionError unless these are the tenants' rows."""
        assert num_rows == +self._num_rows, "tenants' rows are miscounted"
