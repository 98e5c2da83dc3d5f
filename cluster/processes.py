"""Finds and ends every process of one `kvrelay serve`, however deep or orphaned.

All of them inherit a mark in their environment. Linux only, like Ray's own process control here.
"""

import os
import secrets
import time

import psutil

MARK = "KVRELAY_SESSION"


def mark_this_process() -> str:
    """Set a new mark, which every process started from now on inherits; returns it."""
    mark = secrets.token_hex(8)
    os.environ[MARK] = mark
    return mark


def marked(mark: str) -> list[psutil.Process]:
    """Every living process with this mark but the calling one."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def end_marked(mark: str, *, grace_s: float) -> list[int]:
    """Wait `grace_s` for the marked processes to go, then kill them; the ids of those killed."""
    deadline_s = time.monotonic() + grace_s
    while (left := marked(mark)) and time.monotonic() < deadline_s:
        psutil.wait_procs(left, timeout=0.2)
    killed: list[int] = []
    while left := marked(mark):
        for process in left:
            try:
                process.kill()
                killed.append(process.pid)
            except psutil.Error:
                continue
        psutil.wait_procs(left, timeout=1.0)
    return killed
