"""The processes of tests/kvtransfer/chaos/chaos.py: orders to them, their events, killing, freezing and starting them
again.
"""

import asyncio
import contextlib
import itertools
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
START_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 15.0


class Gone(Exception):
    """The process that was asked is no more."""


class Incarnation:
    """One life of a member. `on_event` hears its events and, at its end, {"event": "gone"}."""

    def __init__(
        self, role: str, name: str, epoch: str, on_event: Callable[["Incarnation", dict[str, Any]], None]
    ) -> None:
        self.role, self.name, self.epoch = role, name, epoch
        self.is_ready = self.is_frozen = self.is_gone = False
        self.num_freezes = 0
        self.num_late_writes = 0
        self.ready_at = 0.0
        self.paths: list[str] = []  # those of its configuration that can be used here
        self._on_event = on_event
        self._ending = ""  # "killed" or "asked to stop": by us
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed when it has ended)
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, config: dict[str, Any]) -> None:
        """Run it; returns when it takes orders. Raises RuntimeError with its last words."""
        whole = {**config, "name": self.name, "epoch": self.epoch}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.kvtransfer.chaos.end",
            self.role,
            json.dumps(whole),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._errors,
            limit=1 << 24,
            cwd=ROOT,
        )
        ready = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(ready))
        async with asyncio.timeout(START_TIMEOUT_S):
            await ready
        self.is_ready, self.ready_at = True, time.monotonic()

    async def _read(self, ready: "asyncio.Future[None]") -> None:
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            message = json.loads(line)
            if message.get("event") == "ready":
                self.paths = message["paths"]
                ready.set_result(None)
            elif "re" in message:
                self._asked.pop(message.pop("re")).set_result(message)
            else:
                self._on_event(self, message)
        code = await self._process.wait()
        self.is_ready, self.is_gone = False, True
        if not ready.done():
            ready.set_exception(RuntimeError(f"{self.name} did not start: {self._last_words()}"))
        for asked in self._asked.values():
            asked.set_exception(Gone(self.name))
            asked.exception()  # seen, though nobody may wait for it
        is_expected = self._ending == "killed" or (self._ending == "asked to stop" and code == 0)
        words = "" if is_expected else f"exit code {code}: {self._last_words()}"
        self._on_event(self, {"event": "gone", "crash": words})
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        return " | ".join(self._errors.read().decode("utf-8", "replace").strip().splitlines()[-3:])

    async def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """The answer, however late a frozen one is. Raises Gone."""
        if self.is_gone or self._process is None or self._process.stdin is None:
            raise Gone(self.name)
        number = next(self._numbers)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        with contextlib.suppress(ConnectionError):  # its end is seen by _read
            self._process.stdin.write(json.dumps({"id": number, "op": op, **fields}).encode() + b"\n")
        return await asked

    def kill(self) -> None:
        self._ending = "killed"
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        self.is_frozen = True
        self.num_freezes += 1
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.is_frozen = False
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def stop(self) -> None:
        """Let it end by itself, as a worker that is shut down; a code other than 0 is a crash."""
        if self._process is None or self._process.stdin is None or self._reading is None:
            return
        self._ending = self._ending or "asked to stop"
        self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:  # told as a crash
            self._signal(signal.SIGKILL)
        await self._reading


class Member:
    """A name that stays while its processes come and go."""

    def __init__(
        self, role: str, index: int, config: dict[str, Any], on_event: Callable[[Incarnation, dict[str, Any]], None]
    ) -> None:
        self.role, self.name, self.config = role, f"{role}-{index}", config
        self._on_event = on_event
        self._lives = itertools.count(1)
        self.now = self._next()

    def _next(self) -> Incarnation:
        return Incarnation(self.role, self.name, f"{self.name}#{next(self._lives)}", self._on_event)

    async def start(self) -> None:
        """The next life (the first one included)."""
        if self.now.is_gone:
            self.now = self._next()
        await self.now.start(self.config)
