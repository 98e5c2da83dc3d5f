"""Our NIXL transport in other processes: an owner that exports a pool, and targets that end in odd ways.

As a script: `nixl_peer.py <role> <json config>`; it answers in JSON lines on stdout. As a module it
starts such processes. It goes below KvSource and KvTarget: a reader, an exporter, nothing else.
"""

import asyncio
import gc
import importlib.util
import json
import os
import resource
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from kvrelay.errors import BackendUnavailable
from kvrelay.kvtransfer.transports.nixl.agent import agent_for
from kvrelay.kvtransfer.transports.nixl.reader import NIXL
from tests.kvtransfer.copies import plan_copies
from tests.stopping import stop

HERE = Path(__file__)
_spec = importlib.util.spec_from_file_location("kvrelay_nixl_sides", HERE.parents[2] / "peer_process.py")
sides = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sides)

HOST = "127.0.0.1"
ALL_BLOCKS = list(range(sides.LAYOUT.num_blocks))


def copies_of(blocks, layers=sides.ALL_LAYERS):
    """Of these blocks, to the same ones."""
    return plan_copies(sides.LAYOUT, sides.LAYOUT, blocks, blocks, layers)


def make_reader(memory):
    return NIXL.make_reader(memory, sides.SECRET, HOST)


# ---- starting processes


class Process:
    """One of the roles below."""

    def __init__(self, process):
        self._process = process
        self.pid = process.pid

    def tell(self, word):
        self._process.stdin.write(word.encode() + b"\n")

    async def hear(self):
        async with asyncio.timeout(60):
            while line := await self._process.stdout.readline():
                if line.startswith(b"{"):
                    return json.loads(line)
        raise AssertionError(f"the process ended instead of answering: {await self._process.wait()}")

    async def ask(self, word):
        self.tell(word)
        return await self.hear()

    def signal(self, number):
        if number == signal.SIGSTOP:
            stop(self.pid)
        else:
            self._process.send_signal(number)

    async def ended(self):
        """(exit status, what was left on stdout, stderr)."""
        async with asyncio.timeout(60):
            out, errors = await self._process.communicate()
        return self._process.returncode, out.decode(), errors.decode()


@asynccontextmanager
async def started(role, env=None, prefix=(), **config):
    process = await asyncio.create_subprocess_exec(
        *prefix,
        sys.executable,
        str(HERE),
        role,
        json.dumps(config),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(env or {})},
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


# ---- the roles


async def words():
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().strip()


def say(**answer):
    print(json.dumps(answer), flush=True)


def cpu_s():
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])


async def own(config):
    """Exports a pool, for which it makes progress; does what it is told."""
    memory = sides.allocate(fill=config.get("fill", 1))
    exporter = NIXL.make_exporter(memory, sides.SECRET, config.get("host", HOST))
    await exporter.start()
    exporter.set_busy(1)
    say(descriptor=exporter.describe().hex(), digest=sides.digest(memory, ALL_BLOCKS))
    async for word in words():
        match word:
            case "ping":
                say(alive=True)
            case "idle":
                exporter.set_busy(0)
                say(idle=True)
            case "cpu":
                say(cpu_s=cpu_s())
            case "let go":
                await exporter.aclose()
                exporter = memory = None
                gc.collect()
                say(collected=True)


async def connected(config):
    memory = sides.allocate()
    reader = make_reader(memory)
    await reader.connect(bytes.fromhex(config["descriptor"]))
    return memory, reader


def thread_state(process, thread):
    return Path(f"/proc/{process}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]


async def leave_with_a_read_in_flight(config):
    """Begins a read of an owner that has been stopped, and leaves by the interpreter's ordinary end."""
    _memory, reader = await connected(config)
    os.kill(config["owner"], signal.SIGSTOP)
    while {thread_state(config["owner"], thread) for thread in os.listdir(f"/proc/{config['owner']}/task")} != {"T"}:
        await asyncio.sleep(0)  # it may run on for a moment, long enough to answer
    read = reader.read(copies_of(ALL_BLOCKS))
    done, _ = await asyncio.wait({read}, timeout=0.3)
    say(in_flight=not done)


async def read_and_close(config):
    """A whole read, and its end; says nothing."""
    memory, reader = await connected(config)
    await reader.read(copies_of(ALL_BLOCKS))
    assert sides.digest(memory, ALL_BLOCKS) == config["digest"]
    await reader.aclose()


async def fork_beside_an_agent(config):
    """A forked child must not use its parent's agent; the parent goes on."""
    memory, reader = await connected(config)
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            agent_for(sides.allocate()).send(None)  # refused before it waits for anything
        except BackendUnavailable as error:
            os.write(writable, error.why.encode())
        os._exit(0)
    os.close(writable)
    await asyncio.to_thread(os.waitpid, child, 0)
    await reader.read(copies_of(ALL_BLOCKS))
    say(child=os.read(readable, 1000).decode(), digest=sides.digest(memory, ALL_BLOCKS))


ROLES = {role.__name__: role for role in (own, leave_with_a_read_in_flight, read_and_close, fork_beside_an_agent)}

if __name__ == "__main__":
    asyncio.run(ROLES[sys.argv[1]](json.loads(sys.argv[2])))
