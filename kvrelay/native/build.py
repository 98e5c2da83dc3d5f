"""Builds C sources with the machine's compiler, once, and loads the result: a ctypes library or a Python extension
module. A library that was compiled ahead for this processor's level (native/ahead.py) goes first: it needs no compiler.

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

from kvrelay.environment import cache_dir, native_disabled
from kvrelay.errors import BackendUnavailable
from kvrelay.native import ahead
from kvrelay.native.ahead import CpuLevel

logger = logging.getLogger(__name__)

WARNINGS = (
    "-Wall", "-Wextra", "-Wshadow", "-Wpointer-arith", "-Wundef", "-Wstrict-prototypes", "-Wno-unused-parameter",
)  # fmt: skip
_FLAGS = (
    "-O3", "-std=gnu11", "-fPIC", "-pthread", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", *WARNINGS,
)  # fmt: skip
_TARGETS = (("-march=native",), ("-mcpu=native",), ())
_X86 = platform.machine() in ("x86_64", "AMD64")
_SOURCE_FLAGS = {  # after the target's
    "blake2b.c": ("-mno-avx512f",) if _X86 else (),  # some compilers vectorise it so: 553 ns a block instead of 120
    "candidates.c": ("-ffp-contract=off",),  # rounds as Python does
}
_ALL_FLAGS = (*_FLAGS, repr(_SOURCE_FLAGS))
_TIMEOUT_S = 180.0

_XXH3 = Path(__file__).parent / "xxh3"
XXH3_SOURCES = (_XXH3 / "xxh3.c",)  # for C code that hashes what it copies
XXH3_HEADERS = (_XXH3 / "xxh3.h", _XXH3 / "vector.h")


@dataclass(frozen=True)
class NativeLibrary:
    """What a library is compiled from. Folders of `headers` are searched."""

    name: str
    sources: Sequence[Path]
    headers: Sequence[Path] = ()
    is_extension: bool = False  # a Python extension module, not a library for ctypes

    @classmethod
    def extension(cls, name: str, module_file: str, source: str, includes: Sequence[Path] = ()) -> "NativeLibrary":
        """Of one source in the folder `native` beside a module's file, which includes others."""
        return cls(name, [Path(module_file).parent / "native" / source], list(includes), is_extension=True)

    def load(self) -> Any:
        """Raises BackendUnavailable."""
        return (load_extension if self.is_extension else load_native)(self.name, self.sources, self.headers)

    def load_or_none(self, *, instead: str) -> Any | None:
        """None, and `instead` is logged, where it cannot be loaded."""
        try:
            return self.load()
        except BackendUnavailable as error:
            logger.info("%s: %s", instead, error)
            return None

    def compile_ahead(self, level: CpuLevel) -> Path:
        """Compile for `level`, which this processor need not have, unless that is done; the library's path.

        Raises:
            BackendUnavailable: there is no C compiler or no Python.h, or the compiler fails.
        """
        target = ahead.path_of(
            self.name, level, _ALL_FLAGS, (*self.sources, *self.headers), is_extension=self.is_extension
        )
        if not target.exists():
            include = _include(self.name) if self.is_extension else None
            command = _command(_compiler(self.name), self.headers, include)
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                _compile(command, self.sources, target, (level.flags,))
            except (OSError, subprocess.SubprocessError) as error:
                raise BackendUnavailable(self.name, str(error)) from error
        return target


def load_extension(name: str, sources: Sequence[Path], headers: Sequence[Path] = ()) -> Any:
    """The Python extension module `name`, compiled against this interpreter's Python.h; see load_native.

    Raises:
        BackendUnavailable: as load_native, or there is no Python.h (Debian: python3-dev).
    """
    try:
        path = _compiled_ahead(name, sources, headers, is_extension=True)
        if path is None:
            include = _include(name)
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
        path = _compiled_ahead(name, sources, headers, is_extension=False)
        return ctypes.CDLL(str(path or _built(name, _compiler(name), sources, headers)))
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendUnavailable(name, str(error)) from error


def _compiled_ahead(name: str, sources: Sequence[Path], headers: Sequence[Path], *, is_extension: bool) -> Path | None:
    """The fastest library for this processor that was compiled ahead, if any. Raises BackendUnavailable."""
    _check_enabled(name)
    if not ahead.folder().is_dir():
        return None
    paths = (
        ahead.path_of(name, level, _ALL_FLAGS, (*sources, *headers), is_extension=is_extension)
        for level in ahead.runnable(processor().split())
    )
    return next(filter(Path.exists, paths), None)


def _include(name: str) -> Path:
    """The folder of the interpreter's headers. Raises BackendUnavailable."""
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        raise BackendUnavailable(name, f"no Python.h in {include}")
    return include


def _check_enabled(name: str) -> None:
    if native_disabled():
        raise BackendUnavailable(name, "KVRELAY_NATIVE=0")


def _compiler(name: str) -> str:
    _check_enabled(name)
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise BackendUnavailable(name, "no C compiler (cc, gcc or clang) on the PATH, and nothing compiled ahead fits")
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
            _compile(_command(compiler, headers, include), sources, target)
            logger.info("compiled %s in %.1f s", name, time.perf_counter() - start_s)
    return target


def _command(compiler: str, headers: Sequence[Path], include: Path | None) -> list[str]:
    folders = [f"-I{folder}" for folder in dict.fromkeys(header.parent for header in headers)]
    return [compiler, *_FLAGS, *folders, *(("-isystem", str(include)) if include else ())]


def _compile(
    command: Sequence[str], sources: Sequence[Path], target: Path, architectures: Sequence[tuple[str, ...]] = _TARGETS
) -> None:
    """All sources to `target`, for the first of `architectures` that the compiler accepts: by default this very
    processor, else the compiler's default target.
    """
    error = ""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
        product = Path(scratch) / target.name
        for architecture in architectures:
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
    return _SOURCE_FLAGS.get(source.name, ())


def _error_of(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"
