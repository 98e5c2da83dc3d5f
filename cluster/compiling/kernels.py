"""Compiles a worker's kernels (FlashInfer's modules) side by side, with progress, ahead of their first use.

At a start, those that steps need are compiled before the model is loaded, and fa3 in the background for the next start:
by one worker of a machine, at low priority. That ends with the worker; what is compiled by then stays.
"""

import json
import logging
import os
import re
import selectors
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvrelay.config import Settings
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.speculation.draft_fit import prepare_draft_model
from kvrelay.environment import cache_dir
from kvrelay.errors import BackendUnavailable
from kvrelay.kernels.backend import AttentionShape
from kvrelay.kernels.cuda.jit import add_to
from kvrelay.kernels.cuda.modules import KernelModule, KernelNeeds
from kvrelay.kernels.select import kernel_modules
from kvrelay.kvcache.memory.storage import DTYPES, KV_DTYPES
from kvrelay.machine import free_host_bytes
from kvrelay.native import ninja_process
from kvrelay.types import Role

logger = logging.getLogger(__name__)  # cluster/launch/local.py takes its messages for signs of life

_JOB_BYTES = 4 << 30  # of memory, which nvcc may need for one file of attention kernels
_POLL_S = 0.5
_LOG_EVERY_S = 10.0
_LOW = 19  # niceness
_TAIL = 20  # lines of a failed compiler that are shown
_STEP = re.compile(r"\[(\d+)/(\d+)\] ")


Report = Callable[[int, int, str], object]  # files done and in all; which modules, and for how long


def _cuda_home() -> Path:
    """As FlashInfer finds it."""
    if known := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return Path(known)
    nvcc = shutil.which("nvcc")
    return Path("/usr/local/cuda") if nvcc is None else Path(nvcc).parents[1]


def _missing_tools() -> str | None:
    """What this machine lacks to compile anything; None: nothing."""
    tools = {"ninja (pip install ninja)": "ninja", "C++ compiler (c++)": os.environ.get("CXX", "c++")}
    lacks = [name for name, command in tools.items() if shutil.which(command) is None]
    if not (_cuda_home() / "bin" / "nvcc").exists():
        lacks.insert(0, f"nvcc in {_cuda_home()}/bin (CUDA_HOME names another folder)")
    return " and no ".join(lacks) or None


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
    command = ["c++", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(unfinished), "-x", "c++", os.devnull]
    subprocess.run(command, check=True, capture_output=True)
    unfinished.replace(folder / "libcuda.so")
    add_to("LIBRARY_PATH", str(folder), os.pathsep)


class _Running:
    """One module that is being compiled: num_done of num_files, with so many jobs."""

    def __init__(self, module: KernelModule, num_files: int, jobs: int, niceness: int) -> None:
        self.module, self.num_files, self.jobs = module, num_files, jobs
        self.num_done, self._lines = 0, [""]
        command = module.ninja("-j", str(jobs))
        order = {"parent": os.getpid(), "niceness": niceness, "lock": str(module.spec.lock_path), "command": command}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(ninja_process.__file__)), json.dumps(order)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process only, which ends them all
            env={**os.environ, "NINJA_STATUS": "[%f/%t] "},
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout

    def read(self) -> bool:
        """Take what it has printed; False: it has closed its output."""
        data = os.read(self.output.fileno(), 1 << 16)
        *whole, rest = (self._lines.pop() + data.decode(errors="replace")).split("\n")
        self._lines += [*whole, rest]
        for line in whole:
            if match := _STEP.match(line):
                self.num_done, self.num_files = int(match[1]), int(match[2])
        return bool(data)

    def error(self) -> str:
        """The compiler's last lines, without its command."""
        kept = [line[:300] for line in self._lines if line and not _STEP.match(line) and " -c " not in line]
        return "\n".join(kept[-_TAIL:]) or f"exit status {self.process.returncode}"

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.output.close()


class Build:
    """One run that compiles what is not there: `num_modules`. Call `run` once.

    report: called twice a second. jobs: files at a time; None: one for each CPU of this process, and each _JOB_BYTES of
    free memory. is_late: in the background, at low priority; what another process compiles is left to it.
    """

    def __init__(
        self, modules: Sequence[KernelModule], report: Report, *, jobs: int | None = None, is_late: bool = False
    ) -> None:
        found = {module.name: module.files_to_compile() for module in modules}
        self._left = {name: files for name, files in found.items() if files}  # to compile, of each module
        self._num_files, self.num_modules = sum(self._left.values()), len(self._left)
        self._queue = sorted((one for one in modules if found[one.name]), key=lambda one: -found[one.name])
        self._report, self._is_late = report, is_late
        self._jobs = jobs or max(1, min(len(os.sched_getaffinity(0)), free_host_bytes() // _JOB_BYTES))
        self._running: list[_Running] = []
        self._locked: list[KernelModule] = []
        self._began_s = time.monotonic()

    def run(self) -> dict[str, str]:
        """The failures: the compiler's last lines, by the name of the module. Ends its processes in any case."""
        failures: dict[str, str] = {}
        if self._queue:
            if (lacks := _missing_tools()) is not None:
                return {module.name: f"this machine has no {lacks}" for module in self._queue}
            _link_without_driver()
        try:
            while self._queue or self._running or (self._locked and not self._is_late):
                self._start()
                for one in self._ended():
                    self._running.remove(one)
                    one.stop()
                    if one.process.returncode == ninja_process.LOCKED:
                        self._locked.append(one.module)
                        continue
                    del self._left[one.module.name]
                    if one.process.returncode:
                        failures[one.module.name] = one.error()
                self._show()
                if self._locked and not (self._is_late or self._running or self._queue):
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
            self._running.append(_Running(module, files, min(files, free), _LOW if self._is_late else 0))

    def _ended(self) -> list[_Running]:
        """Those that have ended; waits a moment for output."""
        with selectors.DefaultSelector() as selector:
            for one in self._running:
                selector.register(one.output, selectors.EVENT_READ, one)
            return [key.data for key, _ in selector.select(_POLL_S) if not key.data.read()]

    def _show(self) -> None:
        done = self._num_files - sum(self._left.values()) + sum(one.num_done for one in self._running)
        parts = [
            f"{self.num_modules - len(self._left)} of {self.num_modules} modules, {done} of {self._num_files} files"
        ]
        parts += [f"now {', '.join(one.module.title for one in self._running)}"] if self._running else []
        others = ", ".join(module.title for module in self._locked)
        parts += [f"another process compiles {others}"] if others else []
        self._report(done, self._num_files, f"{'; '.join(parts)}; {time.monotonic() - self._began_s:.0f} s")


# ---- of a worker


def needs_of(own: Settings, spec: ModelSpec, draft: ModelSpec | None = None) -> list[KernelNeeds]:
    """Of a model, and of its draft model. own: one role's settings."""
    engine, dtype, found = own.engine, DTYPES[own.model.compute_dtype], []
    for one, kv_dtype in ((spec, KV_DTYPES[own.kv_dtype]), (draft, dtype)):
        if one is not None:
            latent_dim = None if one.latent is None else one.latent.kv_rank
            sizes = (one.num_heads, one.num_kv_heads, one.head_dim, engine.block_size)
            shape = AttentionShape(*sizes, dtype, engine.kv_layout, kv_dtype, latent_dim=latent_dim)
            variants = {(one.query_scale, window, one.attention_softcap) for window in one.layer_windows}
            found.append(KernelNeeds(shape, variants, one.rotary_dim, one.activation))
    return found


def compile_missing(settings: Settings, role: Role, model_dir: Path) -> None:
    """At a worker's start. Raises BackendUnavailable with the compiler's last lines; ModelError, ConfigError."""
    own = settings.for_role(role)
    draft = prepare_draft_model(own, model_dir) if role is Role.DECODE else None
    specs = (ModelSpec.from_folder(model_dir), None if draft is None else ModelSpec.from_folder(draft))
    modules = kernel_modules(own.engine.backend, own.engine.device, needs_of(own, *specs))
    missing = [module for module in modules if module.files_to_compile()]
    late = [module for module in missing if module.is_late]
    if now := [module for module in missing if not module.is_late]:
        _compile(now)
    if late:
        titles = " and ".join(module.title for module in late)
        logger.warning("%s: compiled in the background for the next start; until then fa2 is used", titles)
        threading.Thread(target=_compile_late, args=(late,), name="compile kernels", daemon=True).start()


def _compile(modules: Sequence[KernelModule]) -> None:
    """The messages are warnings because `kvrelay serve` shows these, and the start takes minutes."""
    titles = ", ".join(module.title for module in modules)
    logger.warning("compiling kernels: minutes, once; `kvrelay prepare` does it ahead of time: %s", titles)
    logged_s = began_s = time.monotonic()

    def report(done: int, of: int, what: str) -> None:
        nonlocal logged_s
        if time.monotonic() - logged_s >= _LOG_EVERY_S:
            logged_s = time.monotonic()
            logger.warning("compiling kernels: %s", what)

    failures = Build(modules, report).run()
    for module in modules:
        if module.name in failures and not module.is_optional:
            why = f"{module.title} ({module.name}) does not compile: {failures[module.name]}"
            raise BackendUnavailable("cuda", why)
    logger.warning("kernels are compiled: %.0f s", time.monotonic() - began_s)


def _compile_late(modules: Sequence[KernelModule]) -> None:
    for name, why in Build(modules, lambda *_: None, jobs=1, is_late=True).run().items():
        logger.warning("%s does not compile, fa2 stays in use: %s", name, why)
