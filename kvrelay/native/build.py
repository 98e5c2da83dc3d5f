"""Builds C sources with the machine's compiler, once, and loads the result.

Owns the cache of compiled libraries: keyed by sources, flags, compiler and processor, written under
a lock and put in place by one rename, so that workers starting together compile once.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvrelay.environment import cache_dir, native_disabled
from kvrelay.errors import BackendUnavailable

logger = logging.getLogger(__name__)

_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-pthread", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-w")
_TARGETS = (("-march=native",), ("-mcpu=native",), ())
_TIMEOUT_S = 180.0
_XXH3 = Path(__file__).parent / "xxh3"
XXH3_SOURCES, XXH3_HEADERS = (
    (_XXH3 / "xxh3.c",),
    (_XXH3 / "xxh3.h", _XXH3 / "lanes.h"),
)  # for those who hash what they move

_PYTHON = Path(__file__).parent / "python" / "python.h"


def load_builtins(name: str, sources: Sequence[Path]) -> tuple[Callable[..., Any], ...]:
    """The functions that the C `sources` make with python/python.h: their `kr_builtins()`. Called like Python's own.

    Raises:
        BackendUnavailable: as load_native does, or an interpreter without CPython's symbols.
    """
    path = load_native(name, sources, [_PYTHON])._name
    try:
        make = ctypes.PyDLL(path).kr_builtins
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(name, str(error)) from error
    make.restype = ctypes.py_object
    functions: tuple[Callable[..., Any], ...] = make()
    return functions


def load_native(name: str, sources: Sequence[Path], headers: Sequence[Path] = ()) -> ctypes.CDLL:
    """The shared library made of C `sources`, compiled now unless the cache has it. Folders of `headers` are searched.

    Raises:
        BackendUnavailable: KVRELAY_NATIVE=0, no C compiler, or it failed; the text says which.
    """
    if native_disabled():
        raise BackendUnavailable(name, "KVRELAY_NATIVE=0")
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise BackendUnavailable(name, "no C compiler (cc, gcc or clang) on the PATH")
    try:
        path = _built(name, compiler, sources, headers)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendUnavailable(name, str(error)) from error


def processor() -> str:
    """The processor's architecture and feature flags, in one line."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()} {features}"


def _digest(compiler: str, sources: Sequence[Path], headers: Sequence[Path]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S).stdout
    parts = [version, processor(), repr(_FLAGS), repr(_TARGETS)]
    parts += [f"{path.name}\0{path.read_text()}" for path in sorted((*sources, *headers))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _built(name: str, compiler: str, sources: Sequence[Path], headers: Sequence[Path]) -> Path:
    folder = cache_dir() / "native"
    target = folder / f"{name}-{_digest(compiler, sources, headers)}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            logger.info("compiling %s with %s (once)", name, compiler)
            start_s = time.perf_counter()
            _compile(compiler, sources, headers, target)
            logger.info("compiled %s in %.1f s", name, time.perf_counter() - start_s)
    return target


def _compile(compiler: str, sources: Sequence[Path], headers: Sequence[Path], target: Path) -> None:
    """All sources to `target` for this very processor; falls back to the compiler's default target."""
    folders = [f"-I{folder}" for folder in dict.fromkeys(header.parent for header in headers)]
    error = ""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
        product = Path(scratch) / target.name
        for architecture in _TARGETS:
            command = [compiler, *_FLAGS, *folders, *architecture]
            error = _build(command, sources, product)
            if not error:
                os.replace(product, target)
                return
    raise OSError(f"{compiler} failed: {error[:500]}")


def _build(command: Sequence[str], sources: Sequence[Path], product: Path) -> str:
    """Compile each source, as many at once as there are CPUs, and link them: the compiler's complaint, "" if there is none."""
    objects = [product.with_name(f"{index}.o") for index in range(len(sources))]

    def compiled(source: Path, target: Path) -> str:
        return _complaint([*command, "-c", str(source), "-o", str(target)])

    by_size = sorted(zip(sources, objects, strict=True), key=lambda pair: -pair[0].stat().st_size)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        complaints = list(pool.map(compiled, *zip(*by_size, strict=True)))
    return next(filter(None, complaints), "") or _complaint(
        [*command, "-shared", *map(str, objects), "-o", str(product), "-lm"]
    )


def _complaint(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"
