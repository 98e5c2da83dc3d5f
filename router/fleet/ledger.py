"""Requests that this router has assigned and that have not ended: their share of each worker's load; and the live
workers.

Never imports torch, Ray, sockets or a clock. A request counts from the moment it is assigned, before any report can
show it, so that a burst spreads over workers.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np

from kvrelay.plane.messages import Assigned
from kvrelay.plane.reports import AssignedByOthers, LoadReport, WorkerInfo
from kvrelay.router.fleet.account import PREFILL_RATE, Columns, WorkerAccount
from kvrelay.router.policies.base import CostModel
from kvrelay.router.types import Decision
from kvrelay.types import Role, sides

MAX_PENDING_COMPARED = 128
"""Queued prompts, the newest ones, that a new prompt is compared with."""
OVERDUE_EVERY = 16
"""Requests in time that are placed between two overdue ones while workers are busy."""
MAX_PENALTY = 16.0
"""Upper bound of an overdue prompt's length, in average prompts, by which its successor's turn is delayed."""
_SMOOTHING = 0.01  # of the average prompt

Pair = tuple[str, str]
"""(prefill worker, decode worker), by id."""
IncompatiblePairs = Mapping[Pair, str]
"""Why these pairs are incompatible, one line each; pairs that are not listed are compatible, or not known yet."""


def _prefill_share(count: int) -> dict[str, int]:
    """A prompt on its prefill worker: one sequence there, whatever the number of sequences that decode from it."""
    return {"requests": count, "sequences": count, "reported_sequences": count}


@dataclass(slots=True)
class Assignment:
    """One request: the workers that compute its prompt and decode it, and its share of their load."""

    request_id: str
    block_hashes: tuple[bytes, ...]
    compute: WorkerAccount
    compute_tokens: int
    decode: WorkerAccount | None
    decode_blocks: int
    assigned_at_s: float
    predicted_ttft_s: float
    tenant: str = ""
    width: int = 1  # sequences on the decode worker
    is_overdue: bool = False  # it will miss its TTFT target in any case
    num_overdue_tokens: int = 0  # then: of overdue prompts at its prefill worker, its own included
    num_queued: int = 0  # prompts at the workers that were not computed when it was assigned, this one included
    has_first_token: bool = False


def common_prefix(one: tuple[bytes, ...], other: tuple[bytes, ...], known: int = 0) -> int:
    """Number of leading hashes that two chains share; `known` of them for certain. Chained hashes are nested, so
    bisection is exact.
    """
    longest = min(len(one), len(other))
    return bisect_left(range(longest), True, known, key=lambda place: one[place] != other[place])


class Ledger:
    """Assigned requests, and their load on the accounts of their workers."""

    def __init__(self) -> None:
        self._assignments: dict[str, Assignment] = {}
        self._pending: dict[bytes, dict[str, Assignment]] = {}  # by first block hash, until the first token
        self.overdue_blocks = 0  # reserved on decode workers for overdue prompts that prefill workers compute
        self.with_overdue: set[WorkerAccount] = set()  # workers that have overdue prompts to compute
        self._queued: Counter[str] = Counter()  # by tenant: assigned prompt tokens that are not computed yet
        self.num_queued: Counter[str] = Counter()  # by tenant: those prompts
        self.num_overdue = 0  # of them
        self._turn = 0
        self._num_in_time = 0  # requests placed in time since the last overdue one
        self._num_required = 0.0  # of those, before the next overdue one is due
        self.mean_tokens = 0.0  # uncached prompt tokens of requests placed in time

    def __len__(self) -> int:
        return len(self._assignments)

    def assign(self, assignment: Assignment) -> None:
        """Count a request from now on. An earlier attempt of the same id ends."""
        self.end(assignment.request_id)
        self._turn += 1
        self._count_turn(assignment)
        self._assignments[assignment.request_id] = assignment
        compute, decode = assignment.compute, assignment.decode
        self._count_prompt(assignment, 1)
        compute.turn = self._turn
        compute.add(tokens=assignment.compute_tokens, prefills=1, **_prefill_share(int(decode is not compute)))
        self._count_overdue(assignment, assignment.compute_tokens)
        if decode is not None:
            decode.turn = self._turn
            decode.add(requests=1, sequences=assignment.width, reported_sequences=1, blocks=assignment.decode_blocks)
        if assignment.block_hashes:
            self._pending.setdefault(assignment.block_hashes[0], {})[assignment.request_id] = assignment

    @property
    def is_overdue_due(self) -> bool:
        """Whether an overdue request is to be placed although workers are busy."""
        return self._num_in_time >= self._num_required

    def _count_turn(self, assignment: Assignment) -> None:
        tokens = assignment.compute_tokens
        if not assignment.is_overdue:
            self._num_in_time += 1
            self.mean_tokens += _SMOOTHING * (tokens - self.mean_tokens) if self.mean_tokens else tokens
            return
        length = tokens / self.mean_tokens if self.mean_tokens else 1.0
        self._num_in_time, self._num_required = 0, OVERDUE_EVERY * min(max(length, 1.0), MAX_PENALTY)

    def first_token(self, request_id: str) -> Assignment | None:
        """The prompt is computed. Returns its assignment the first time; else None."""
        assignment = self._assignments.get(request_id)
        if assignment is None or assignment.has_first_token:
            return None
        assignment.has_first_token = True
        self._count_prompt(assignment, -1)
        compute, decode = assignment.compute, assignment.decode
        compute.add(tokens=-assignment.compute_tokens, prefills=-1, **_prefill_share(-int(decode is not compute)))
        self._count_overdue(assignment, -assignment.compute_tokens)
        if decode is not None:
            decode.add(reported_sequences=assignment.width - 1, blocks=-assignment.decode_blocks)
        if assignment.block_hashes:
            bucket = self._pending[assignment.block_hashes[0]]
            del bucket[request_id]
            if not bucket:
                del self._pending[assignment.block_hashes[0]]
        return assignment

    def end(self, request_id: str) -> None:
        """Remove everything that is still counted for it. Idempotent."""
        assignment = self._assignments.get(request_id)
        if assignment is None:
            return
        self.first_token(request_id)
        if assignment.decode is not None:
            assignment.decode.add(requests=-1, sequences=-assignment.width, reported_sequences=-assignment.width)
        del self._assignments[request_id]

    def narrow(self, request_id: str, width: int) -> None:
        """Only `width` sequences of a group continue, at least one. It never grows again."""
        assignment = self._assignments.get(request_id)
        if assignment is None or not 1 <= width < assignment.width:
            return
        num_ended, assignment.width = assignment.width - width, width
        if assignment.decode is not None:
            assignment.decode.add(sequences=-num_ended, reported_sequences=-num_ended * assignment.has_first_token)

    def _count_overdue(self, assignment: Assignment, tokens: int) -> None:
        if not assignment.is_overdue:
            return
        account = assignment.compute
        account.own.overdue_tokens += tokens
        if assignment.decode is not account:
            self.overdue_blocks += assignment.decode_blocks if tokens > 0 else -assignment.decode_blocks
        if account.own.overdue_tokens:
            self.with_overdue.add(account)
        else:
            self.with_overdue.discard(account)

    def _count_prompt(self, assignment: Assignment, sign: int) -> None:
        """Its prompt queues at a worker (1), or does so no longer (-1)."""
        self.num_overdue += sign * assignment.is_overdue
        for counts, count in ((self._queued, assignment.compute_tokens), (self.num_queued, 1)):
            counts[assignment.tenant] += sign * count
            if not counts[assignment.tenant]:
                del counts[assignment.tenant]

    def excess(self, tenant: str) -> float:
        """The tenant's queued tokens over an equal share of all queued tokens, minus 1; 0 if it has no more, or is
        alone.
        """
        own = self._queued.get(tenant, 0)
        if not own or len(self._queued) < 2:
            return 0.0
        share = sum(self._queued.values()) / len(self._queued)
        return max(0.0, own / share - 1.0)

    def pending_matches(self, hashes: tuple[bytes, ...]) -> dict[WorkerAccount, int]:
        """Workers that are about to compute a prefix of `hashes`, and how many of its hashes they will hold.

        Only the MAX_PENDING_COMPARED newest prompts are compared.
        """
        found: dict[WorkerAccount, int] = {}
        bucket = self._pending.get(hashes[0]) if hashes else None
        if bucket is None:
            return found
        known_of, second = found.get, hashes[1:2]
        for assignment in islice(reversed(bucket.values()), MAX_PENDING_COMPARED):
            known, chain = known_of(assignment.compute, 0), assignment.block_hashes
            if not known and chain[1:2] != second:  # most share a system prompt and no more
                found[assignment.compute] = 1
            elif chain[known : known + 1] == hashes[known : known + 1]:  # it shares more than is known
                found[assignment.compute] = common_prefix(hashes, chain, known)
        return found


def unpaired_workers(
    prefills: Collection[str], decodes: Collection[str], incompatible: IncompatiblePairs
) -> frozenset[str]:
    """Workers that are compatible with none of the other role; they take no requests.

    Empty if a role is absent: then no KV is transferred.
    """
    if not incompatible or not prefills or not decodes:
        return frozenset()
    unpaired = {p for p in prefills if all((p, d) in incompatible for d in decodes)}
    unpaired |= {d for d in decodes if all((p, d) in incompatible for p in prefills)}
    return frozenset(unpaired)


def compatible_sets(
    prefills: Sequence[str], decodes: Sequence[str], incompatible: IncompatiblePairs
) -> list[tuple[list[int], list[int]]]:
    """(rows of prefill workers, rows of decode workers) within which every pair is compatible; together all compatible
    pairs.

    Each decode worker is in exactly one set, with all others that are compatible with the same prefill workers.
    """
    members: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, decode in enumerate(decodes):
        partners = tuple(index for index, prefill in enumerate(prefills) if (prefill, decode) not in incompatible)
        members[partners].append(row)
    return [(list(partners), rows) for partners, rows in members.items()]


class LiveWorkers:
    """Accounts by worker, and columns that are laid out when they are next read.

    Its attributes are 13: most keep what would be summed up over all accounts for every decision.
    """

    def __init__(self, model: CostModel, index_row: Callable[[str], int]) -> None:
        """`index_row`: a worker's row in the answers of the prefix index."""
        self.accounts: dict[str, WorkerAccount] = {}
        self.incompatible: IncompatiblePairs = {}
        self.suspected: frozenset[str] = frozenset()  # workers that do not answer
        self._prefill_rate: float | None = None
        self._model, self._index_row = model, index_row
        self._columns: dict[str, Columns] | None = None
        self.has_both = False  # whether some worker has both roles; of the layout
        self.all_both = False  # whether all have; of the layout
        self._unpaired: frozenset[str] | None = None
        self._changed: dict[WorkerAccount, None] = {}  # whose own load is to be shared with the other routers
        self.num_foreign_prompts = 0  # prompts that other routers have assigned and that are not computed
        self._num_other_routers: int | None = 0  # None: some worker's has changed

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens/s: the mean of all workers' last measurements, so that a router that has just connected
        assumes the same.
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
            self._forget(known)
        self.accounts[info.worker_id] = WorkerAccount(info, self._model)
        return True

    def down(self, worker_id: str) -> None:
        """Forget a worker. The load of its requests is counted nowhere."""
        if (account := self.accounts.pop(worker_id, None)) is not None:
            self._stop_sharing(account)
            self._forget(account)
            self._columns = self._unpaired = self._prefill_rate = None

    def role_changed(self, worker_id: str, role: str) -> None:
        """From now on the worker takes what this role does; its load stays. Unknown workers are ignored."""
        if (account := self.accounts.get(worker_id)) is not None:
            account.info = msgspec.structs.replace(account.info, role=role)
            self._columns = self._unpaired = self._prefill_rate = None

    def _forget(self, account: WorkerAccount) -> None:
        self._num_other_routers = None
        account.set_places({})
        self.num_foreign_prompts -= account.foreign_prompts

    def _stop_sharing(self, account: WorkerAccount) -> None:
        """Until the worker reports that other routers listen."""
        account.changed = None
        self._apply_others(account, AssignedByOthers(0, False))
        self._changed.pop(account, None)

    def apply_others(self, worker_id: str, others: AssignedByOthers) -> None:
        """What the other routers have assigned to a worker; from now on ours is shared with them.

        Unknown workers are ignored.
        """
        account = self.accounts.get(worker_id)
        if account is None:
            return
        self._apply_others(account, others)
        if not others.num_others:
            account.changed = None
            self._changed.pop(account, None)
        elif account.changed is None:
            account.changed = self._changed
            self._changed[account] = None

    def _apply_others(self, account: WorkerAccount, others: AssignedByOthers) -> None:
        if others.num_others != account.num_others:
            self._num_other_routers = None
        self.num_foreign_prompts -= account.foreign_prompts
        account.apply_others(others)
        self.num_foreign_prompts += account.foreign_prompts

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
        self.num_foreign_prompts -= account.foreign_prompts
        account.apply_report(report, now_s)
        self.num_foreign_prompts += account.foreign_prompts
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
        if self._columns is None:
            self._columns = self._laid_out()
        columns = self._columns[role]
        if columns.stale:
            columns.write_stale()
        return columns

    def unreported_share(self) -> float:
        """Of all sequences at the workers, the share that other routers assigned without reporting it; 0 if nothing
        runs.
        """
        prefills, decodes = self.columns(Role.PREFILL), self.columns(Role.DECODE)
        unreported = prefills.num_unreported + decodes.num_unreported
        return unreported / (prefills.num_sequences + decodes.num_sequences) if unreported else 0.0

    def num_other_routers(self) -> int:
        """Other routers that are connected to some worker."""
        if self._num_other_routers is None:
            self._num_other_routers = max([account.num_others for account in self.accounts.values()], default=0)
        return self._num_other_routers

    def accounts_of(self, decision: Decision) -> tuple[WorkerAccount, WorkerAccount | None]:
        """(the worker that computes the prompt, the worker that decodes)."""
        compute = self.accounts[decision.prefill or decision.decode or ""]
        return compute, self.accounts[decision.decode] if decision.decode is not None else None

    def prefill_tokens_per_s(self, worker_id: str | None) -> float:
        """A worker's prefill speed: measured, or the mean of the others; 0: the worker is unknown."""
        account = self.accounts.get(worker_id) if worker_id is not None else None
        return 0.0 if account is None else account.prefill_tokens_per_s or self.prefill_rate

    def _laid_out(self) -> dict[str, Columns]:
        ordered = sorted(self.accounts.items())
        nodes: dict[str, int] = {}
        tables = {}
        places: dict[WorkerAccount, dict[Role, tuple[Columns, int]]] = {account: {} for _, account in ordered}
        for role in Role:
            accounts = [account for _, account in ordered if role in sides(account.info.role)]
            numbers = [nodes.setdefault(account.info.node_id, len(nodes)) for account in accounts]
            tables[role.value] = columns = Columns(
                [account.info for account in accounts], numbers, [self._index_row(a.info.worker_id) for a in accounts]
            )
            for row, account in enumerate(accounts):
                places[account][role] = columns, row
        self.has_both = any(len(its_places) > 1 for its_places in places.values())
        self.all_both = self.has_both and all(len(its_places) != 1 for its_places in places.values())
        for account, its_places in places.items():
            account.set_places(its_places)
        return tables
