"""A NIXL read over a link that is cut. Runs as root of namespaces of its own: `unshare -rnm python cut_link.py <when>`.

The owner of the memory is in a second network namespace, behind a veth pair. `when`: "asked" has the
owner stopped, so that the request is there and no answer comes; "asking" cuts first and asks then.
Prints one JSON object.
"""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_spec = importlib.util.spec_from_file_location("kvrelay_cut_peer", Path(__file__).with_name("nixl_peer.py"))
sys.path.insert(0, str(Path(__file__).resolve().parents[4]))
peer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(peer)
sides = peer.sides

HERE, THERE = "10.77.0.1", "10.77.0.2"
IN_ITS_OWN = ("unshare", "-nm", "sh", "-c", 'mount -t sysfs none /sys && read go && exec "$@"', "sh")


def run(*command):
    subprocess.run(command, check=True)


def connect_namespaces(pid):
    """A link from here to the process's namespace. UCX finds devices in sysfs."""
    run("mount", "-t", "sysfs", "none", "/sys")
    run("ip", "link", "add", "va", "type", "veth", "peer", "name", "vb", "netns", str(pid))
    for inside, device, address in (((), "va", HERE), (("nsenter", "-t", str(pid), "-n"), "vb", THERE)):
        run(*inside, "ip", "addr", "add", f"{address}/24", "dev", device)
        run(*inside, "ip", "link", "set", device, "up")
        run(*inside, "ip", "link", "set", "lo", "up")


async def is_in_its_own(pid):
    """The child has left our network namespace."""
    ours = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{pid}/ns/net") == ours:
        await asyncio.sleep(0.01)


def operstate(device):
    return Path(f"/sys/class/net/{device}/operstate").read_text().strip()


async def is_up(device):
    while operstate(device) != "up":
        await asyncio.sleep(0.01)


def link_there(pid):
    look = ("nsenter", "-t", str(pid), "-n", "ip", "-o", "link", "show", "vb")
    return subprocess.run(look, check=True, capture_output=True, text=True).stdout


async def is_up_there(pid):
    """The other end, too: else the owner finds no device but its loopback, and nobody reaches it."""
    while "state UP" not in link_there(pid):
        await asyncio.sleep(0.01)


async def main(when):
    async with peer.started("own", prefix=IN_ITS_OWN, host=THERE) as owner:
        await is_in_its_own(owner.pid)
        connect_namespaces(owner.pid)
        await is_up("va")
        await is_up_there(owner.pid)
        owner.tell("go")
        told = await owner.hear()
        memory = sides.allocate()
        reader = peer.NIXL.make_reader(memory, sides.SECRET, HERE)
        await reader.connect(bytes.fromhex(told["descriptor"]))
        await reader.read(peer.copies_of([0]))

        if when == "asked":
            owner.signal(signal.SIGSTOP)
            reads = [reader.read(peer.copies_of(peer.ALL_BLOCKS)) for _ in range(2)]
            await asyncio.wait(reads, timeout=0.2)
            run("ip", "link", "set", "va", "down")
        else:
            run("ip", "link", "set", "va", "down")
            reads = [reader.read(peer.copies_of(peer.ALL_BLOCKS)) for _ in range(2)]
        began = time.monotonic()
        await asyncio.wait(reads)
        took_s = time.monotonic() - began

        memory.owner[:] = 7  # the blocks are re-used, and the link is mended
        run("ip", "link", "set", "va", "up")
        owner.signal(signal.SIGCONT)
        again = ""
        if when == "asking":
            await reader.read(peer.copies_of([3]))  # connects anew
            again = sides.digest(memory, [3])
            memory.owner[:] = 7
        await asyncio.sleep(1)  # for what must not come
        late = bool((memory.owner != 7).any())
        print(
            json.dumps(
                {
                    "errors": [type(read.exception()).__name__ for read in reads],
                    "took_s": took_s,
                    "late": late,
                    "again": again == sides.digest(sides.allocate(fill=1), [3]),
                }
            ),
            flush=True,
        )


asyncio.run(main(sys.argv[1]))
