"""A sequence on its way to this decode worker: its reservation, its ticket, and the commit of its KV."""

import asyncio
import math
from dataclasses import dataclass

import msgspec

from kvrelay.engine.step.config import Reservation
from kvrelay.engine.worker.ingresses import IngressLink
from kvrelay.errors import TransferError
from kvrelay.kvtransfer.protocol.tickets import TransferResult
from kvrelay.plane.messages import Manifest, SequenceRequest, decode_manifest

_MAX_WAIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class CommittedTransfer:
    """A committed transfer. `payload`: the prefill worker's manifest, as it came."""

    payload: bytes
    result: TransferResult


class Incoming:
    """Made on the worker's loop when Reserve arrives; ends when the sequence is in the batch, or never will be."""

    def __init__(self, link: IngressLink, request: SequenceRequest) -> None:
        loop = asyncio.get_running_loop()
        self.link, self.request = link, request
        self.has_ticket = False  # a transfer may write its blocks
        self._reserved: asyncio.Future[Reservation] = loop.create_future()
        self._committed: asyncio.Future[CommittedTransfer] = loop.create_future()

    @property
    def is_waiting(self) -> bool:
        """Without a reservation yet."""
        return not self._reserved.done()

    def reserved(self, reservation: Reservation) -> None:
        self._reserved.set_result(reservation)

    def committed(self, commit: CommittedTransfer) -> None:
        """The transfer has ended well: every block is here and verified."""
        self.has_ticket = False
        if not self._committed.done():
            self._committed.set_result(commit)

    def failed(self, error: TransferError) -> None:
        """The transfer has ended badly."""
        self.has_ticket = False
        if not self._committed.done():
            self._committed.set_exception(error)
            self._committed.exception()  # retrieved, though a dropped request does not await it

    async def reservation(self, timeout_s: float) -> Reservation | None:
        """Wait for blocks; None when none became free in time. A timeout that is no number counts as 0."""
        try:
            async with asyncio.timeout(max(0.0, min(timeout_s, _MAX_WAIT_S))):
                return await self._reserved
        except TimeoutError:
            return None

    async def commit(self) -> CommittedTransfer:
        """Wait for the KV. Raises TransferError."""
        return await self._committed


def manifest_in(payload: bytes, request: SequenceRequest, vocab_size: int) -> Manifest:
    """The manifest, if it fits the request. Raises ValueError naming what does not."""
    try:
        manifest = decode_manifest(payload)
    except msgspec.DecodeError as error:
        raise ValueError(f"malformed manifest: {error}") from error
    if manifest.num_tokens != len(request.token_ids):
        raise ValueError(f"the manifest is of {manifest.num_tokens} tokens, not {len(request.token_ids)}")
    if manifest.position != request.num_output_tokens:
        raise ValueError(f"the manifest's token is output {manifest.position}, not {request.num_output_tokens}")
    if len(manifest.token_ids) != _num_first_tokens(request):
        raise ValueError(f"the manifest has {len(manifest.token_ids)} tokens, not {_num_first_tokens(request)}")
    if not all(0 <= token < vocab_size for token in manifest.token_ids):
        raise ValueError("a token of the manifest is outside the vocabulary")
    if not _are_candidates(manifest.candidates, request, vocab_size):
        raise ValueError("the manifest's candidates do not fit the request")
    return manifest


def _num_first_tokens(request: SequenceRequest) -> int:
    """Tokens that a prefill worker samples for this request."""
    if (group := request.group) is None:
        return 1
    return group.num_sequences if group.beams is None else 0


def _are_candidates(candidates: list[tuple[int, float]], request: SequenceRequest, vocab_size: int) -> bool:
    """Whether a beam search can begin with these; other requests have none."""
    if request.group is None or request.group.beams is None:
        return not candidates
    tokens = {token for token, _ in candidates}
    is_finite = all(-math.inf <= logprob <= 0.0 for _, logprob in candidates)
    return len(tokens) == len(candidates) > 0 and is_finite and 0 <= min(tokens) <= max(tokens) < vocab_size
