"""Reads /proc: which processes belong together, what memory and CPU each one takes. Linux only."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """One process at one moment. `pss_bytes` shares common pages out among their users, so that sums are right."""

    pid: int
    name: str
    pss_bytes: int
    cpu_s: float


def pids() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def _read(pid: int, what: str) -> bytes:
    """A file of a process; empty when it has gone or is not ours to read."""
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""


def command_line(pid: int) -> list[str]:
    return [part.decode("utf-8", "replace") for part in _read(pid, "cmdline").split(b"\0") if part]


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat after the name: state, parent, ..."""
    return _read(pid, "stat").decode("utf-8", "replace").rpartition(") ")[2].split()


def parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def own_pid(pid: int) -> int:
    """How the process itself knows its pid, in a namespace of its own; 0 when it has gone."""
    found = [line for line in _read(pid, "status").decode().splitlines() if line.startswith("NSpid:")]
    return int(found[0].split()[-1]) if found else 0


def session(pid: int) -> int:
    """The session it belongs to; 0 when it has gone."""
    fields = _stat(pid)
    return int(fields[3]) if len(fields) > 3 else 0


def is_alive(pid: int) -> bool:
    """Whether it runs (a zombie does not)."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def descendants(root: int) -> set[int]:
    """`root` and everything below it."""
    parents = {pid: parent(pid) for pid in pids()}
    family, grew = {root}, True
    while grew:
        more = {pid for pid, above in parents.items() if above in family} - family
        family |= more
        grew = bool(more)
    return family


def open_files(pid: int, target: str) -> list[Path]:
    """Paths by which others can open what this process holds open, where the name begins so: memfds too."""
    return [Path(path) for path in glob(f"/proc/{pid}/fd/*") if os.path.realpath(path).startswith(target)]


def carrying(name: str, value: str) -> set[int]:
    """Processes that were started with the environment variable `name=value`, however they are related."""
    wanted = f"{name}={value}".encode()
    return {pid for pid in pids() if wanted in _read(pid, "environ").split(b"\0") and is_alive(pid)}


def find(matches: Callable[[list[str]], bool]) -> list[int]:
    """Processes whose command line matches, but for this one."""
    return [pid for pid in pids() if pid != os.getpid() and (line := command_line(pid)) and matches(line)]


def usage(pid: int) -> ProcessUsage | None:
    """None when the process has gone."""
    fields = _stat(pid)
    if len(fields) < 13 or not is_alive(pid):
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return ProcessUsage(pid, short_name(pid), memory(pid, "Pss")[0], cpu_s)


def memory(pid: int, *names: str) -> list[int]:
    """Bytes of a process's memory by the kernel's names (Pss, Rss, Pss_File); 0 for a process that has gone."""
    lines = (line.split() for line in _read(pid, "smaps_rollup").decode().splitlines())
    found = {parts[0]: int(parts[1]) * 1024 for parts in lines if parts[-1] == "kB"}
    return [found.get(f"{name}:", 0) for name in names]


def shared_files(pid: int) -> set[str]:
    """Files of /dev/shm that it maps."""
    lines = _read(pid, "maps").decode("utf-8", "replace").splitlines()
    return {path for line in lines if (path := line.partition(" /dev/shm/")[2])}


def short_name(pid: int) -> str:
    """Enough of the command line to know what it is: programs by name, python by what it runs."""
    line = command_line(pid)
    if not line:
        return "?"
    if line[0].startswith("ray::"):
        return line[0]
    parts = [Path(part).name for part in line if not part.startswith("-")][:3]
    if line[0].endswith(("python", "python3", "python3.11", "python3.12")):
        parts = parts[1:]
        if "-m" in line:
            parts = line[line.index("-m") + 1 :][:2]
    return " ".join(parts)[:60] or Path(line[0]).name
