"""Requests of one engine: what it takes, from their arrival to a transfer's first tokens, and their abort. No torch."""

from collections.abc import Callable
from collections.abc import Sequence as Rows

from kvrelay.engine.execution.loads import StepLoads
from kvrelay.engine.execution.outputs import OutputProcessor
from kvrelay.engine.groups.beam import BeamCandidates
from kvrelay.engine.groups.group_steps import GroupSteps
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.engine.scheduling.swapping import MeasuredSpeeds
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.request_checks import request_fault
from kvrelay.plane.messages import SequenceRequest
from kvrelay.types import FinishReason


class Requests:
    """Called between two steps, on the engine's thread."""

    def __init__(
        self, scheduler: Scheduler, batch: Batch, groups: GroupSteps, loads: StepLoads, outputs: OutputProcessor,
        speeds: MeasuredSpeeds, clock: Callable[[], float], *, vocab_size: int, max_model_len: int,
    ) -> None:  # fmt: skip
        self._scheduler, self._batch, self._groups, self._loads = scheduler, batch, groups, loads
        self._outputs, self._speeds, self._clock = outputs, speeds, clock
        self._vocab_size, self._max_model_len = vocab_size, max_model_len

    def refusal(self, request: SequenceRequest) -> tuple[str, str] | None:
        """(reason, message) when this request cannot be taken, else None."""
        num_tokens, longest = len(request.token_ids), self._max_model_len
        if num_tokens >= longest + (request.sampling.max_tokens <= 1):
            return "too_long", f"{num_tokens} tokens, but the longest sequence is {longest}"
        if request.group is not None and request.group.beams is not None:
            most = num_tokens + request.sampling.max_tokens
            if most > longest:
                return "too_long", f"up to {most} tokens, but the longest sequence is {longest}"
        fault = request_fault(request, self._scheduler.pool.block_size, self._vocab_size)
        return ("invalid", fault) if fault is not None else self._scheduler.refusal(request)

    def add(self, request: SequenceRequest, *, hold: bool = False, output_limit: int | None = None) -> None:
        """Compute this sequence here. The caller has checked `refusal`."""
        self._scheduler.add(request, self._clock(), hold=hold, output_limit=output_limit)

    def reserve(self, request: SequenceRequest, *, prefill_tokens_per_s: float = 0.0) -> None:
        """Queue for blocks; a StepResult brings the Reservation. The caller has checked `refusal`.

        prefill_tokens_per_s: of the worker that will compute it, to which it may be returned; 0: it may not.
        """
        self._scheduler.add_reservation(request, self._clock()).prefill_tokens_per_s = prefill_tokens_per_s

    def activate(self, request_id: str, token_ids: list[int], candidates: Rows[tuple[int, float]] = ()) -> bool:
        """The reservation's blocks hold the prompt's KV. False when the sequence is no longer here.

        Args:
            token_ids: the first token; of a group, each live choice's.
            candidates: of a beam search, what may follow the prompt.
        """
        is_group = request_id in self._scheduler.groups.by_id
        seq = self._scheduler.activate(request_id, [] if is_group else token_ids)
        if seq is None:
            return False
        if is_group:
            self._activate_group(seq, token_ids, list(candidates))
        else:
            self._outputs.end_too_long([seq])
        return True

    def _activate_group(self, leader: Sequence, token_ids: list[int], candidates: BeamCandidates) -> None:
        """A group's members begin at once, so what is loaded from a lower tier is waited for here."""
        group, is_loading = leader.group, leader.load is not None
        assert group is not None
        if not self._loads.wait_for(leader):
            return
        if is_loading:
            self._scheduler.registration.register(leader)
        if group.search is None:
            self._outputs.end_too_long(self._groups.take_over(leader, token_ids))
        else:
            outputs = self._groups.begin_search(group, leader, candidates)
            self._outputs.send_later([output for output in outputs if output.finish_reason is not None])

    def abort(self, request_id: str) -> bool:
        """Free everything that the request holds. False when it is not here."""
        seqs = self._sequences_of(request_id)
        for seq in seqs:
            self._batch.end(seq, FinishReason.ABORT)
        return bool(seqs)

    def _sequences_of(self, request_id: str) -> list[Sequence]:
        if (group := self._scheduler.groups.by_id.get(request_id)) is not None and group.leader is None:
            return list(group.members)
        seq = self._scheduler.sequences.get(request_id)
        return [] if seq is None else [seq]

    def abort_choice(self, request_id: str, choice: int) -> None:
        """This choice of a group is no longer wanted."""
        group = self._scheduler.groups.by_id.get(request_id)
        if group is None or group.search is not None:
            return
        if group.leader is not None:
            group.unwanted.add(choice)
        for member in [member for member in group.members if member.choice == choice]:
            self._batch.end(member, FinishReason.ABORT)

    def quarantine(self, request_id: str) -> int | None:
        """Like abort for a receiving sequence, but its blocks stay taken until `unquarantine` of the key."""
        seq = self._scheduler.receiving.get(request_id)
        return None if seq is None else self._scheduler.quarantine(seq, FinishReason.ERROR)

    def unquarantine(self, key: int) -> None:
        """Nothing writes those blocks any more."""
        self._scheduler.aside.unquarantine(key)

    def note_transfer_speed(self, bytes_per_s: float, latency_s: float) -> None:
        """How fast KV comes from prefill workers: for the choice of a preemption mode."""
        self._speeds.transfer_bytes_per_s, self._speeds.transfer_latency_s = bytes_per_s, latency_s

    # ---- pins

    def pin_ahead(self, seq: Sequence, num_in_pool: int, ttl_s: float) -> None:
        """Keep a prompt's first blocks, which are in the pool, for a request that is yet to come."""
        self._scheduler.pool.tick(self._clock())
        self._scheduler.registration.pinning.pin_ahead(seq, num_in_pool, ttl_s)

    def end_pins(self, session: str) -> None:
        """End the pins made for this session, and make none for it any more."""
        self._scheduler.pool.tick(self._clock())
        self._scheduler.registration.pinning.end(session)
