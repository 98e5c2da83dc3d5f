"""NIXL used by itself, as well as it can be, and our path over it, in turns on the same machine.

    python bench/nixl_raw.py [--blocks 2048] [--rounds 20] [--turns 5] [--tls tcp] [--json out.json]

Raw: two processes, descriptor lists of every block prepared once, one make_prepped_xfer and one
transfer() per round, the state asked for without a pause until it is DONE; no checksums, no
tickets, nothing else. Ours: KvSource and KvTarget, checks off; "reading" is the time in which a
read was under way in the target, "whole" is from open() to committed in the source. The two take
turns, so that a ratio compares what the machine was at the same time. `measure_raw` is
for other benches to import.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout works uninstalled

from pools import FINGERPRINT, SECRET, allocate, layout_for, scattered

from kvrelay.config import TransferSettings
from kvrelay.decode.target import KvTarget
from kvrelay.kvtransfer.paths.selection import TRANSPORTS
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.kvtransfer.transports.nixl.agent import import_nixl
from kvrelay.kvtransfer.transports.nixl.reader import NixlReader
from kvrelay.prefill.source import KvSource

HERE = Path(__file__).resolve()
OWNER_POLL_S = 500e-6


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds. `many`: best time of one round of all blocks; `one`: median time of one block's."""

    many_s: float
    one_s: float
    owner_cpu_s: float = 0.0  # of the process that was read from, per round of many
    whole_s: float = 0.0  # ours: many blocks, from open() to committed
    one_whole_s: float = 0.0


def best(figures: list[Figures]) -> Figures:
    """The best of several turns, figure by figure."""
    names = Figures.__dataclass_fields__
    return Figures(**{name: min(getattr(each, name) for each in figures) for name in names})


# ---- raw


def _agent(name, memory):
    nixl = import_nixl()
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(memory.address, memory.layout.num_bytes, 0, "")], "DRAM", backends=["UCX"])
    return agent


def _rows(address, layout):
    rows = np.zeros((layout.num_blocks, 3), dtype=np.uint64)
    rows[:, 0] = address + np.arange(layout.num_blocks, dtype=np.uint64) * layout.region_bytes
    rows[:, 1] = layout.region_bytes
    return rows


def run_owner(config):
    """The child: owns the pool that is read and makes progress for its reader; ends with its stdin."""
    memory = allocate(layout_for(config["blocks"]))
    agent = _agent("owner", memory)
    print(json.dumps({"metadata": agent.get_agent_metadata().hex(), "address": memory.address}), flush=True)
    is_over = threading.Event()

    def answer():
        for _ in sys.stdin:
            print(json.dumps(time.process_time()), flush=True)
        is_over.set()

    threading.Thread(target=answer, daemon=True).start()
    while not is_over.wait(OWNER_POLL_S):
        agent.get_new_notifs()
    os._exit(0)  # tearing an agent down is never worth it


class RawPair:
    """A reader in this process and an owner in another; `measure` as often as wanted."""

    def __init__(self, num_blocks, tls=None):
        self.layout, self.num_blocks = layout_for(num_blocks), num_blocks
        environment = {**os.environ, **({"UCX_TLS": tls} if tls else {})}
        self._owner = subprocess.Popen(
            [sys.executable, str(HERE), "--owner", json.dumps({"blocks": num_blocks})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        owner = json.loads(self._owner.stdout.readline())
        self.memory = allocate(self.layout)
        self._agent = _agent("reader", self.memory)
        self._agent.add_remote_agent(bytes.fromhex(owner["metadata"]))
        self._theirs = self._agent.prep_xfer_dlist("owner", _rows(owner["address"], self.layout), "DRAM")
        mine = _rows(self.memory.address, self.layout)
        self._mine = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", mine, "DRAM")
        self._many = [np.array(scattered(self.layout, num_blocks, seed), dtype=np.int32) for seed in (1, 2)]

    def read(self, count):
        """Seconds of one transfer of the first `count` blocks."""
        agent, (sources, targets) = self._agent, self._many
        began = time.perf_counter()
        handle = agent.make_prepped_xfer("READ", self._mine, targets[:count], self._theirs, sources[:count])
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        took = time.perf_counter() - began
        assert state == "DONE", state
        handle.release()
        return took

    def _owner_cpu_s(self):
        self._owner.stdin.write("cpu\n")
        self._owner.stdin.flush()
        return json.loads(self._owner.stdout.readline())

    def measure(self, rounds):
        for count in (1, self.num_blocks):
            self.read(count)  # the first one connects
        cpu_s = self._owner_cpu_s()
        many = [self.read(self.num_blocks) for _ in range(rounds)]
        cpu_s = self._owner_cpu_s() - cpu_s
        one = [self.read(1) for _ in range(20 * rounds)]
        return Figures(min(many), statistics.median(one), cpu_s / rounds)

    def close(self):
        self._owner.stdin.close()
        self._owner.wait()


def measure_raw(num_blocks=2048, rounds=20, tls=None):
    """`Figures` of NIXL by itself between this process and a child. `tls`: the child's UCX_TLS, as this process's."""
    pair = RawPair(num_blocks, tls)
    try:
        return pair.measure(rounds)
    finally:
        pair.close()


# ---- ours


class TimedReader(NixlReader):
    """Adds up the time in which a read is under way."""

    busy_s = began = 0.0
    num_reads = 0

    def read(self, copies, landed=None):
        if not TimedReader.num_reads:
            TimedReader.began = time.perf_counter()
        TimedReader.num_reads += 1
        read = super().read(copies, landed)
        if read.done():
            self._note(read)
        else:
            read.add_done_callback(self._note)
        return read

    @staticmethod
    def _note(_):
        TimedReader.num_reads -= 1
        if not TimedReader.num_reads:
            TimedReader.busy_s += time.perf_counter() - TimedReader.began


async def run_source(config):
    """The child: opens, announces and commits what it is told to."""
    layout = layout_for(config["blocks"])
    source = KvSource(
        allocate(layout), "source", "1", FINGERPRINT, SECRET, TransferSettings(transport="nixl", checks="off"),
        host="127.0.0.1", generation_of=lambda block: 0,
    )  # fmt: skip
    await source.start()
    print("ready", flush=True)
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    many = scattered(layout, config["blocks"], 1)
    while line := await reader.readline():
        request = json.loads(line)
        cpu_s, began = time.process_time(), time.perf_counter()
        transfer = source.open(request["id"], bytes.fromhex(request["ticket"]))
        transfer.announce(0, many[: request["count"]], range(1))
        await transfer.commit(b"")
        took = time.perf_counter() - began
        print(json.dumps({"whole_s": took, "cpu_s": time.process_time() - cpu_s}), flush=True)
    await source.aclose()


class OurPair:
    """A KvTarget in this process, a KvSource in another."""

    async def start(self, num_blocks, tls=None):
        self.layout, self.num_blocks, self._num = layout_for(num_blocks), num_blocks, 0
        timed = Transport("nixl", TRANSPORTS["nixl"].make_exporter, TimedReader, TRANSPORTS["nixl"].why_not)
        self._target = KvTarget(
            allocate(self.layout), "target", "1", FINGERPRINT, SECRET, TransferSettings(transport="nixl", checks="off"),
            host="127.0.0.1", generation_of=lambda block: 0, on_commit=lambda *_: None,
            on_failed=lambda request_id, error: print(error, file=sys.stderr), on_released=lambda request_id: None,
            transports={"nixl": timed},
        )  # fmt: skip
        await self._target.start()
        self._source = await asyncio.create_subprocess_exec(
            sys.executable, str(HERE), "--source", json.dumps({"blocks": num_blocks}),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **({"UCX_TLS": tls} if tls else {})},
        )  # fmt: skip
        await self._source.stdout.readline()
        self._targets = scattered(self.layout, num_blocks, 2)

    async def _once(self, count):
        self._num += 1
        name = f"r{self._num}"
        ticket = self._target.grant(name, 0, self._targets[:count], count)
        TimedReader.busy_s = 0.0
        self._source.stdin.write(json.dumps({"id": name, "ticket": ticket.hex(), "count": count}).encode() + b"\n")
        answer = json.loads(await self._source.stdout.readline())
        return Figures(TimedReader.busy_s, 0.0, answer["cpu_s"], answer["whole_s"])

    async def measure(self, rounds):
        for count in (1, self.num_blocks):
            await self._once(count)
        many = [await self._once(self.num_blocks) for _ in range(rounds)]
        one = [await self._once(1) for _ in range(20 * rounds)]
        return Figures(
            many_s=min(each.many_s for each in many),
            one_s=statistics.median(each.many_s for each in one),
            owner_cpu_s=statistics.mean(each.owner_cpu_s for each in many),
            whole_s=min(each.whole_s for each in many),
            one_whole_s=statistics.median(each.whole_s for each in one),
        )

    async def close(self):
        self._source.stdin.close()
        await self._source.wait()
        await self._target.aclose()


# ---- side by side


async def compare(args):
    if args.tls:
        os.environ["UCX_TLS"] = args.tls
    raw, ours = RawPair(args.blocks, args.tls), OurPair()
    await ours.start(args.blocks, args.tls)
    turns = []
    for _ in range(args.turns):
        turns.append((raw.measure(args.rounds), await ours.measure(args.rounds)))
    raw.close()
    await ours.close()
    theirs, mine = best([each for each, _ in turns]), best([each for _, each in turns])
    size = args.blocks * raw.layout.region_bytes
    show(args, size, theirs, mine)
    print(f"ratios of bandwidth, turn by turn: {' '.join(f'{r.many_s / o.many_s:.2f}' for r, o in turns)}")
    return {
        "bytes": size,
        "raw": {"read_s": theirs.many_s, "one_s": theirs.one_s},
        "ours": {"read_s": mine.many_s, "one_s": mine.one_s, "whole_s": mine.whole_s, "one_whole_s": mine.one_whole_s},
        "ratio": theirs.many_s / mine.many_s,
    }


def show(args, size, theirs, mine):
    kib = size // args.blocks >> 10
    table = Table(title=f"{args.blocks} scattered blocks of {kib} KiB over NIXL, best of {args.turns} x {args.rounds}")
    for column in ("", "GB/s", "1 block us", "owner's CPU s/GB"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("raw NIXL", *cells(size, theirs.many_s, theirs.one_s, theirs.owner_cpu_s))
    table.add_row("ours, reading", *cells(size, mine.many_s, mine.one_s, mine.owner_cpu_s))
    table.add_row("ours, open to committed", *cells(size, mine.whole_s, mine.one_whole_s, mine.owner_cpu_s))
    ratio = theirs.many_s / mine.many_s
    table.add_row("ours, reading, x raw", f"{ratio:.2f}", f"{mine.one_s / theirs.one_s:.1f}", "")
    Console(width=100).print(table)


def cells(size, many_s, one_s, cpu_s):
    return f"{size / many_s / 1e9:.2f}", f"{one_s * 1e6:.0f}", f"{cpu_s / size * 1e9:.3f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tls", help="UCX_TLS for all, such as tcp; UCX's own choice if left out")
    parser.add_argument("--json")
    parser.add_argument("--owner", help=argparse.SUPPRESS)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.owner:
        run_owner(json.loads(args.owner))
    elif args.source:
        asyncio.run(run_source(json.loads(args.source)))
    else:
        figures = asyncio.run(compare(args))
        if args.json:
            Path(args.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
