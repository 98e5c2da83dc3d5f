"""Compiles FlashInfer's modules side by side, as many files at a time as cores and memory allow, with progress."""

import json
import os
import re
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvrelay.engine.compiling import build_process
from kvrelay.environment import cache_dir
from kvrelay.kernels.cuda.jit import add_to
from kvrelay.kernels.cuda.modules import KernelModule
from kvrelay.machine import free_host_bytes

_JOB_BYTES = 4 << 30  # of memory, which nvcc may need for one file of attention kernels
_POLL_S = 0.5
_TAIL = 20  # lines of a failed compiler that are shown
_STEP = re.compile(r"\[(\d+)/(\d+)\] ")  # NINJA_STATUS below, or ninja's own


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """modules and files: (done, all). running: titles of what is being compiled; waiting: by another process."""

    modules: tuple[int, int]
    files: tuple[int, int]
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        parts = [f"{self.modules[0]} of {self.modules[1]} modules", f"{self.files[0]} of {self.files[1]} files"]
        parts += [f"now {', '.join(self.running)}"] if self.running else []
        parts += [f"another process compiles {', '.join(self.waiting)}"] if self.waiting else []
        return f"{'; '.join(parts)}; {self.seconds:.0f} s"


Report = Callable[[BuildProgress], object]


def _cuda_home() -> Path:
    """The CUDA toolkit's folder, as FlashInfer finds it."""
    if known := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return Path(known)
    nvcc = shutil.which("nvcc")
    return Path("/usr/local/cuda") if nvcc is None else Path(nvcc).parents[1]


def _link_without_driver() -> None:
    """Where neither a driver nor a toolkit's stub gives a libcuda.so to link with, as in a container's build: an empty
    one, of the driver's name.
    """
    folders = [_cuda_home() / "lib64" / "stubs", *map(Path, os.environ.get("LIBRARY_PATH", "").split(os.pathsep))]
    if any((folder / "libcuda.so").exists() for folder in folders):
        return
    folder = cache_dir() / "libcuda-stub"
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"unfinished-{os.getpid()}"
    command = ["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(unfinished), "-x", "c", os.devnull]
    subprocess.run(command, check=True, capture_output=True)
    unfinished.replace(folder / "libcuda.so")
    add_to("LIBRARY_PATH", str(folder), os.pathsep)


def missing_tools() -> str | None:
    """What this machine lacks to compile anything; None: nothing."""
    tools = {"ninja (pip install ninja)": "ninja", "a C++ compiler (c++)": os.environ.get("CXX", "c++")}
    lacks = [name for name, command in tools.items() if shutil.which(command) is None]
    if not (_cuda_home() / "bin" / "nvcc").exists():
        lacks.insert(0, f"nvcc of CUDA 12.8 or later (in {_cuda_home()}/bin; $CUDA_HOME names another folder)")
    return " and ".join(lacks) or None


def num_jobs() -> int:
    """Files that are compiled at a time: one for each CPU that this process may use, and each _JOB_BYTES of memory."""
    return max(1, min(len(os.sched_getaffinity(0)), free_host_bytes() // _JOB_BYTES))


class _Running:
    """One module that is being compiled. Attributes: process; num_done of num_files; lines of output."""

    def __init__(self, module: KernelModule, num_files: int, jobs: int, niceness: int) -> None:
        self.module, self.num_files, self.jobs = module, num_files, jobs
        self.num_done, self.lines = 0, [""]
        order = {
            "parent": os.getpid(),
            "niceness": niceness,
            "lock": str(module.spec.lock_path),
            "command": module.ninja("-j", str(jobs)),
        }
        # a session of its own: Ctrl-C reaches this process only, which ends them all
        self.process = subprocess.Popen(
            [sys.executable, str(Path(build_process.__file__)), json.dumps(order)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "NINJA_STATUS": "[%f/%t] "},
        )

    def read(self) -> bool:
        """Take what it has printed; False: it has closed its output."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        *whole, rest = (self.lines.pop() + data.decode(errors="replace")).split("\n")
        self.lines += [*whole, rest]
        for line in whole:
            if match := _STEP.match(line):
                self.num_done, self.num_files = int(match[1]), int(match[2])
        return bool(data)

    def error(self) -> str:
        """The compiler's last lines, without its command."""
        kept = [line[:300] for line in self.lines if line and not _STEP.match(line) and " -c " not in line]
        return "\n".join(kept[-_TAIL:]) or f"exit status {self.process.returncode}"

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            self.process.terminate()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Build:
    """One run that compiles what is not there: `num_modules`. Call `run` once.

    Args:
        report: called twice a second, and at the end.
        jobs: files at a time; None: see num_jobs.
        niceness: of the compilers.
        waits: for modules that another process compiles; else they are left to it.
    """

    def __init__(
        self,
        modules: Iterable[KernelModule],
        report: Report,
        *,
        jobs: int | None = None,
        niceness: int = 0,
        waits: bool = True,
    ) -> None:
        found = {module.name: (module, module.files_to_compile()) for module in modules}
        self._left = {name: files for name, (_, files) in found.items() if files}  # to compile, of each module
        self._num_files, self.num_modules = sum(self._left.values()), len(self._left)
        self._queue = sorted((found[name][0] for name in self._left), key=lambda module: -self._left[module.name])
        self._report, self._jobs = report, jobs or num_jobs()
        self._niceness, self._waits = niceness, waits
        self._running: list[_Running] = []
        self._locked: list[KernelModule] = []
        self._began_s = time.monotonic()

    def run(self) -> dict[str, str]:
        """The failures: the compiler's last lines, by the name of the module. Ends its processes in any case."""
        failures: dict[str, str] = {}
        if self._queue and (lacks := missing_tools()) is not None:
            return {module.name: f"this machine has no {lacks}" for module in self._queue}
        if self._queue:
            _link_without_driver()
        try:
            while self._queue or self._running or (self._locked and self._waits):
                self._start()
                for one in self._read():
                    self._running.remove(one)
                    one.stop()
                    if one.process.returncode == build_process.LOCKED:
                        self._locked.append(one.module)
                    elif one.process.returncode:
                        failures[one.module.name] = one.error()
                        del self._left[one.module.name]
                    else:
                        del self._left[one.module.name]
                self._report(self._progress())
                if self._locked and self._waits and not self._running and not self._queue:
                    time.sleep(_POLL_S)
                    self._queue, self._locked = self._locked, []
        finally:
            for one in self._running:
                one.stop()
        return failures

    def _start(self) -> None:
        """The largest modules first: each gets as many jobs as it has files, or as are left."""
        while self._queue and (free := self._jobs - sum(one.jobs for one in self._running)) > 0:
            module = self._queue.pop(0)
            files = self._left[module.name]
            self._running.append(_Running(module, files, min(files, free), self._niceness))

    def _read(self) -> list[_Running]:
        """Those that have ended; waits a moment for output."""
        with selectors.DefaultSelector() as selector:
            for one in self._running:
                assert one.process.stdout is not None
                selector.register(one.process.stdout, selectors.EVENT_READ, one)
            return [key.data for key, _ in selector.select(_POLL_S) if not key.data.read()]

    def _progress(self) -> BuildProgress:
        left = sum(self._left.values()) - sum(one.num_done for one in self._running)
        return BuildProgress(
            modules=(self.num_modules - len(self._left), self.num_modules),
            files=(self._num_files - left, self._num_files),
            running=tuple(one.module.title for one in self._running),
            waiting=tuple(module.title for module in self._locked),
            seconds=time.monotonic() - self._began_s,
        )
