"""All live workers: their accounts, and per role the same as columns.

Owns both, and the mean prefill speed that is assumed of a worker before its own first measurement. Pure: never imports
torch, Ray, sockets, a clock or a random source.
"""

from collections.abc import Callable

import numpy as np

from kvrelay.plane.messages import Assigned, AssignedByOthers, LoadReport, WorkerInfo
from kvrelay.router.fleet.account import WorkerAccount
from kvrelay.router.fleet.columns import PREFILL_RATE, Columns
from kvrelay.router.fleet.compatibility import IncompatiblePairs, unpaired_workers
from kvrelay.router.policies.cost_model import CostModel
from kvrelay.types import Role


class LiveWorkers:
    """Accounts by worker, and columns that are laid out when they are next read."""

    def __init__(self, model: CostModel, index_row: Callable[[str], int]) -> None:
        """`index_row`: a worker's row in the answers of the prefix index."""
        self.accounts: dict[str, WorkerAccount] = {}
        self.incompatible: IncompatiblePairs = {}
        self._prefill_rate: float | None = None
        self._model, self._index_row = model, index_row
        self._columns: dict[str, Columns] | None = None
        self._unpaired: frozenset[str] | None = None
        self._changed: dict[WorkerAccount, None] = {}  # whose own load is to be shared with the other routers

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens/s: the mean of all workers' last measurements, so that a router that has just connected assumes
        the same.
        """
        if self._prefill_rate is None:
            rates = [self.columns(role).floats[PREFILL_RATE] for role in Role]
            count = sum(int(np.count_nonzero(one)) for one in rates)
            total = sum(float(one.sum()) for one in rates)
            self._prefill_rate = total / count if count else self._model.default_prefill_tokens_per_s
        return self._prefill_rate

    def up(self, info: WorkerInfo) -> bool:
        """A worker connected. True: it is new or restarted (another epoch). False: it has reconnected."""
        known = self.accounts.get(info.worker_id)
        self._columns = self._unpaired = self._prefill_rate = None
        if known is not None:
            self._stop_sharing(known)
        if known is not None and known.info.epoch == info.epoch:
            known.info = info
            return False
        if known is not None:
            known.set_row(None)
        self.accounts[info.worker_id] = WorkerAccount(info, self._model)
        return True

    def down(self, worker_id: str) -> None:
        """Forget a worker. The load of its requests is counted nowhere."""
        if (account := self.accounts.pop(worker_id, None)) is not None:
            account.set_row(None)
            self._stop_sharing(account)
            self._columns = self._unpaired = self._prefill_rate = None

    def _stop_sharing(self, account: WorkerAccount) -> None:
        """Until the worker reports that other routers listen."""
        account.changed = None
        account.apply_others(AssignedByOthers(0, False))
        self._changed.pop(account, None)

    def apply_others(self, worker_id: str, others: AssignedByOthers) -> None:
        """What the other routers have assigned to a worker; from now on ours is shared with them.

        Unknown workers are ignored.
        """
        account = self.accounts.get(worker_id)
        if account is None:
            return
        account.apply_others(others)
        if not others.num_others:
            account.changed = None
            self._changed.pop(account, None)
        elif account.changed is None:
            account.changed = self._changed
            self._changed[account] = None

    def take_assigned(self) -> list[tuple[str, Assigned]]:
        """Our own load on each worker on which it has changed since the last call, for the other routers."""
        found = [(account.info.worker_id, account.assigned()) for account in self._changed]
        self._changed.clear()
        return found

    def report(self, worker_id: str, report: LoadReport, now_s: float) -> bool:
        """A worker's load report. False: the worker is unknown."""
        account = self.accounts.get(worker_id)
        if account is None:
            return False
        before = account.prefill_tokens_per_s
        account.apply_report(report, now_s)
        if account.prefill_tokens_per_s != before:
            self._prefill_rate = None
        return True

    def set_incompatible_pairs(self, pairs: IncompatiblePairs) -> None:
        """From now on no KV can be transferred between these pairs."""
        self.incompatible, self._unpaired = dict(pairs), None

    @property
    def unpaired(self) -> frozenset[str]:
        """Workers that are compatible with no worker of the other role."""
        if not self.incompatible:
            return frozenset()
        if self._unpaired is None:
            prefills, decodes = self.columns(Role.PREFILL).names, self.columns(Role.DECODE).names
            self._unpaired = unpaired_workers(prefills, decodes, self.incompatible)
        return self._unpaired

    def columns(self, role: Role) -> Columns:
        """The columns of one role's workers."""
        if self._columns is None:
            self._columns = self._laid_out()
        return self._columns[role]

    def unreported_share(self) -> float:
        """Of all sequences at the workers, the share that other routers assigned without reporting it; 0 if nothing
        runs.
        """
        prefills, decodes = self.columns(Role.PREFILL), self.columns(Role.DECODE)
        unreported = prefills.num_unreported + decodes.num_unreported
        return unreported / (prefills.num_sequences + decodes.num_sequences) if unreported else 0.0

    def prefill_tokens_per_s(self, worker_id: str | None) -> float:
        """A worker's prefill speed: measured, or the mean of the others; 0: the worker is unknown."""
        account = self.accounts.get(worker_id) if worker_id is not None else None
        return 0.0 if account is None else account.prefill_tokens_per_s or self.prefill_rate

    def _laid_out(self) -> dict[str, Columns]:
        ordered = sorted(self.accounts.items())
        nodes: dict[str, int] = {}
        tables = {}
        for role in Role:
            accounts = [account for _, account in ordered if account.role is role]
            numbers = [nodes.setdefault(account.info.node_id, len(nodes)) for account in accounts]
            tables[role.value] = columns = Columns(
                [account.info for account in accounts], numbers, [self._index_row(a.info.worker_id) for a in accounts]
            )
            for row, account in enumerate(accounts):
                account.set_row(columns, row)
        return tables
