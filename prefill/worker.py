"""The prefill worker: computes prompts, samples one token, sends the KV to whom the ticket names.

The first token goes straight to the client; the blocks stay held until the decode worker has
confirmed them, refused them, or gone.
"""

import asyncio
import logging
import queue
import threading
from functools import partial
from typing import Any

from kvrelay.engine.step.engine import Engine
from kvrelay.engine.step.layer_events import LayerHook
from kvrelay.engine.worker.probe_buffers import BlockLender
from kvrelay.engine.worker.service import Link, WorkerService
from kvrelay.errors import BackendUnavailable, TransferError
from kvrelay.kvtransfer.paths.selection import transports_for
from kvrelay.kvtransfer.protocol.tickets import reason_word
from kvrelay.kvtransfer.protocol.types import TransferStats, span_attributes
from kvrelay.plane.messages import Manifest, Pair, Paired, PairReport, Prefill, SequenceRequest, TokenOutput, encode
from kvrelay.prefill.source import KvSource, SourceTransfer
from kvrelay.prefill.source_link import TargetAddress
from kvrelay.types import BlockId, Role

logger = logging.getLogger(__name__)


class PrefillWorker(WorkerService):
    """One engine that hands every sequence on after its first token."""

    role = Role.PREFILL

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._source: KvSource | None = None
        self._transfers: dict[str, SourceTransfer] = {}
        self._prompts: dict[str, int] = {}  # tokens whose KV will have been sent
        self._drawn: dict[str, list[TokenOutput]] = {}  # first tokens: one, or one for each choice of a group
        self._num_to_draw: dict[str, int] = {}
        self._commits: set[asyncio.Task[None]] = set()
        self._device_gate: _DeviceGate | None = None
        self._pairings: set[asyncio.Task[None]] = set()
        self._one_pairing = asyncio.Lock()

    # ---- the KV plane

    async def _start_transfers(self, engine: Engine) -> None:
        self._source = KvSource(
            engine.memory, self.worker_id, self.epoch, engine.fingerprint, self.secret, self.settings.transfer,
            host=self.host, generation_of=engine.pool.generation, lender=BlockLender(self.thread), tls=self.tls,
            transports=transports_for(self.settings.transfer.tcp_streams, self.tls),
        )  # fmt: skip
        await self._source.start()

    async def _stop_transfers(self) -> None:
        for request_id in list(self._transfers):
            self._release(request_id, "the worker is shutting down")
        tasks = [*self._commits, *self._pairings]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._source is not None:
            await self._source.aclose()
        if self._device_gate is not None:
            self._device_gate.close()

    def _transports(self) -> list[str]:
        return list(self._source.transports) if self._source else []

    def _pairs(self) -> list[PairReport]:
        return self._source.pairs() if self._source else []

    def _on_pair(self, link: Link, message: Pair) -> None:
        task = asyncio.create_task(self._pair(link, message), name=f"pair with {message.worker_id}")
        self._pairings.add(task)
        task.add_done_callback(self._pairings.discard)

    async def _pair(self, link: Link, message: Pair) -> None:
        """One at a time: two probes would share the memory's bandwidth."""
        assert self._source is not None
        address = TargetAddress(message.worker_id, message.epoch, message.host, message.kv_port)
        try:
            async with self._one_pairing:
                report = await self._source.pair(address, is_anew=message.is_probe)
        except Exception:  # a process edge: the ingress asks again
            logger.exception("pairing with %s failed", message.worker_id)
            return
        link.send(Paired(report=report))

    def _layer_hook(self) -> LayerHook:
        def hook(request_id: str, first_index: int, blocks: list[BlockId], layers: range) -> None:
            loop, engine = self._loop, self.thread.engine
            assert loop is not None and engine is not None

            def announce() -> None:
                loop.call_soon_threadsafe(self._announce, request_id, first_index, blocks, layers)

            if engine.backend.device.type == "cuda":
                if self._device_gate is None:
                    self._device_gate = _DeviceGate()
                self._device_gate.after_work_so_far(announce)
            else:
                announce()

        return hook

    def _announce(self, request_id: str, first_index: int, blocks: list[BlockId], layers: range) -> None:
        transfer = self._transfers.get(request_id)
        if transfer is not None:
            transfer.announce(first_index, blocks, layers)

    def _transfer_stats(self) -> TransferStats | None:
        return self._source.stats() if self._source is not None else None

    # ---- requests

    def _on_prefill(self, link: Link, message: Prefill) -> None:
        request, ticket = message.request, message.ticket
        request_id = request.request_id
        if request_id in self._owners or request_id in self._transfers:
            self._refuse(link, request_id, "duplicate", f"{request_id} is already here")
            return
        if ticket is None:
            if self._admit(link, request, lambda engine: engine.add(request, output_limit=1)):
                self._begin_span(request_id, "prefill")
            return
        assert self._source is not None
        try:
            transfer = self._source.open(request_id, ticket)
        except (TransferError, BackendUnavailable) as error:
            self._refuse(link, request_id, "invalid", str(error))
            return
        self._transfers[request_id] = transfer
        self._prompts[request_id] = len(request.token_ids)
        self._drawn[request_id] = []
        self._num_to_draw[request_id] = num_to_draw(request)
        if self._admit(link, request, lambda engine: engine.add(request, hold=True, output_limit=1)):
            self._begin_span(request_id, "prefill", decode_worker=transfer.ticket.target_worker)
        else:
            self._drop_transfer(request_id, "refused")

    def _refused(self, request_id: str, reason: str, message: str) -> None:
        self._drop_transfer(request_id, reason)
        super()._refused(request_id, reason, message)

    def _release(self, request_id: str, reason: str) -> None:
        self._drop_transfer(request_id, reason)
        super()._release(request_id, reason)

    def _drop_transfer(self, request_id: str, reason: str) -> None:
        self._prompts.pop(request_id, None)
        self._drawn.pop(request_id, None)
        self._num_to_draw.pop(request_id, None)
        transfer = self._transfers.pop(request_id, None)
        if transfer is not None:
            transfer.cancel(reason)

    def _is_noted(self, output: TokenOutput) -> bool:
        return True  # transfers wait for it

    def _on_output(self, output: TokenOutput) -> None:
        request_id = output.request_id
        if output.ends_request:
            self._drop_transfer(request_id, "finished with its first token")
            return
        transfer = self._transfers.get(request_id)
        if transfer is None:
            return
        drawn = self._drawn[request_id]
        drawn.append(output)
        if len(drawn) < self._num_to_draw[request_id]:
            return
        manifest = Manifest(
            request_id=request_id,
            num_tokens=self._prompts[request_id],
            position=output.position,
            token_ids=[token for one in drawn for token in one.token_ids],
            candidates=output.candidates,
        )
        loop, gate = self._loop, self._device_gate
        assert loop is not None
        if gate is None:
            self._begin_commit(transfer, manifest)
        else:  # nothing may be announced after the commit
            begin = partial(self._begin_commit, transfer, manifest)
            gate.after_callbacks_so_far(lambda: loop.call_soon_threadsafe(begin))

    def _begin_commit(self, transfer: SourceTransfer, manifest: Manifest) -> None:
        request_id = manifest.request_id
        if self._transfers.get(request_id) is not transfer:
            return
        task = asyncio.create_task(self._commit(request_id, transfer, manifest), name=f"commit {request_id}")
        self._commits.add(task)
        task.add_done_callback(self._commits.discard)

    async def _commit(self, request_id: str, transfer: SourceTransfer, manifest: Manifest) -> None:
        """Wait until the decode worker has the blocks or never will; then, in every case, let go of them."""
        self._begin_span(request_id, "kv send")
        try:
            result = await transfer.commit(encode(manifest))
            self._end_span(request_id, "kv send", **span_attributes(result))
            self._forget(request_id)
        except TransferError as error:
            logger.warning("request %s: %s", request_id, error)
            self._end_span(request_id, "kv send", error=str(error), reason=reason_word(error))
            self._fail(request_id, "transfer", str(error), retryable=True)
        finally:
            if self._transfers.get(request_id) is transfer:
                self._release(request_id, "done")

    def _on_failure(self, error: BaseException) -> None:
        for request_id in list(self._transfers):
            self._drop_transfer(request_id, "the engine failed")
        super()._on_failure(error)


def num_to_draw(request: SequenceRequest) -> int:
    """Outputs of a prefill worker for this request: one for each live choice, one with what a beam search begins with."""
    return 1 if request.group is None or request.group.beams is not None else request.group.num_sequences


class _DeviceGate:
    """Calls back, in order, when all work issued to the GPU before has been done. Unverified on a GPU."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device-gate", daemon=True)
        self._thread.start()

    def after_work_so_far(self, callback: Any) -> None:
        import torch

        event = torch.cuda.Event()
        event.record()
        self._queue.put((event, callback))

    def after_callbacks_so_far(self, callback: Any) -> None:
        """Call back when every callback asked for before has been made. From any thread."""
        self._queue.put((None, callback))

    def close(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            event, callback = item
            if event is not None:
                event.synchronize()
            callback()
