"""NIXL by itself, doing what kvrelay never does: the negative controls of test_nixl_traps.py.

`raw_nixl.py <scenario>` prints one JSON object. It imports nothing of ours. The owner of the memory
is a child; over UCX_TLS=tcp a frozen owner keeps a READ in flight for as long as a scenario wants.
"""

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time

os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

import numpy as np

try:
    import nixl._api as nixl
except ImportError:
    try:
        import nixl_cu13._api as nixl
    except ImportError:
        import nixl_cu12._api as nixl

NUM_BLOCKS, SIZE = 64, 32768
LINGER_S = 3.0


def pool():
    mapping = mmap.mmap(-1, NUM_BLOCKS * SIZE)
    array = np.frombuffer(mapping, dtype=np.uint8)
    array[:] = 1
    return mapping, array


def agent_of(name, array):
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(array.ctypes.data, len(array), 0, "")], "DRAM", backends=["UCX"])
    return agent


def rows(address):
    table = np.zeros((NUM_BLOCKS, 3), dtype=np.uint64)
    table[:, 0] = address + np.arange(NUM_BLOCKS, dtype=np.uint64) * SIZE
    table[:, 1] = SIZE
    return table


def progress(agent, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        agent.get_new_notifs()
        time.sleep(0.0005)


def own():
    """The child: serves until its stdin ends; a line on stdin frees the memory."""
    mapping, array = pool()
    agent = agent_of("owner", array)
    print(json.dumps({"metadata": agent.get_agent_metadata().hex(), "address": array.ctypes.data}), flush=True)
    orders = []

    def listen():
        for line in sys.stdin:
            orders.append(line)
        time.sleep(LINGER_S)  # a reader that died has left reads behind: what do they do to the owner?
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        progress(agent, 0.01)
        if orders and array is not None:
            array = None
            mapping.close()
            print("{}", flush=True)


class Reader:
    """A raw reader and the child that owns what it reads."""

    def __init__(self):
        self.owner = subprocess.Popen(
            [sys.executable, __file__, "own"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        told = json.loads(self.owner.stdout.readline())
        self.mapping, self.array = pool()
        self.agent = agent_of("reader", self.array)
        self.agent.add_remote_agent(bytes.fromhex(told["metadata"]))
        self.theirs = self.agent.prep_xfer_dlist("owner", rows(told["address"]), "DRAM")
        self.mine = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows(self.array.ctypes.data), "DRAM")
        handle, state = self.begin()
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        handle.release()

    def begin(self):
        every = np.arange(NUM_BLOCKS, dtype=np.int32)
        handle = self.agent.make_prepped_xfer("READ", self.mine, every, self.theirs, every)
        return handle, self.agent.transfer(handle)

    def begin_from_frozen(self):
        """(handle, state) of a READ whose owner is stopped; it has been sent."""
        self.owner.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.owner.pid, os.WSTOPPED)  # it may run on for a moment, long enough to answer
        handle, _ = self.begin()
        progress(self.agent, 0.2)
        return handle, self.agent.check_xfer_state(handle)

    def wake(self):
        """The blocks are re-used, then the owner runs again. How many of them are overwritten?"""
        self.array[:] = 2
        self.owner.send_signal(signal.SIGCONT)
        progress(self.agent, 2.0)
        return int((self.array.reshape(NUM_BLOCKS, SIZE) != 2).any(axis=1).sum())


def released_while_in_flight():
    reader = Reader()
    handle, state = reader.begin_from_frozen()
    handle.release()
    return {"state": state, "overwritten": reader.wake()}


def forgotten_while_in_flight():
    reader = Reader()
    handle, state = reader.begin_from_frozen()
    reader.agent.remove_remote_agent("owner")
    try:
        said = reader.agent.check_xfer_state(handle)
    except Exception as error:
        said = type(error).__name__
    return {"state": state, "said": said, "overwritten": reader.wake()}


def torn_down_while_in_flight():
    """The reader's process ends; the owner, woken, answers into a closed connection."""
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r}); import raw_nixl, os\n"
        "reader = raw_nixl.Reader(); print(reader.owner.pid, reader.begin_from_frozen()[1], flush=True); os._exit(0)"
    )
    libc_subreaper()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        pid, state = process.stdout.readline().split()
    os.kill(int(pid), signal.SIGCONT)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(int(pid), os.WNOHANG)
        if done:
            return {"state": state, "owner": os.waitstatus_to_exitcode(status)}
        time.sleep(0.05)
    os.kill(int(pid), signal.SIGKILL)
    return {"state": state, "owner": None}


def libc_subreaper():
    """Orphans become children of this process, so that their exit status can be read."""
    import ctypes

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def freed_by_its_owner():
    reader = Reader()
    reader.owner.stdin.write("free\n")
    reader.owner.stdin.flush()
    reader.owner.stdout.readline()
    try:
        handle, state = reader.begin()
        while state == "PROC":
            state = reader.agent.check_xfer_state(handle)
    except Exception as error:
        state = type(error).__name__
    return {"state": state}


def wanted_s():
    """Seconds in which each thread of this process ran or waited for a core, however busy the machine is."""
    threads = {}
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/schedstat") as file:
            threads[task] = sum(map(int, file.read().split()[:2])) / 1e9
    return threads


def idle_stock_agent():
    agent = nixl.nixl_agent("stock", nixl.nixl_agent_config(backends=["UCX"]))
    before, began = wanted_s(), time.monotonic()
    time.sleep(1.0)
    took_s = time.monotonic() - began
    return {
        "cores": max(used - before.get(task, 0.0) for task, used in wanted_s().items()) / took_s,
        "name": agent.name,
    }


def made():
    """Whether an agent can be made at all under these variables."""
    try:
        agent_of("made", pool()[1])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


if __name__ == "__main__":
    if sys.argv[1] == "own":
        own()
    print(json.dumps(globals()[sys.argv[1]]()), flush=True)
    os._exit(0)
