"""The ingress's check of a grammar before its request goes to any worker.

A grammar that cannot be compiled, or not cheaply, is its sender's 400 and delays no other request: it is compiled in
another process (checker.py), which is started with the first grammar and ends with this one. No library is imported
here.
"""

import asyncio
import contextlib
import logging
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from kvrelay.errors import InvalidRequest, Overloaded
from kvrelay.grammar import checker
from kvrelay.grammar.checker import GrammarVerdict
from kvrelay.grammar.limits import check_size, digest_of, largest_bound
from kvrelay.plane.messages import GrammarSpec

logger = logging.getLogger(__name__)

MOST_WAITING = 32  # checks that wait or run
MOST_WAIT_S = 5.0  # before a check begins, once the library is loaded
MOST_VERDICTS = 1024  # remembered
ANSWER_S = 60.0  # a checker that takes longer, loading the library included, is given up


class GrammarGate:
    """Checks each grammar once. `aclose` ends its process, which also ends with this one."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: Iterable[int]) -> None:
        arguments = [str(folder), str(vocab_size), *map(str, eos_ids)]
        self._checker = _Checker(arguments)
        self._verdicts: OrderedDict[bytes, GrammarVerdict] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[GrammarVerdict]] = {}

    async def check(self, spec: GrammarSpec) -> None:
        """Returns when workers may compile `spec`.

        Raises InvalidRequest (the message names the key or the limit; or this model's tokenizer cannot be used),
        Overloaded (too many other checks are waiting).
        """
        check_size(spec)
        key = digest_of(spec)
        verdict = self._verdicts.get(key)
        if verdict is None:
            task = self._running.get(key)
            if task is None:
                task = self._running[key] = asyncio.create_task(self._checked(key, spec))
                task.add_done_callback(lambda _: self._running.pop(key, None))
            verdict = await asyncio.shield(task)
        else:
            self._verdicts.move_to_end(key)
        if verdict.refusal is not None:
            raise InvalidRequest(verdict.refusal, code="invalid_grammar")

    async def _checked(self, key: bytes, spec: GrammarSpec) -> GrammarVerdict:
        verdict = await self._checker.check(spec)
        if verdict.refusal is not None and "CPU time" in verdict.refusal and (bound := largest_bound(spec)):
            verdict = GrammarVerdict(refusal=f"{verdict.refusal}; its largest bound is {bound}")
        self._verdicts[key] = verdict
        if len(self._verdicts) > MOST_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def aclose(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.to_thread(self._checker.close)


class _Checker:
    """One checker process and the thread that waits for it: one check at a time."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._num_waiting = 0
        self._is_warm = self._is_closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-check")

    async def check(self, spec: GrammarSpec) -> GrammarVerdict:
        if self._num_waiting >= MOST_WAITING:
            raise Overloaded("too many grammars are waiting to be checked", retry_after_s=1.0)
        self._num_waiting += 1
        try:
            deadline = time.monotonic() + (MOST_WAIT_S if self._is_warm else ANSWER_S)
            verdict = await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, spec, deadline)
        finally:
            self._num_waiting -= 1
        if verdict is None:
            raise Overloaded("too many grammars are waiting to be checked", retry_after_s=1.0)
        if verdict.fault is not None:
            logger.warning("grammars cannot be checked: %s", verdict.fault)
            raise InvalidRequest(f"not available for this model: {verdict.fault}", code="unsupported_parameter")
        return verdict

    def _answer(self, spec: GrammarSpec, deadline: float) -> GrammarVerdict | None:
        """None: the deadline to begin has passed. A checker that has died is started again, once."""
        if time.monotonic() > deadline:
            return None
        for _ in range(2):
            try:
                data = self._ask(msgspec.msgpack.encode(spec))
            except OSError:
                data = None
            if data is not None:
                self._is_warm = True
                return msgspec.msgpack.decode(data, type=GrammarVerdict)
            self._end()
        return GrammarVerdict(fault="the process that checks grammars ends by itself")

    def _ask(self, data: bytes) -> bytes | None:
        if self._is_closed:
            return None
        if self._process is None:
            self._is_warm = False
            self._process = subprocess.Popen(
                [sys.executable, "-m", checker.__name__, *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches this process, which ends it
            )
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        checker.write_frame(asked, data)
        return checker.read_frame(answers) if checker.is_readable(answers.fileno(), ANSWER_S) else None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what is left in its buffer has no reader
                    stream and stream.close()

    def close(self) -> None:
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()  # what its thread waits for ends
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._end()
