"""The prefill worker: computes prompts, samples the first token, sends the KV to the decode worker that the ticket
names.

The first token goes straight to the client. The blocks stay held until the decode worker has confirmed them, refused
them, or gone.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.ingresses import IngressLink, RequestTable
from kvrelay.engine.worker.role import WorkerParts
from kvrelay.engine.worker.thread import EngineProbeBuffers, EngineThread
from kvrelay.errors import BackendUnavailable, TransferError
from kvrelay.grammar.compiler import CompiledGrammar
from kvrelay.kvtransfer.paths.selection import transports_for
from kvrelay.kvtransfer.protocol.messages import reason_word, span_attributes
from kvrelay.plane.messages import Manifest, Pair, Prefill, SequenceRequest, TokenOutput, encode
from kvrelay.plane.reports import Paired
from kvrelay.prefill.source import KvSource, SourceTransfer
from kvrelay.prefill.source_link import TargetAddress
from kvrelay.types import BlockId, Role

logger = logging.getLogger(__name__)


class DeviceGate:
    """Calls back, in order, when all work issued to the GPU before has been done."""

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


class Announcements:
    """Forwards finished layers from the engine's thread to the transfers of their requests, on the loop.

    Transfers are added and removed on the loop; the engine's thread calls `on_layers`.
    """

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
        reached = asyncio.Event()
        self._gate.after_callbacks_so_far(partial(loop.call_soon_threadsafe, reached.set))
        await reached.wait()

    def aclose(self) -> None:
        if self._gate is not None:
            self._gate.close()


class _Prefilling:
    """A request whose KV is being sent, from its ticket until its blocks are free."""

    def __init__(self, request: SequenceRequest, transfer: SourceTransfer) -> None:
        self.request, self.transfer = request, transfer
        self.task: asyncio.Task[None] | None = None
        self.first_outputs: asyncio.Future[list[TokenOutput]] = asyncio.get_running_loop().create_future()
        """One, or one for each live choice of a group, or one with the candidates that a beam search begins with."""
        self._outputs: list[TokenOutput] = []

    def add(self, output: TokenOutput) -> None:
        self._outputs.append(output)
        group = self.request.group
        num_wanted = 1 if group is None or group.beams is not None else group.num_sequences
        if len(self._outputs) == num_wanted and not self.first_outputs.done():
            self.first_outputs.set_result(self._outputs)


def _manifest_of(request: SequenceRequest, outputs: list[TokenOutput]) -> Manifest:
    """What the decode worker goes on from, once it has the KV of all of the request's tokens."""
    return Manifest(
        request_id=request.request_id,
        num_tokens=len(request.token_ids),
        position=outputs[-1].position,
        token_ids=[token for output in outputs for token in output.token_ids],
        candidates=outputs[-1].candidates,
    )


def _adding(request: SequenceRequest, *, hold: bool) -> Callable[[Engine, CompiledGrammar | None], None]:
    """Has the engine compute the request's prompt and one token."""
    return lambda engine, grammar: engine.add(request, hold=hold, output_limit=1, grammar=grammar)


class PrefillRole:
    """Serves Prefill and Pair. Lives on the worker's loop."""

    def __init__(
        self,
        worker_id: str,
        source: KvSource,
        thread: EngineThread,
        requests: RequestTable,
        announcements: Announcements,
    ) -> None:
        self.plane = source
        self._worker_id, self._thread, self._requests, self._announcements = worker_id, thread, requests, announcements
        self._prefilling: dict[str, _Prefilling] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pairing = asyncio.Lock()

    # ---- one request

    def handle(self, link: IngressLink, message: Prefill | Pair) -> None:
        match message:
            case Prefill(request=request, ticket=None):
                take = _adding(request, hold=False)
                if self._requests.admit(link, request, take, self.drop, side=Role.PREFILL):
                    self._requests.begin_span(request.request_id, "prefill")
            case Prefill(request=request, ticket=bytes(ticket), moves=moves):
                self._begin(link, request, ticket, moves)
            case Pair():
                self._spawn(self._pair(link, message), f"pair with {message.worker_id}")

    def _begin(self, link: IngressLink, request: SequenceRequest, ticket: bytes, moves: str) -> None:
        """Open the transfer and have the engine compute the prompt. `moves`: see RequestTable.admit."""
        request_id = request.request_id
        if request_id in self._requests or request_id in self._prefilling:
            self._requests.refuse(link, request_id, "duplicate", f"{request_id} is already here")
            return
        try:
            transfer = self.plane.open(request_id, ticket)
        except (TransferError, BackendUnavailable) as error:
            self._requests.refuse(link, request_id, "invalid", str(error))
            return
        self._announcements.add(transfer)
        prefilling = self._prefilling[request_id] = _Prefilling(request, transfer)
        prefilling.task = self._spawn(self._send(prefilling), f"prefill {request_id}")
        take = _adding(request, hold=True)
        if self._requests.admit(link, request, take, self.drop, side=Role.PREFILL, moves=moves):
            self._requests.begin_span(request_id, "prefill", decode_worker=transfer.ticket.target_worker)
        else:
            self.drop(request_id, "refused")

    async def _send(self, prefilling: _Prefilling) -> None:
        """Send the KV of one prompt: layers are announced as they are computed, the commit follows the first token.

        The blocks are freed when the decode worker has them, or never will.
        """
        request, transfer = prefilling.request, prefilling.transfer
        request_id = request.request_id
        try:
            outputs = await prefilling.first_outputs  # the client has them already
            await self._announcements.flushed()  # nothing may be announced after the commit
            self._requests.begin_span(request_id, "kv send")
            result = await transfer.commit(encode(_manifest_of(request, outputs)))
            self._requests.end_span(request_id, "kv send", **span_attributes(result))
            self._requests.remove(request_id)
        except TransferError as error:
            logger.warning("request %s: %s", request_id, error)
            self._requests.end_span(request_id, "kv send", error=str(error), reason=reason_word(error))
            self._requests.fail(request_id, "transfer", str(error))
        finally:
            if self._prefilling.get(request_id) is prefilling:  # the engine may re-use the blocks
                self.release(request_id, "done")

    def holds(self, request_id: str) -> bool:
        return request_id in self._prefilling

    def drop(self, request_id: str, reason: str) -> None:
        prefilling = self._prefilling.pop(request_id, None)
        if prefilling is not None:
            self._announcements.remove(request_id)
            prefilling.transfer.cancel(reason)
            if prefilling.task is not None and prefilling.task is not asyncio.current_task():
                prefilling.task.cancel()

    def release(self, request_id: str, reason: str) -> None:
        self.drop(request_id, reason)
        self._thread.post(lambda engine: engine.abort(request_id))

    def on_output(self, output: TokenOutput) -> None:
        if output.ends_request:
            self.drop(output.request_id, "finished with its first token")
        elif (prefilling := self._prefilling.get(output.request_id)) is not None:
            prefilling.add(output)

    # ---- pairing

    async def _pair(self, link: IngressLink, message: Pair) -> None:
        """One at a time: two probes would share the memory's bandwidth."""
        address = TargetAddress(message.worker_id, message.epoch, message.host, message.kv_port)
        try:
            async with self._pairing:
                report = await self.plane.pair(address, is_anew=message.is_probe)
        except Exception:  # a process edge: the ingress asks again
            logger.exception("pairing with %s failed", message.worker_id)
            return
        link.send(Paired(report=report))

    # ---- life

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self) -> None:
        """Cancel every transfer, then close the source."""
        for request_id in list(self._prefilling):
            self.release(request_id, "the worker is shutting down")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.plane.aclose()
        self._announcements.aclose()


async def start_source(announcements: Announcements, parts: WorkerParts, *, is_eager: bool) -> PrefillRole:
    """A worker's source, which makes the pool readable now, where `is_eager`, or for its first transfer.

    Raises BackendUnavailable: a forced transport cannot be used.
    """
    options = parts.options
    source = KvSource(
        parts.engine.cache.memory,
        options.worker_id,
        parts.epoch,
        parts.engine.cache.fingerprint,
        options.secret,
        options.settings.transfer,
        host=options.host,
        generation_of=parts.engine.pool.generation,
        probe_buffers=EngineProbeBuffers(parts.thread),
        tls=parts.tls,
        transports=transports_for(parts.tls),
    )
    if is_eager:
        await source.start()
    return PrefillRole(options.worker_id, source, parts.thread, parts.requests, announcements)
