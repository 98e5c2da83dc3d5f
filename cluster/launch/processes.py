"""Finds and ends every process that this one has started, at any depth and also when orphaned. Linux only.

Ray's processes overwrite their title and with it their environment, so a marker variable does not last. Instead this
process adopts the orphans among its descendants (it is a "child subreaper").
"""

import ctypes
import os
import time

import psutil

KILL_S = 10.0  # a process that outlives SIGKILL this long waits in the kernel, for a disk or a driver
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on a descendant whose parent dies becomes our child instead of init's."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """Every living descendant; zombies among the children are reaped."""
    living = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
            elif process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.Error, OSError):
            continue
    return living


def end_descendants(*, grace_s: float) -> list[int]:
    """Wait `grace_s` for the descendants to end, then kill the others for at most KILL_S; returns the killed ids."""
    deadline_s = time.monotonic() + grace_s
    while descendants() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    killed: list[int] = []
    deadline_s = time.monotonic() + KILL_S
    while (left := descendants()) and time.monotonic() < deadline_s:
        for process in left:
            try:
                process.kill()
                killed.append(process.pid)
            except psutil.Error:
                continue
        time.sleep(0.02)
    return killed
