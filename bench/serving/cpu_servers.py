"""One server at a time: how each peer is started, when it is ready, and that nothing of it is left.

A server runs in a session of its own with its output in a file, and whatever it starts inherits a mark in its
environment: by session and mark all of it is found at the end (processes that rename themselves lose the mark, daemons
leave the session). No measuring.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvrelay.cluster.chaos import processes
from kvrelay.cluster.launch.ray_session import free_port

MARK = "KVRELAY_BENCH_MARK"
REPO = Path(__file__).resolve().parent.parent.parent


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


KVRELAY = (
    sys.executable,
    *_words("-m kvrelay.cluster.commands.cli serve --model {checkpoint} --port {port} --prefill 0 --decode 1"),
    *_words("--dtype bfloat16 --max-model-len 8192 --served-name model"),
)
NO_DRAFTS = ("--set", "engine.speculation='off'")
VLLM = _words(
    "{vllm} serve {checkpoint} --host 127.0.0.1 --port {port} --dtype {dtype} --max-model-len 8192 --max-num-seqs 64"
    " --served-model-name model"
)
LLAMA = _words(
    "{llama} -m {gguf} --host 127.0.0.1 --port {port} -a model -t {threads} -tb {threads} -np {slots} -c {context}"
    " --no-kv-unified -cb -fa {flash} -fit off --cache-ram 0 --no-webui --no-slots"
)


@dataclass(frozen=True, slots=True)
class Peer:
    """One server under test. `weights` says which servers it is compared with: "16 bits", "int8", "int4"."""

    name: str
    weights: str
    bits_per_weight: float
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # placeholders whose files must exist
    own_start_per_shape: bool = False  # its slots and context are fixed when it starts
    drafts: bool = False
    is_default: bool = True


def _kvrelay(name: str, weights: str, bits: float, *more: str, drafts: bool = False) -> Peer:
    flags = list(more) if drafts else [*more, *NO_DRAFTS]
    return Peer(name, weights, bits, (*KVRELAY, *flags), needs=("checkpoint",), drafts=drafts)


def _vllm(name: str, dtype: str, bits: float, *, is_default: bool) -> Peer:
    command = tuple(part.replace("{dtype}", dtype) for part in VLLM)
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "{cores}", "VLLM_NO_USAGE_STATS": "1"}
    return Peer(name, "16 bits", bits, command, env, needs=("checkpoint", "vllm"), is_default=is_default)


def _llama(kind: str, weights: str, bits: float, *, is_default: bool = True) -> Peer:
    command = tuple(part.replace("{gguf}", f"{{{kind}}}") for part in LLAMA)
    needs = (kind, "llama")
    return Peer(f"llama.cpp {kind}", weights, bits, command, {}, needs, own_start_per_shape=True, is_default=is_default)


PEERS = (
    _kvrelay("kvrelay", "16 bits", 16.0),
    _vllm("vllm", "bfloat16", 16.0, is_default=True),
    _vllm("vllm float32", "float32", 32.0, is_default=False),
    _llama("f16", "16 bits", 16.0),
    _llama("bf16", "16 bits", 16.0),
    _kvrelay("kvrelay int8", "int8", 8.5, "--quantization", "int8"),
    _llama("q8_0", "int8", 8.5),
    _kvrelay("kvrelay int4", "int4", 5.0, "--quantization", "int4"),
    _llama("q4_1", "int4", 5.0),
    _llama("q4_0", "int4", 4.5, is_default=False),
    _kvrelay("kvrelay drafting", "16 bits", 16.0, drafts=True),
)


def files_of(folder: Path, vllm: str | None, llama: str | None) -> dict[str, str]:
    """What placeholders stand for, as far as it exists here. `vllm`, `llama`: programs, looked up on PATH when None."""
    found = {"vllm": vllm or shutil.which("vllm"), "llama": llama or shutil.which("llama-server")}
    found |= {"checkpoint": str(folder / "checkpoint")}
    found |= {file.stem: str(file) for file in folder.glob("*.gguf")}
    return {name: path for name, path in found.items() if path and Path(path).exists()}


def missing(peer: Peer, files: Mapping[str, str]) -> str:
    """Why a peer cannot run here; empty when it can."""
    absent = [name for name in peer.needs if name not in files]
    return f"{', '.join(absent)} not found" if absent else ""


def last_words(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


class ServerFailed(Exception):
    """A server ended or was not ready in time; the message has its last words."""


class Server:
    """A started server. Use `running`, which also stops it."""

    def __init__(self, peer: Peer, values: Mapping[str, str], log: Path) -> None:
        self.peer, self.log, self._mark = peer, log, uuid.uuid4().hex
        self.url = f"http://127.0.0.1:{values['port']}"
        env = {name: value.format_map(values) for name, value in peer.env.items()}
        command = [part.format_map(values) for part in peer.command]
        with log.open("ab") as output:
            output.write(f"\n$ {shlex.join(command)}\n".encode())
            output.flush()
            self._process = subprocess.Popen(
                command,
                cwd=REPO,
                env={**os.environ, **env, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, limit_s: float) -> None:
        """Return once it answers a completion. Raises ServerFailed."""
        deadline_s = time.monotonic() + limit_s
        while not _answers(self.url):
            if self._process.poll() is not None:
                raise ServerFailed(f"{self.peer.name} ended with {self._process.returncode}:\n{last_words(self.log)}")
            if time.monotonic() > deadline_s:
                raise ServerFailed(f"{self.peer.name} not ready after {limit_s:.0f} s:\n{last_words(self.log)}")
            time.sleep(0.2)

    def members(self) -> set[int]:
        """Every process of it that is alive."""
        same = {pid for pid in processes.pids() if processes.session(pid) == self._process.pid}
        return {pid for pid in same | processes.carrying(MARK, self._mark) if processes.is_alive(pid)}

    def niceness(self) -> dict[int, int]:
        """Its processes by their niceness."""
        counts = Counter[int]()
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                counts[os.getpriority(os.PRIO_PROCESS, pid)] += 1
        return dict(counts)

    def stop(self, patience_s: float = 20.0) -> None:
        """Ctrl-C, SIGTERM after `patience_s` (a shell's background jobs ignore Ctrl-C), then SIGKILL to all that is
        left.

        Idempotent.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            if self._process.poll() is None:
                self._process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience_s)
        while left := self.members():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self._process.poll() is None:
                self._process.wait()
            time.sleep(0.02)


def _answers(url: str) -> bool:
    body = {"model": "model", "prompt": [2000, 2001, 2002, 2003], "max_tokens": 2, "temperature": 0.0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def running(peer: Peer, values: Mapping[str, str], log: Path, *, limit_s: float) -> Iterator[Server]:
    """A ready server, gone at the end whatever happened: no process of it is left. Raises ServerFailed."""
    server = Server(peer, {**values, "port": str(free_port("127.0.0.1"))}, log)
    try:
        server.wait_ready(limit_s)
        yield server
    finally:
        server.stop()
