"""The processes that bench/kvcache/pool.py compares: each answers jobs, JSON lines both ways."""

import json
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Contender:
    """One process that answers jobs."""

    def __init__(self, name: str, command: str, module: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [*shlex.split(command), "-m", module, name],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def query(self, *job: int) -> dict[str, float] | None:
        """Seconds of each step of such a job; None when the process has gone (its last words are printed)."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(job), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return None
        line = self._process.stdout.readline()
        if line:
            answer: dict[str, float] = json.loads(line)
            return answer
        assert self._process.stderr is not None
        print(f"{self.name} is left out: {self._process.stderr.read().strip().splitlines()[-1:]}")
        return None

    def close(self) -> None:
        self._process.communicate()
