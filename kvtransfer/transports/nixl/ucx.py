"""UCX, as NIXL drives it: what it reads from the environment, what we set there, and what cannot work.

UCX reads its variables when it is loaded and when an agent is made; nothing else of it can be
configured through NIXL's Python API. A variable that the user has set is never changed.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, MutableMapping

from kvrelay.plane.ports import port_range

_DEFAULTS = {
    "NIXL_LOG_LEVEL": "WARN",  # INFO goes to stdout
    "UCX_LOG_FILE": "stderr",  # as do UCX's warnings
}
# For an agent that reads: the reads of a link that was cut end after 10 s. By default it is 18 s, and
# more than 150 s for what was asked for after the cut. Not for an agent that is read: when its own
# connection times out in the middle of an answer, UCX aborts the process.
FOR_READING = {
    "UCX_TCP_KEEPIDLE": "4s",
    "UCX_TCP_KEEPINTVL": "2s",
    "UCX_TCP_KEEPCNT": "3",
    "UCX_TCP_USER_TIMEOUT": "10s",
}
_CANNOT_CONNECT = {  # these move bytes, but UCX needs another one to connect two processes
    "self", "sm", "shm", "mm", "posix", "sysv", "cma", "knem", "xpmem", "memory",
    "cuda", "cuda_copy", "cuda_ipc", "gdr_copy",
}  # fmt: skip


def set_defaults() -> None:
    """Before NIXL is imported. UCX listens where the process's other listeners do."""
    if ports := port_range():
        os.environ.setdefault("UCX_TCP_PORT_RANGE", f"{ports.start}-{ports.stop - 1}")
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def problem(environment: Mapping[str, str] = os.environ) -> str | None:
    """Why no agent can be made under these variables, with the remedy; None where that is not known beforehand."""
    names = environment.get("UCX_TLS", "").replace(" ", "")
    chosen = {name.partition(":")[0] for name in names.split(",") if name}
    if not chosen or names.startswith("^") or chosen - _CANNOT_CONNECT:
        return None
    return f"UCX_TLS={names} leaves UCX no way to connect two processes: add tcp (or rc) to it, or unset it"


def explain(error: Exception, environment: Mapping[str, str] = os.environ) -> str:
    """What NIXL said when it could not make an agent, with the variables that may be to blame."""
    said = f"{type(error).__name__}: {error}"
    blamed = [f"{name}={environment[name]}" for name in ("UCX_TLS", "UCX_NET_DEVICES") if environment.get(name)]
    return f"{said} (with {' and '.join(blamed)}: unset it to see whether that is why)" if blamed else said


@contextlib.contextmanager
def variables(values: Mapping[str, str], environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """An agent that is made inside sees `values`, as far as the user has not set them."""
    ours = {name: value for name, value in values.items() if name not in environment}
    environment.update(ours)
    try:
        yield
    finally:
        for name in ours:
            environment.pop(name, None)
