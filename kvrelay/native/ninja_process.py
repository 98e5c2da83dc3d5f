"""A process of its own that compiles one of FlashInfer's modules with ninja, and holds the module's lock meanwhile.

cluster/compiling runs it by its path, with an order as JSON. It prints what ninja prints; its status is ninja's, or
LOCKED where another process compiles the module. It ends with its parent, and ninja with it: files that are compiled by
then stay for the next time. Imports nothing of ours.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys

from filelock import FileLock, Timeout

LOCKED = 75
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """SIGTERM when the thread that started this process ends, as all do when their process is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> int:
    order = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _end_with_parent()
    if os.getppid() != order["parent"]:
        return LOCKED
    os.nice(order["niceness"])
    try:
        with FileLock(order["lock"], timeout=0, thread_local=False):  # FlashInfer's own: it compiles at first use
            ninja = subprocess.Popen(order["command"], preexec_fn=_end_with_parent)
            try:
                return ninja.wait()
            finally:
                if ninja.poll() is None:
                    ninja.terminate()
                    ninja.wait()
    except Timeout:
        return LOCKED


if __name__ == "__main__":
    sys.exit(main())
