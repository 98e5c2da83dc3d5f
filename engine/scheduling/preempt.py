"""Preemption: which running sequences lose their blocks when there are none left, and the swap area. Pure."""

from array import array
from collections import Counter
from collections.abc import Mapping

from kvrelay.engine.scheduling.blocks import CopyOnWrite, Release
from kvrelay.engine.scheduling.groups import Groups
from kvrelay.engine.scheduling.preemption_policy import PreemptionChoice, PreemptionMode, num_shared
from kvrelay.engine.scheduling.sequence import Sequence, SequenceGroup, State
from kvrelay.engine.scheduling.waiting_queue import Queues, victim
from kvrelay.kvcache.memory.swap import SwapArea, SwappedBlocks
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.pool.ledger import BlockIds
from kvrelay.types import BlockId, FinishReason


class Preemption:
    """Takes running sequences off the batch, and brings swapped ones back."""

    def __init__(
        self,
        queues: Queues,
        release: Release,
        copies: CopyOnWrite,
        choice: PreemptionChoice,
        groups: Groups,
        pool: BlockPool,
        area: SwapArea | None,
    ) -> None:
        self._queues, self._release, self._copies, self._groups = queues, release, copies, groups
        self.choice, self._pool, self.area = choice, pool, area
        self.num_preemptions = 0
        self.num_by_mode: Counter[PreemptionMode] = Counter()  # sequences
        self.recomputed_tokens = 0  # of sequences whose KV was dropped, or found corrupt
        self.returned: list[Sequence] = []

    def take_returned(self) -> list[Sequence]:
        """Sequences that ended here since the last call, to be prefilled again by a prefill worker."""
        returned, self.returned = self.returned, []
        return returned

    def make_room(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        """Preempt a running sequence, with its group. False if that was `seq` itself."""
        gone = self._preempt(victim(self._queues.running, seq))
        preempted += gone
        return all(one is not seq for one in gone)

    def _preempt(self, chosen: Sequence) -> list[Sequence]:
        """Preempt all members of a group at once, unless it runs alone: then one, to go on when the others have ended.

        Beams are not swapped but merged: they move in step, and some might not come back while others hold blocks.
        """
        group = chosen.group
        if group is None or chosen is group.leader or self._runs_alone(group):
            self.preempt_group((chosen,))
            return [chosen]
        members = tuple(one for one in group.members if one.state is State.RUNNING)
        if group.search is None and self._mode_for(members) is PreemptionMode.SWAP and self._swap_out(members):
            return list(members)
        leader, gone = self._groups.merge(group)
        self._queues.waiting.push(leader)
        self._count(PreemptionMode.RECOMPUTE, len(gone))
        return gone

    def _runs_alone(self, group: SequenceGroup) -> bool:
        """Whether no other sequence's end will make room for it. Beams were admitted because all fit at once."""
        queues = self._queues
        return group.search is None and not queues.receiving and all(seq.group is group for seq in queues.running)

    def preempt_group(self, group: tuple[Sequence, ...]) -> PreemptionMode:
        """Preempt these running sequences, all in the mode that costs the least; returns it."""
        mode = self._mode_for(group)
        if mode is PreemptionMode.SWAP:
            if self._swap_out(group):
                return mode
            mode = PreemptionMode.RECOMPUTE
        for seq in group:
            if mode is PreemptionMode.RETURN_TO_PREFILL:
                self._release.finish(seq, FinishReason.ABORT)
                self.returned.append(seq)
            else:
                self._release.leave_batch(seq)
                self.recompute(seq)
        self._count(mode, len(group))
        return mode

    def _mode_for(self, group: tuple[Sequence, ...]) -> PreemptionMode:
        return self.choice.mode_for(group, num_others=len(self._queues.running) - len(group))

    def _swap_out(self, group: tuple[Sequence, ...]) -> bool:
        """Save their KV and take them off the batch. False, and nothing changed: the swap area has no room."""
        if not self._save(group, {copy.target: copy.source for copy in self._copies.pending}):
            return False
        for seq in group:
            self._release.leave_batch(seq)
            seq.num_hashed_blocks = 0
            seq.move_to(State.SWAPPED)
            self._queues.push_swapped(seq)
        self._count(PreemptionMode.SWAP, len(group))
        return True

    def _count(self, mode: PreemptionMode, num_sequences: int) -> None:
        self.num_by_mode[mode] += num_sequences
        self.num_preemptions += num_sequences

    def recompute(self, seq: Sequence) -> None:
        """Queue `seq`, which holds no blocks, to be computed again, at the front. Cached blocks shorten that."""
        self.recomputed_tokens += seq.num_computed
        self._release.drop_swapped(seq)
        seq.num_computed = seq.num_hashed_blocks = 0
        seq.prompt_logprobs.clear()  # they are computed again with the prompt
        seq.move_to(State.WAITING)
        self._queues.waiting.push(seq)

    def rewind(self, seq: Sequence) -> None:
        """What is being loaded for `seq` is corrupt: compute it again, without that."""
        self._release.leave_batch(seq)
        self.recompute(seq)
        self.num_preemptions += 1

    # ---- the swap area

    def _save(self, group: tuple[Sequence, ...], sources: Mapping[int, int]) -> bool:
        """Save all of these sequences, or none: False when there is no room.

        sources: for blocks whose content is still to be copied from another block, that other block.
        """
        area = self.area
        if area is None:
            return False
        saved: list[SwappedBlocks] = []
        for seq in group:
            first = num_shared(self._pool, seq)
            blocks = seq.blocks[first : seq.blocks_for(seq.num_computed)]
            swapped = area.save(first, [sources.get(block, block) for block in blocks])
            if swapped is None:
                break
            saved.append(swapped)
        if len(saved) < len(group):
            for swapped in saved:
                area.drop(swapped)
            return False
        for seq, swapped in zip(group, saved, strict=True):
            seq.swapped = swapped
        return True

    def match_swapped(self, seq: Sequence) -> "BlockIds | None":
        """Cached blocks that need not be copied back;

        None: blocks that it shared are gone, so it must be recomputed.
        """
        swapped = seq.swapped
        assert swapped is not None
        cached = self._pool.match(seq.block_chain(), min(seq.num_computed // seq.block_size, swapped.end_block))
        if len(cached) < swapped.first_block:
            return None
        self._pool.use(cached, seq.request.hints.priority)
        return array("i", cached.blocks)

    def swap_in(self, seq: Sequence, num_cached: int) -> None:
        """`seq` holds all its blocks again, the first of them cached: the copies of the others begin."""
        swapped, area = seq.swapped, self.area
        assert swapped is not None and area is not None
        blocks = [BlockId(block) for block in seq.blocks[num_cached : swapped.end_block]]
        seq.swapped, seq.load = None, area.load(swapped, num_cached, blocks)
        seq.num_hashed_blocks = num_cached

    def check(self) -> None:
        """Raise AssertionError unless the swap area holds just what this engine's sequences have there."""
        if self.area is not None:
            seqs = self._queues.sequences.values()
            self.area.check([seq.swapped for seq in seqs if seq.swapped is not None])
