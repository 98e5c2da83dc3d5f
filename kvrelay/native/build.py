"""Builds C sources with the machine's compiler, once, and loads the result: a ctypes library or a Python extension
module.

Owns the cache of compiled libraries: keyed by sources, flags, compiler, processor and (extension modules) interpreter,
written under a lock and put in place by one rename, so that workers starting together compile once.
"""

import ctypes
import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

from kvrelay.environment import cache_dir, native_disabled
from kvrelay.errors import BackendUnavailable

logger = logging.getLogger(__name__)

WARNINGS = (
    "-Wall", "-Wextra", "-Wshadow", "-Wpointer-arith", "-Wundef", "-Wstrict-prototypes", "-Wno-unused-parameter",
)  # fmt: skip
_FLAGS = (
    "-O3", "-std=gnu11", "-fPIC", "-pthread", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", *WARNINGS,
)  # fmt: skip
_TARGETS = (("-march=native",), ("-mcpu=native",), ())
_SOURCE_FLAGS = {
    "blake2b.c": ("-mno-avx512f",)  # some compilers vectorise it for AVX-512: 553 ns a block instead of 120
}  # on x86-64, after the target's
_TIMEOUT_S = 180.0

_XXH3 = Path(__file__).parent / "xxh3"
XXH3_SOURCES = (_XXH3 / "xxh3.c",)  # for C code that hashes what it copies
XXH3_HEADERS = (_XXH3 / "xxh3.h", _XXH3 / "vector.h")


def load_extension(name: str, sources: Sequence[Path], headers: Sequence[Path] = ()) -> Any:
    """The Python extension module `name`, compiled against this interpreter's Python.h; see load_native.

    Raises:
        BackendUnavailable: as load_native, or there is no Python.h (Debian: python3-dev).
    """
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        raise BackendUnavailable(name, f"no Python.h in {include}")
    try:
        path = _built(name, _compiler(name), sources, headers, include)
        spec = importlib.util.spec_from_file_location(name, path, loader=ExtensionFileLoader(name, str(path)))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError, subprocess.SubprocessError) as error:
        raise BackendUnavailable(name, str(error)) from error
    return module


def load_native(name: str, sources: Sequence[Path], headers: Sequence[Path] = ()) -> ctypes.CDLL:
    """The shared library made of C `sources`, compiled now unless the cache has it. Folders of `headers` are searched.

    Raises:
        BackendUnavailable: KVRELAY_NATIVE=0, no C compiler, or it failed; the text names which.
    """
    try:
        return ctypes.CDLL(str(_built(name, _compiler(name), sources, headers)))
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendUnavailable(name, str(error)) from error


def load_or_none(load: Callable[..., Any], name: str, *files: Sequence[Path], instead: str) -> Any | None:
    """load_native or load_extension of these sources and headers; None, and `instead` is logged, where it fails."""
    try:
        return load(name, *files)
    except BackendUnavailable as error:
        logger.info("%s: %s", instead, error)
        return None


def _compiler(name: str) -> str:
    if native_disabled():
        raise BackendUnavailable(name, "KVRELAY_NATIVE=0")
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise BackendUnavailable(name, "no C compiler (cc, gcc or clang) on the PATH")
    return compiler


def processor() -> str:
    """The processor's architecture and feature flags, in one line."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()} {features}"


def _digest(compiler: str, sources: Sequence[Path], headers: Sequence[Path], include: Path | None) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S).stdout
    parts = [version, processor(), repr((_FLAGS, _TARGETS, _SOURCE_FLAGS))]
    if include is not None:
        parts += [sys.version, str(sysconfig.get_config_var("SOABI")), str(include)]
    parts += [f"{path.name}\0{path.read_text()}" for path in sorted((*sources, *headers))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _built(
    name: str, compiler: str, sources: Sequence[Path], headers: Sequence[Path], include: Path | None = None
) -> Path:
    folder = cache_dir() / "native"
    target = folder / f"{name}-{_digest(compiler, sources, headers, include)}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            logger.info("compiling %s with %s (once)", name, compiler)
            start_s = time.perf_counter()
            folders = [f"-I{folder}" for folder in dict.fromkeys(header.parent for header in headers)]
            _compile([compiler, *_FLAGS, *folders, *(("-isystem", str(include)) if include else ())], sources, target)
            logger.info("compiled %s in %.1f s", name, time.perf_counter() - start_s)
    return target


def _compile(command: Sequence[str], sources: Sequence[Path], target: Path) -> None:
    """All sources to `target` for this very processor; falls back to the compiler's default target."""
    error = ""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
        product = Path(scratch) / target.name
        for architecture in _TARGETS:
            error = _build([*command, *architecture], sources, product)
            if not error:
                os.replace(product, target)
                return
    raise OSError(f"{command[0]} failed: {error[:500]}")


def _build(command: Sequence[str], sources: Sequence[Path], product: Path) -> str:
    """Compile the sources, one per CPU at a time, and link them. Returns the compiler's error, "" for none."""
    objects = [product.with_name(f"{index}.o") for index in range(len(sources))]

    def compiled(source: Path, target: Path) -> str:
        return _error_of([*command, *source_flags(source), "-c", str(source), "-o", str(target)])

    by_size = sorted(zip(sources, objects, strict=True), key=lambda pair: -pair[0].stat().st_size)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        errors = list(pool.map(compiled, *zip(*by_size, strict=True)))
    return next(filter(None, errors), "") or _error_of(
        [*command, "-shared", *map(str, objects), "-o", str(product), "-lm"]
    )


def source_flags(source: Path) -> tuple[str, ...]:
    """The flags of one source beside those of all."""
    return _SOURCE_FLAGS.get(source.name, ()) if platform.machine() in ("x86_64", "AMD64") else ()


def _error_of(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"
