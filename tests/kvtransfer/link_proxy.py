"""A TCP proxy that misbehaves on command: for tests of links that drop, delay, duplicate or crawl."""

import asyncio
import contextlib


class LinkProxy:
    """Forwards to host:port. `mode`: "pass", "drop" (black hole), "delay", "duplicate", "slow", "flip"; `cut()` ends
    all.

    `after` lets that many bytes pass unharmed in each direction of each connection before the mode applies.
    """

    def __init__(self, port, host="127.0.0.1", *, mode="pass", after=0):
        self._target, self.mode, self.after = (host, port), mode, after
        self.num_connections, self.num_bytes = 0, 0
        self._writers, self._tasks = set(), set()
        self.port = 0

    async def start(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def aclose(self):
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self):
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader, writer):
        self.num_connections += 1
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, up_writer}
        for pair in ((reader, up_writer), (up_reader, writer)):
            task = asyncio.create_task(self._pump(*pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader, writer):
        passed = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(64 << 10):
                mode = self.mode if passed + len(data) > self.after else "pass"
                passed += len(data)
                self.num_bytes += len(data)
                if mode == "drop":
                    continue
                if mode == "delay":
                    await asyncio.sleep(0.02)
                elif mode == "slow":
                    await asyncio.sleep(len(data) / 4e6)
                elif mode == "flip":
                    data = bytearray(data)
                    data[len(data) // 2] ^= 0x40
                writer.write(data)
                if mode == "duplicate":
                    writer.write(data)
                await writer.drain()
        writer.transport.abort()
        self._writers.discard(writer)
