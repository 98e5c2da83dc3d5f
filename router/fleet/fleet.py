"""All live workers: their accounts, and those as columns, one table for each role.

Owns both, and the average speed that is assumed of a worker before its own first measurement. Pure: never imports torch, Ray,
sockets, a clock or a random source.
"""

from collections.abc import Callable

import numpy as np

from kvrelay.plane.messages import Assigned, AssignedByOthers, LoadReport, WorkerInfo
from kvrelay.router.fleet.accounts import WorkerAccount
from kvrelay.router.fleet.columns import PREFILL_RATE, Columns
from kvrelay.router.fleet.compatibility import IncompatiblePairs, unpaired_workers
from kvrelay.router.policies.cost_model import CostModel
from kvrelay.types import Role


class Fleet:
    """Accounts by worker, and tables that are laid out when they are next looked at."""

    def __init__(self, model: CostModel, index_row: Callable[[str], int]) -> None:
        """`index_row`: a worker's row in what the index answers."""
        self.accounts: dict[str, WorkerAccount] = {}
        self.incompatible: IncompatiblePairs = {}
        self._prefill_rate: float | None = None
        self._model, self._index_row = model, index_row
        self._tables: dict[str, Columns] | None = None
        self._unpaired: frozenset[str] | None = None
        self._changed: dict[WorkerAccount, None] = {}  # of those whose other routers want to hear of it

    @property
    def prefill_rate(self) -> float:
        """The mean of all workers' last measurements, prompt tokens/s: the same for a router that has only just heard them."""
        if self._prefill_rate is None:
            rates = [self.columns(role).floats[PREFILL_RATE] for role in Role]
            count = sum(int(np.count_nonzero(one)) for one in rates)
            total = sum(float(one.sum()) for one in rates)
            self._prefill_rate = total / count if count else self._model.default_prefill_tokens_per_s
        return self._prefill_rate

    def up(self, info: WorkerInfo) -> bool:
        """True: it is new, or anew (another epoch). False: it has only connected again."""
        known = self.accounts.get(info.worker_id)
        self._tables = self._unpaired = self._prefill_rate = None
        if known is not None:
            self._unwatch(known)
        if known is not None and known.info.epoch == info.epoch:
            known.info = info
            return False
        if known is not None:
            known.place(None)
        self.accounts[info.worker_id] = WorkerAccount(info, self._model)
        return True

    def down(self, worker_id: str) -> None:
        """Forget it. What its requests still count is counted nowhere."""
        if (account := self.accounts.pop(worker_id, None)) is not None:
            account.place(None)
            self._unwatch(account)
            self._tables = self._unpaired = self._prefill_rate = None

    def _unwatch(self, account: WorkerAccount) -> None:
        """Nobody is to be told of it until it says that somebody listens."""
        account.changed = None
        account.apply_others(AssignedByOthers(0, False))
        self._changed.pop(account, None)

    def apply_others(self, worker_id: str, others: AssignedByOthers) -> None:
        """What the other routers have assigned to a worker; from now on they are told what we have. Unless it is not here."""
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
        """Workers whose other routers are to hear what we have assigned to it: what has changed since the last call."""
        found = [(account.info.worker_id, account.assigned()) for account in self._changed]
        self._changed.clear()
        return found

    def report(self, worker_id: str, report: LoadReport, now_s: float) -> bool:
        """A worker's load. False: it is not here."""
        account = self.accounts.get(worker_id)
        if account is None:
            return False
        before = account.prefill_tokens_per_s
        account.apply_report(report, now_s)
        if account.prefill_tokens_per_s != before:
            self._prefill_rate = None
        return True

    def set_incompatible_pairs(self, incompatible: IncompatiblePairs) -> None:
        """From now on no KV can travel between these pairs."""
        self.incompatible, self._unpaired = dict(incompatible), None

    @property
    def unpaired(self) -> frozenset[str]:
        """Workers that fit nobody of the other role."""
        if self._unpaired is None:
            self._unpaired = unpaired_workers(
                self.columns(Role.PREFILL).names, self.columns(Role.DECODE).names, self.incompatible
            )
        return self._unpaired

    def columns(self, role: Role) -> Columns:
        """The table of one role's workers."""
        if self._tables is None:
            self._tables = self._laid_out()
        return self._tables[role]

    def unreported_share(self) -> float:
        """The share of all sequences at the workers that other routers sent without telling; 0: none, or nothing runs."""
        prefills, decodes = self.columns(Role.PREFILL), self.columns(Role.DECODE)
        foreign = prefills.num_foreign + decodes.num_foreign
        return foreign / (prefills.num_sequences + decodes.num_sequences) if foreign else 0.0

    def _laid_out(self) -> dict[str, Columns]:
        ordered = sorted(self.accounts.items())
        nodes: dict[str, int] = {}
        tables = {}
        for role in Role:
            accounts = [account for _, account in ordered if account.role is role]
            numbers = [nodes.setdefault(account.info.node_id, len(nodes)) for account in accounts]
            tables[role.value] = table = Columns(
                [account.info for account in accounts], numbers, [self._index_row(a.info.worker_id) for a in accounts]
            )
            for row, account in enumerate(accounts):
                account.place(table, row)
        return tables
