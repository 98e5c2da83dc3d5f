"""A core lease ends with its holder, however that ends."""

import subprocess
import sys
from pathlib import Path

from kvrelay.cluster.cores import acquire_cores


def test_a_killed_holders_cores_are_free_at_once(tmp_path: Path):
    program = (
        "import sys, pathlib; from kvrelay.cluster.cores import acquire_cores;"
        f"acquire_cores(pathlib.Path({str(tmp_path)!r}), (0, 1), 1); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        other = acquire_cores(tmp_path, (0, 1), 1)
        assert other.cores == (1,)
        holder.kill()
    again = acquire_cores(tmp_path, (0, 1), 1)
    assert again.cores == (0,)
    other.release()
    again.release()
