"""SIGSTOP that has taken effect."""

import os
import signal


def stop(pid: int) -> None:
    """Stop a child of this process; returns when none of its threads runs.

    The signal is delivered when a thread of it is next scheduled: on a busy machine the others run on for a while, and
    answer what a test believes to have come after the stop.
    """
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
