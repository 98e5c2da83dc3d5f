"""Nodes of the cluster's store for tests: in this process, on a loop of their own, or as processes that can be
killed.
"""

import asyncio
import signal
import threading
import time

from kvrelay.cluster.launch.local import spawn
from kvrelay.cluster.registry.members import STORE_ROLE
from kvrelay.cluster.store.client import ClientOptions
from kvrelay.cluster.store.remote_store import RemoteStore
from kvrelay.cluster.store.service import StoreService
from kvrelay.config import settings_from
from kvrelay.kvtransfer.paths.selection import transports_for
from kvrelay.settings.cache import StoreSettings
from kvrelay.types import BlockMeta
from tests.stopping import stop

SECRET = b"a secret of the test cluster"
BLOCK = 64 << 10
META = BlockMeta(None, 16)
WAIT_S = 120.0  # for an event that a test is sure of


def block(digest, num_bytes=BLOCK):
    """What belongs to this hash; never the same for two."""
    return (digest * (num_bytes // len(digest) + 1))[:num_bytes]


def until(is_so, what, wait_s=WAIT_S):
    """Poll another thread or process."""
    end = time.monotonic() + wait_s
    while not is_so():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.01)


class Nodes:
    """All the nodes of one test, and its clients."""

    def __init__(self, num_replicas=2, **settings):
        self.num_replicas, self.settings = num_replicas, {"memory": "8MiB", "replicas": num_replicas, **settings}
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.services, self.processes, self.addresses, self._clients = {}, {}, {}, []

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def inside(self, name, *, tls=None, transport="auto", **options):
        async def start():
            service = StoreService(
                name,
                StoreSettings(**self.settings),
                SECRET,
                host="127.0.0.1",
                tls=tls,
                transport=transport,
                transports=transports_for(tls),
                **options,
            )
            return service, await service.start()

        self.services[name], self.addresses[name] = self.run(start())
        self.tell()
        return self.services[name]

    def process(self, *names):
        async def start():
            settings = settings_from({"store": self.settings, "cache": {"host_memory": "1MiB", "remote": "cluster"}})
            return await asyncio.gather(*(spawn(STORE_ROLE, settings, SECRET, name) for name in names))

        for name, store in zip(names, self.run(start()), strict=True):
            self.processes[name], self.addresses[name] = store, store.address
        self.tell()

    def tell(self, *gone):
        """The registry's part: everyone learns who lives."""
        for name in gone:
            del self.addresses[name]
        nodes = list(self.addresses.values())

        async def tell():
            for service in self.services.values():
                service.set_nodes(nodes)
            for store in self.processes.values():
                store.set_nodes(nodes)

        self.run(tell())
        for client in self._clients:
            client.set_nodes(nodes)

    def kill(self, name, number):
        process = self.processes[name].process
        if number == signal.SIGSTOP:
            stop(process.pid)
        else:
            process.send_signal(number)

    def client(self, block_bytes=BLOCK, namespace=b"n" * 16, **options):
        own = {name: options.pop(name) for name in ("codec", "memory") if name in options}
        options = {"secret": SECRET, "answer_s": 30.0, "stall_s": 30.0, "num_replicas": self.num_replicas} | options
        links = ClientOptions(worker_id="w", host="127.0.0.1", **options)
        store = RemoteStore(block_bytes, namespace, links, nodes=list(self.addresses.values()), **own)
        store.start()
        self._clients.append(store)
        return store

    def close(self):
        for client in self._clients:
            client.close()
        for name, service in self.services.items():
            self.run(service.aclose())
            if service.node._index is not None:
                service.node._index.check()
            counts = service.node.counts()
            assert counts is None or (counts.held, counts.reserved, counts.leaving) == (0, 0, 0), (
                f"{name} leaks: {counts}"
            )
        for store in self.processes.values():
            if store.process.returncode is None:
                store.process.send_signal(18)  # SIGCONT: one that was frozen
            self.run(store.aclose())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
