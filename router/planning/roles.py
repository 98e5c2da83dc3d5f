"""Which role a worker may take, and what an operator should know of it. Pure."""

from collections.abc import Mapping

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
