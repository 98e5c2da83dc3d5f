"""How long an ingress's loop is held while a worker's snapshot goes into its index: python -m bench.router.snapshots
[--blocks N].

The snapshot comes over a socket in parts, as a worker sends it, beside --others blocks of other workers. Then it comes
again with 1,000 blocks changed, then the worker leaves. For each: how long it took, and the longest that nothing else
ran on the loop, of the thread's own time, so that other programs on the machine do not count.
"""

import argparse
import asyncio
import gc
import random
import time
from collections.abc import Callable

from kvrelay.kvcache.tiers.events import parts_of
from kvrelay.plane.framing import FrameReader
from kvrelay.plane.messages import KvSnapshot, decode_from_worker, encode
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.types import IndexState
from kvrelay.serve.workers.queries import SnapshotSlices

NUM_CHANGED = 1000
AT_ONCE = 100_000  # blocks of each of the other workers


def names(rng: random.Random, count: int) -> list[bytes]:
    packed = rng.randbytes(16 * count)
    return [packed[16 * place : 16 * place + 16] for place in range(count)]


def framed(snapshot: KvSnapshot) -> list[bytes]:
    frames = map(encode, parts_of(snapshot))
    return [len(frame).to_bytes(4, "little") + frame for frame in frames]


def filled(rng: random.Random, num_blocks: int) -> PrefixIndex:
    index = PrefixIndex()
    for number in range(num_blocks // AT_ONCE):
        index.add_worker(f"other-{number}", max_blocks=AT_ONCE)
        index.apply_snapshot(f"other-{number}", 0, names(rng, AT_ONCE))
    return index


class Sender:
    """Sends what it is given to each client that connects, as fast as it reads."""

    def __init__(self) -> None:
        self._frames: asyncio.Queue[list[bytes]] = asyncio.Queue()

    async def start(self) -> asyncio.Server:
        return await asyncio.start_server(self._connected, "127.0.0.1", 0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while frames := await self._frames.get():
            for frame in frames:
                writer.write(frame)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    def send(self, frames: list[bytes]) -> None:
        """None: close the connection."""
        self._frames.put_nowait(frames)


async def held(label: str, begin: Callable[[], object], is_done: Callable[[], bool]) -> None:
    """One line: from `begin` until it is done."""
    gaps, began_s, cpu_s = [], time.perf_counter(), time.thread_time()
    last_s = cpu_s
    asyncio.get_running_loop().call_soon(begin)
    while not gaps or not is_done():
        await asyncio.sleep(0)
        now_s = time.thread_time()
        gaps.append(now_s - last_s)
        last_s = now_s
    cpu_ms, wall_ms = 1e3 * (time.thread_time() - cpu_s), 1e3 * (time.perf_counter() - began_s)
    print(f"{label:>20} {wall_ms:>9.1f} {cpu_ms:>9.1f} {1e3 * max(gaps):>13.2f}", flush=True)


async def measure(num_blocks: int, num_others: int) -> None:
    rng, loop, sender = random.Random(1), asyncio.get_running_loop(), Sender()
    index, mine = filled(rng, num_others), names(rng, num_blocks)
    first = framed(KvSnapshot(seq=0, hashes=mine))
    again = framed(KvSnapshot(seq=1, hashes=[*mine[NUM_CHANGED:], *names(rng, NUM_CHANGED)]))
    SnapshotSlices(index)

    def take(frame: bytes) -> None:
        message = decode_from_worker(frame)
        assert isinstance(message, KvSnapshot)
        index.apply_snapshot(
            "w", message.seq, message.hashes, message.lowered, part=message.part, is_last=message.is_last
        )

    server, reader = await sender.start(), FrameReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await loop.create_connection(lambda: protocol, *server.sockets[0].getsockname())
    reading = asyncio.create_task(reader.read_all(take, max_bytes=1 << 20))
    await asyncio.sleep(0.1)
    index.add_worker("w", max_blocks=2 * num_blocks)
    total = len(index)
    gc.collect()
    gc.freeze()
    print(f"{num_blocks} blocks beside {total}\n{'':>20} {'took, ms':>9} {'CPU, ms':>9} {'loop held, ms':>13}")
    await held("first snapshot", lambda: sender.send(first), lambda: index.state("w") is IndexState.EXACT)
    index.mark_stale("w")
    await held("1,000 changed", lambda: sender.send(again), lambda: index.state("w") is IndexState.EXACT)
    await held("it leaves", lambda: index.remove_worker("w"), lambda: len(index) == total)
    sender.send([])
    await reading
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=200_000)
    parser.add_argument("--others", type=int, default=2_000_000)
    options = parser.parse_args()
    asyncio.run(measure(options.blocks, options.others))


if __name__ == "__main__":
    main()
