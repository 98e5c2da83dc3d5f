"""Which role a worker may take, what an operator should know of it, and which workers the planner switches. Pure."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from kvrelay.router.planning.types import CountLimits, WorkerCounts
from kvrelay.types import WORKER_ROLES, Role, sides


def change_problem(roles: Mapping[str, str], worker_id: str, role: str) -> str | None:
    """Why this worker may not take this role; None: it may. `roles`: of every live worker now."""
    if role not in WORKER_ROLES:
        return f"there is no role {role!r}: give {', '.join(WORKER_ROLES[:-1])} or {WORKER_ROLES[-1]}"
    if worker_id not in roles:
        return f"there is no worker {worker_id!r}; there are: {', '.join(sorted(roles)) or 'none'}"
    decoding = [name for name, now in roles.items() if Role.DECODE in sides(now)]
    if decoding == [worker_id] and Role.DECODE not in sides(role):
        return f"{worker_id} is the last worker that decodes: without one, nothing can be served"
    return None


def change_notice(roles: Mapping[str, str]) -> str:
    """What follows from these roles that may be unexpected; "": nothing."""
    if any(Role.PREFILL in sides(now) for now in roles.values()):
        return ""
    return "no prefill worker is left: decode workers compute every prompt themselves"


@dataclass(frozen=True, slots=True)
class PlacedWorker:
    """A running worker that stays, as the planner sees it."""

    worker_id: str
    home: Role  # of the deployment that started it, and that starts it again after a crash
    role: Role  # now
    cost: tuple[float, ...] = ()  # of emptying it; the smallest goes first


@dataclass(frozen=True, slots=True)
class RolePlan:
    """`switches`: the new role by worker. `replicas`: of each deployment, those that stay and those to start.
    `leaving`: the running workers that stop.
    """

    switches: dict[str, Role]
    replicas: dict[Role, int]
    leaving: frozenset[str]


def counts_now(deployed: WorkerCounts, workers: Iterable[PlacedWorker]) -> WorkerCounts:
    """Workers by role. `deployed`: by deployment, those that still start included, which begin in its role."""
    have = dict(zip(Role, deployed, strict=True))
    for one in workers:
        have[one.home] -= 1
        have[one.role] += 1
    return WorkerCounts(*have.values())


def role_plan(
    wanted: WorkerCounts,
    deployed: WorkerCounts,
    workers: Collection[PlacedWorker],
    limits: CountLimits,
    ordered: Collection[str] = (),
    *,
    may_switch: bool = True,
) -> RolePlan:
    """How the wanted counts of the roles come about: by switches as far as they go, then by starts and stops.

    A deployment's replicas stay within its limits: where one is full, the other starts the worker, which is switched
    once it runs. So is one that Serve has replaced after a crash and that is back in its deployment's role. The last
    running worker of a role is never switched.

    Args:
        wanted: by role. deployed: replicas by deployment, those that still start included.
        ordered: the workers that were to switch before, which are taken first.
    """
    have = dict(zip(Role, counts_now(deployed, workers), strict=True))
    target = dict(zip(Role, wanted, strict=True))
    roles = {one.worker_id: one.role for one in workers}
    switches: dict[str, Role] = {}
    for role in Role if may_switch else ():
        other = _other(role)
        able = [one for one in workers if one.role == other]
        able.sort(key=lambda one: (one.worker_id not in ordered, one.home != role, one.cost, one.worker_id))
        count = max(0, min(target[role] - have[role], have[other] - target[other]))
        switches |= {one.worker_id: role for one in able[: min(count, len(able) - 1)]}
        have[role], have[other] = have[role] + count, have[other] - count  # those that still start switch later
    roles |= switches
    replicas, staying = dict(zip(Role, deployed, strict=True)), {one.worker_id: one for one in workers}
    for role in Role:
        for _ in range(target[role] - have[role]):
            home = role if replicas[role] < getattr(limits, f"max_{role}") else _other(role)
            replicas[home] += replicas[home] < getattr(limits, f"max_{home}")
        for _ in range(have[role] - target[role]):
            num_starting = replicas[role] - sum(one.home == role for one in staying.values())
            if num_starting > 0 and replicas[role] > getattr(limits, f"min_{role}"):
                replicas[role] -= 1  # it holds nothing yet
                continue
            able = [one for one in staying.values() if replicas[one.home] > getattr(limits, f"min_{one.home}")]
            if able:
                gone = min(able, key=lambda one: (roles[one.worker_id] != role, one.cost, one.worker_id))
                del staying[gone.worker_id]
                replicas[gone.home] -= 1
    leaving = frozenset(roles.keys() - staying.keys())
    return RolePlan({name: role for name, role in switches.items() if name in staying}, replicas, leaving)


def _other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL
