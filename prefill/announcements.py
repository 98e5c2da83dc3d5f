"""Forwards finished layers from the engine's thread to the transfers of their requests, on the loop."""

import asyncio
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from kvrelay.prefill.source import SourceTransfer
from kvrelay.types import BlockId


class Announcements:
    """Transfers are added and removed on the loop; the engine's thread calls `on_layers`."""

    def __init__(self) -> None:
        self._transfers: dict[str, SourceTransfer] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gate: DeviceGate | None = None  # once there was something to announce from a GPU

    def add(self, transfer: SourceTransfer) -> None:
        """Announce this request's layers from now on."""
        self._loop = asyncio.get_running_loop()
        self._transfers[transfer.request_id] = transfer

    def remove(self, request_id: str) -> None:
        self._transfers.pop(request_id, None)

    def on_layers(self, request_id: str, first_index: int, blocks: list[BlockId], layers: range) -> None:
        """A LayerHook: these blocks of the request are final in `layers`, or will be when the GPU has done its work."""
        transfer, loop = self._transfers.get(request_id), self._loop
        if transfer is None or loop is None:
            return
        announce = partial(loop.call_soon_threadsafe, transfer.announce, first_index, blocks, layers)
        if transfer.is_on_gpu:
            self._gate = self._gate or DeviceGate()
            self._gate.after_work_so_far(announce)
        else:
            announce()

    async def flushed(self) -> None:
        """Every announcement of the steps whose results are here has reached its transfer."""
        if self._gate is None:
            return  # the loop ran them before the step's result
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._gate.after_callbacks_so_far(partial(loop.call_soon_threadsafe, _set_done, done))
        await done

    def aclose(self) -> None:
        if self._gate is not None:
            self._gate.close()


def _set_done(done: "asyncio.Future[None]") -> None:
    if not done.done():
        done.set_result(None)


class DeviceGate:
    """Calls back, in order, when all work issued to the GPU before has been done. Unverified on a GPU."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Any, Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device-gate", daemon=True)
        self._thread.start()

    def after_work_so_far(self, callback: Callable[[], object]) -> None:
        """On the engine's thread: call back when the work that it has issued is done."""
        import torch

        event = torch.cuda.Event()
        event.record()
        self._queue.put((event, callback))

    def after_callbacks_so_far(self, callback: Callable[[], object]) -> None:
        """Call back when every callback requested before has been made. From any thread."""
        self._queue.put((None, callback))

    def close(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            event, callback = item
            if event is not None:
                event.synchronize()
            callback()
