"""The process that checks grammars for an ingress: compiles each in a fork of its own, which may die.

A compiler cannot be interrupted, and a fault of one (no memory, no stack) ends its process. So the ingress asks this
process; it loads the library once, and every check is a fork with limits of CPU time and memory. It ends with its
ingress: its input ends then. Frames: length (4 bytes, little-endian) and msgpack.
"""

import gc
import os
import resource
import select
import signal
import struct
import sys
from pathlib import Path
from typing import IO

import msgspec

from kvrelay.errors import InvalidRequest, ModelError
from kvrelay.grammar.compiler import GrammarCompiler
from kvrelay.plane.messages import GrammarSpec

CPU_S = {"structural_tag": 0.5}  # of one check; 128 tools in an XML form take 0.1 s
MOST_CPU_S = 0.25
WALL_S = 5.0  # of one check on a machine that has no time for it
MEMORY_BYTES = 512 << 20  # of one check, besides what the library has


class GrammarVerdict(msgspec.Struct):
    """What became of a check. refusal: for the client; fault: of this installation."""

    refusal: str | None = None
    fault: str | None = None


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame of a buffered stream; None when the other end has closed."""
    header = stream.read(4)
    return stream.read(struct.unpack("<I", header)[0]) if len(header) == 4 else None


def write_frame(stream: IO[bytes], data: bytes) -> None:
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def is_readable(descriptor: int, timeout_s: float) -> bool:
    """Wait until there is something to read, or the other end has closed. Descriptors may be above 1,023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def check(compiler: GrammarCompiler, spec: GrammarSpec) -> GrammarVerdict:
    try:
        compiler.compile(spec)
    except InvalidRequest as error:
        return GrammarVerdict(refusal=str(error))
    except ModelError as error:
        return GrammarVerdict(fault=str(error))
    except (MemoryError, RecursionError):
        return GrammarVerdict(refusal="the grammar is too large")
    return GrammarVerdict()


def forked(compiler: GrammarCompiler, spec: GrammarSpec) -> GrammarVerdict:
    """The verdict of a fork; one that its limits or a crash end is a refusal."""
    source, target = os.pipe()
    cpu_s = CPU_S.get(spec.kind, MOST_CPU_S)
    child = os.fork()
    if child == 0:
        try:
            os.close(source)
            _limit(cpu_s)
            os.write(target, msgspec.msgpack.encode(check(compiler, spec)))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(target)
    try:
        ready = is_readable(source, WALL_S)
        data = os.read(source, 1 << 16) if ready else b""
    finally:
        os.close(source)
        if not ready:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if data:
        return msgspec.msgpack.decode(data, type=GrammarVerdict)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGKILL):
        return GrammarVerdict(refusal=f"compiling the grammar takes more than {cpu_s:g} s of CPU time")
    return GrammarVerdict(refusal="the grammar is too complex: compiling it runs out of memory or stack")


def _limit(cpu_s: float) -> None:
    """Limits of this process from now on. SIGPROF's default action ends it."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + MEMORY_BYTES,) * 2)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def main() -> None:
    folder, vocab_size, *eos_ids = sys.argv[1:]
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no frame
    compiler = GrammarCompiler(Path(folder), int(vocab_size), map(int, eos_ids), num_threads=1)
    while (data := read_frame(sys.stdin.buffer)) is not None:
        spec = msgspec.msgpack.decode(data, type=GrammarSpec)
        try:
            compiler.load()
            gc.freeze()  # a fork then copies fewer pages
            verdict = forked(compiler, spec)
        except Exception as error:
            verdict = GrammarVerdict(fault=f"{type(error).__name__}: {error}")
        write_frame(target, msgspec.msgpack.encode(verdict))


if __name__ == "__main__":
    main()
