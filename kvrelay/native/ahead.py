"""Libraries compiled ahead for named processors, for machines that have no compiler.

`kvrelay prepare --cpu LEVEL` writes them beside the installed packages (share/kvrelay/native of the environment), so
that a container image carries them. A name holds the level and a digest of sources, flags and interpreter: what another
version has compiled is never loaded. Imports nothing of ours.
"""

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_V2 = frozenset(["cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"])
_V3 = _V2 | frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])


@dataclass(frozen=True, slots=True)
class CpuLevel:
    """A set of instructions to compile for.

    flags: the compiler's. features: of /proc/cpuinfo; a processor that has all of them runs the result.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    features: frozenset[str]


LEVELS = (  # the fastest first; x86-64-v3 and -v4 are those of the x86-64 ABI
    CpuLevel("x86-64-v4-bf16", "x86_64", ("-march=x86-64-v4", "-mavx512bf16"), _V4 | {"avx512_bf16"}),
    CpuLevel("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _V4),
    CpuLevel("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    CpuLevel("x86-64", "x86_64", ("-march=x86-64",), frozenset()),
    CpuLevel("armv8-a", "aarch64", ("-march=armv8-a",), frozenset()),
)


def levels_of_machine(machine: str | None = None) -> tuple[CpuLevel, ...]:
    """Those that a compiler of this kind of machine can compile for, the fastest first."""
    wanted = machine or platform.machine()
    return tuple(level for level in LEVELS if level.machine == wanted)


def runnable(features: Iterable[str], machine: str | None = None) -> tuple[CpuLevel, ...]:
    """The levels that a processor with these features runs, the fastest first."""
    has = frozenset(features)
    return tuple(level for level in levels_of_machine(machine) if level.features <= has)


def folder() -> Path:
    """Where this environment keeps libraries that were compiled ahead."""
    return Path(sys.prefix) / "share" / "kvrelay" / "native"


def path_of(name: str, level: CpuLevel, flags: Sequence[str], files: Iterable[Path], *, is_extension: bool) -> Path:
    """Where the library of these sources and headers lies, if it is compiled."""
    parts = [repr((level.flags, tuple(flags)))]
    if is_extension:
        parts += [str(sys.version_info[:2]), str(sysconfig.get_config_var("SOABI"))]
    parts += [f"{path.name}\0{path.read_text()}" for path in sorted(files)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return folder() / f"{name}.{level.name}.{digest}.so"
