"""From a planned step to its outputs: copies, loads, layer events, the model, and the tokens of plain rows, of
groups, of drafted rows, and prompt log-probabilities.

On a device that computes asynchronously tokens are drawn when the step is launched, and collected later; where masks
or penalties depend on the tokens of the step before, once those are collected. Prompt log-probabilities, drafts and
groups are drawn when the step is collected.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from kvrelay.engine.execution.masks import Constraints, RowMasks
from kvrelay.engine.execution.runner import InFlightStep, Runner, sampled
from kvrelay.engine.execution.sampler import OutputProcessor, Sampler, likeliest, token_logprobs, with_first_token_facts
from kvrelay.engine.scheduling.groups import Groups
from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.scheduling.sequence import Scheduled, Sequence, State
from kvrelay.kernels.backend import AsyncDevice
from kvrelay.kernels.common.sampling_search import to_device
from kvrelay.kvcache.memory.storage import KvStorage
from kvrelay.kvcache.memory.swap import SwapLoad
from kvrelay.plane.messages import TokenLogprob, TokenOutput
from kvrelay.types import BlockId

logger = logging.getLogger(__name__)

_PROMPT_LOGPROB_ROWS = 64  # logits of a whole chunk at once would be 100 MB at vocabularies of 50k and 512 tokens


LayerHook = Callable[[str, int, list[BlockId], range], None]
"""(request, first index, blocks, layers): these blocks of a held sequence are final for these layers.

Called on the engine's thread. On a device that computes asynchronously, they will be final when it has done what was
launched so far.
"""


class LayerEvents:
    """The layer events of one engine: four in each step, so that a transfer begins early and sends large parts."""

    def __init__(self, hook: LayerHook, *, num_layers: int) -> None:
        self._hook, self._num_layers, self._step = hook, num_layers, -(-num_layers // 4)

    def announce_cached(self, item: Scheduled) -> None:
        """Blocks found in the prefix cache are final for every layer before the first step."""
        seq = item.seq
        num_in_pool = seq.num_cached // seq.block_size - seq.num_loaded_blocks
        if seq.hold and num_in_pool:
            self._hook(seq.request_id, 0, _block_ids(seq, 0, num_in_pool), range(self._num_layers))

    def on_layer(self, plan: StepPlan) -> Callable[[int], None] | None:
        """What is to be called when a layer of this step is done; None: no held sequence is in it."""
        ready: list[tuple[str, int, list[BlockId]]] = []
        for item in plan.work:
            if (seq := item.seq).hold:
                ready.append((seq.request_id, *completed_blocks(item)))
                if seq.load is not None:  # its blocks become final layer by layer
                    end = seq.num_cached // seq.block_size
                    first = end - seq.num_loaded_blocks
                    ready.append((seq.request_id, first, _block_ids(seq, first, end)))
        if not (ready := [entry for entry in ready if entry[2]]):
            return None
        hook, last_layer, step = self._hook, self._num_layers - 1, self._step

        def on_layer(layer: int) -> None:
            if (layer + 1) % step == 0 or layer == last_layer:
                for request_id, first, blocks in ready:
                    hook(request_id, first, blocks, range(layer - layer % step, layer + 1))

        return on_layer


def completed_blocks(item: Scheduled) -> tuple[int, list[BlockId]]:
    """(first index, ids) of the blocks that `item` completes: full ones, and the partial one with the prompt's end."""
    seq, end = item.seq, item.start + item.num_tokens
    first = item.start // seq.block_size
    last = seq.blocks_for(end) if end == seq.num_tokens else end // seq.block_size
    return first, _block_ids(seq, first, last)


def _block_ids(seq: Sequence, first: int, end: int) -> list[BlockId]:
    return [BlockId(block) for block in seq.blocks[first:end]]


class StepLoads:
    """What a step waits for. may_load: whether sequences' blocks can be on their way at all."""

    def __init__(self, scheduler: Scheduler, *, num_layers: int, may_load: bool) -> None:
        self._scheduler = scheduler
        self._last_layer, self._may_load = num_layers - 1, may_load

    def verified(self, plan: StepPlan) -> StepPlan:
        """The plan without sequences whose saved blocks turned out to be corrupt: those are computed again."""
        if not self._may_load:
            return plan
        bad = {id(item.seq) for item in plan.work if item.seq.load is not None and not item.seq.load.wait_verified()}
        if not bad:
            return plan
        rewound = tuple(item.seq for item in plan.work if id(item.seq) in bad)
        for seq in rewound:
            logger.warning("request %s: its saved blocks are corrupt; they are computed again", seq.request_id)
            self._rewind(seq)
        return StepPlan(
            tuple(item for item in plan.work if id(item.seq) not in bad),
            sum(1 for item in plan.work[: plan.num_single] if id(item.seq) not in bad),
            plan.preempted + rewound,
            tuple(copy for copy in plan.copies if id(copy.seq) not in bad),
        )

    def _rewind(self, seq: Sequence) -> None:
        load = seq.load
        self._scheduler.preemption.rewind(seq)
        if load is not None and not isinstance(load, SwapLoad):
            assert self._scheduler.tiers is not None
            self._scheduler.tiers.controller.discard_load(load)

    def wait_for(self, seq: Sequence) -> bool:
        """Wait until all blocks of `seq` are loaded. False: they are corrupt, and `seq` is computed again."""
        load = seq.load
        if load is None:
            return True
        if not (load.wait_verified() and load.wait_layer(self._last_layer)):
            self._rewind(seq)
            return False
        seq.end_load()
        return True

    def before_layer(self, plan: StepPlan) -> Callable[[int], None] | None:
        """Waits until a layer's loaded KV is in place; None when none is on its way."""
        if not self._may_load:
            return None
        last = self._last_layer
        loads = [load for item in plan.work if (load := item.seq.load) is not None and not load.has_layer(last)]
        if not loads:
            return None

        def before_layer(layer: int) -> None:
            for load in loads:
                if not load.wait_layer(layer):
                    raise RuntimeError("the load of KV from host memory stopped before its last layer")

        return before_layer

    def settle(self, plan: StepPlan) -> None:
        """The step was launched: its loads are over."""
        if self._may_load:
            for item in plan.work:
                if item.seq.load is not None:
                    item.seq.end_load()


class StepExecutor:
    """Launches the steps of one engine, and collects their outputs.

    note_draft: called with a drafted item and how many of its tokens were right. device: None: calls return when they
    are computed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        storage: KvStorage,
        loads: StepLoads,
        sampler: Sampler,
        outputs: OutputProcessor,
        constraints: Constraints,
        groups: Groups,
        note_draft: Callable[[Scheduled, int], None],
        layer_events: LayerEvents | None,
        device: AsyncDevice | None,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._runner, self._storage, self._loads = scheduler, runner, storage, loads
        self.sampler, self._outputs, self._groups, self._note_draft = sampler, outputs, groups, note_draft
        self._constraints = constraints
        self._layer_events, self._device, self._clock = layer_events, device, clock

    # ---- at launch

    def launch(self, plan: StepPlan, now_s: float, before: InFlightStep | None) -> InFlightStep:
        """Have a plan computed. before: the step in flight, whose tokens this one may read on the device."""
        begun = [item for item in plan.work if not item.seq.plain_until]
        for item in begun:
            seq = item.seq
            seq.num_chunks += 1
            if seq.scheduled_s is None:
                seq.scheduled_s = now_s
                if self._layer_events is not None:
                    self._layer_events.announce_cached(item)
        step = InFlightStep(plan, *sampled(plan), now_s, self._scheduler.blocks)
        if begun and any(item.seq.constraint is not None for item in begun):
            is_known = self._device is None  # every token before this step's
            constraints = self._constraints
            step.masks = (constraints.begin if is_known else constraints.later)(plan, step.seqs)
        try:
            self._copy_blocks(step)
            feed = before.feed(plan) if before is not None else None
            on_layer = None if self._layer_events is None else self._layer_events.on_layer(plan)
            hidden = self._runner.run(plan, on_layer, self._loads.before_layer(plan), feed)
            self._loads.settle(plan)
            step.wants_prompt_logprobs = any(item.seq.request.sampling.prompt_logprobs is not None for item in begun)
            self._draw_or_keep(step, hidden)
        except BaseException:
            step.release_kept()
            raise
        return step

    def _copy_blocks(self, step: InFlightStep) -> None:
        if copies := step.plan.copies:
            for copy in copies:
                self._runner.forget(copy.seq)  # its row of the block table names the shared block
            step.keep_blocks(copy.source for copy in copies)
            self._storage.copy_blocks([(copy.source, copy.target) for copy in copies])
        self._scheduler.blocks.copied()

    def _draw_or_keep(self, step: InFlightStep, hidden: Tensor) -> None:
        """Draw the step's tokens now if they follow from its logits; else keep `hidden`, until the tokens before are
        known or until it is collected.
        """
        if self._device is None or self._must_wait(step):
            step.hidden = hidden
        elif not step.rows:
            step.pending = self._device.pending(_none_drawn(hidden))
        elif step.masks is not None or not self.sampler.is_memoryless(step.seqs):
            step.hidden = hidden
        else:
            self._draw(step, self._device, hidden)

    def _must_wait(self, step: InFlightStep) -> bool:
        """Whether the host must have the step's logits, or all of its tokens, before the next one is launched."""
        return step.wants_prompt_logprobs or bool(step.plan.num_drafted or self._scheduler.groups)

    def draw_late(self, step: InFlightStep) -> None:
        """Every token before this step's is known by now. If it needed them, its tokens are drawn: its masks are
        computed here while the device computes the step.
        """
        if self._device is not None and step.pending is None and step.rows and not self._must_wait(step):
            hidden, step.hidden = step.hidden, None
            assert hidden is not None
            self._draw(step, self._device, hidden)

    def _draw(self, step: InFlightStep, device: AsyncDevice, hidden: Tensor) -> None:
        logits = self._runner.logits(hidden, step.rows)
        tokens, step.logprobs = self.sampler.draw(logits, step.seqs, step.masks and step.masks())
        step.pending = device.pending(tokens, *step.logprobs.of(logits))

    # ---- when the step is collected

    def collect(self, step: InFlightStep) -> list[TokenOutput]:
        """The outputs of a step. Waits until the device has done it."""
        outputs: list[TokenOutput] = []
        try:
            if step.pending is None:
                self.sample(step, outputs)
            else:
                tokens = step.pending.wait()
                self.take(step, tokens, step.logprobs.beside(tokens, step.pending.packed), outputs)
        finally:
            step.release_kept()
        return outputs

    def take(
        self, step: InFlightStep, tokens: list[int], logprobs: list[TokenLogprob | None], outputs: list[TokenOutput]
    ) -> None:
        """Append tokens that were drawn at launch, but not to sequences that have ended meanwhile."""
        live = [row for row, seq in enumerate(step.seqs) if seq.state is State.RUNNING]
        seqs, tokens = [step.seqs[row] for row in live], [tokens[row] for row in live]
        self._outputs.append_all(seqs, tokens, [logprobs[row] for row in live], outputs)

    def sample(self, step: InFlightStep, outputs: list[TokenOutput]) -> None:
        """Draw the tokens of a step that has waited for what came before it."""
        plan, rows, seqs, hidden = step.plan, step.rows, step.seqs, step.hidden
        assert hidden is not None
        if step.wants_prompt_logprobs:
            self._collect_prompt_logprobs(plan, hidden)
        masks = step.masks and step.masks()
        if self._device is not None and not plan.num_drafted:  # some may have ended with the step before
            live = [row for row, seq in enumerate(seqs) if seq.state is State.RUNNING]
            rows, seqs = [rows[row] for row in live], [seqs[row] for row in live]
            masks = masks and masks.of(live)
        if not rows:
            if self._device is not None:  # whatever the step uses may be reused next
                self._device.pending(_none_drawn(hidden)).wait()
            return
        logits = self._runner.logits(hidden, rows)
        if plan.num_drafted:
            self._sample_drafted(plan, seqs, logits, masks, outputs)
        elif self._scheduler.groups:
            self._sample_groups(seqs, logits, masks, outputs)
        else:
            tokens, logprobs = self.sampler.sample(logits, seqs, masks=masks)
            self._outputs.append_all(seqs, tokens, logprobs, outputs)

    def _sample_groups(
        self, seqs: list[Sequence], logits: Tensor, masks: RowMasks | None, outputs: list[TokenOutput]
    ) -> None:
        """Sample a step that has members of groups. A leader's mask serves each choice, as its row does."""
        draws = self._groups.rows_of(seqs)
        if draws:
            places, members = [row for row, _ in draws], [seq for _, seq in draws]
            rows = to_device(torch.tensor(places, dtype=torch.int64), logits.device)
            tokens, logprobs = self.sampler.sample(logits[rows], members, masks=masks and masks.of(places))
            self._outputs.append_all(members, tokens, logprobs, outputs)
        now_s = self._clock()
        leaders = [seq for seq in seqs if seq.group is not None and seq is seq.group.leader]
        for output in self._groups.advance_beams(seqs, lambda rows, beams: likeliest(logits[rows], beams)):
            leader = next((seq for seq in leaders if seq.request_id == output.request_id), None)
            outputs.append(output if leader is None else with_first_token_facts(output, leader, now_s))
        self._groups.settle(leaders)

    def _sample_drafted(
        self, plan: StepPlan, seqs: list[Sequence], logits: Tensor, masks: RowMasks | None, outputs: list[TokenOutput]
    ) -> None:
        """Each row draws what it would draw if all drafts before it were right; the first wrong one ends its sequence's
        step. So the tokens are those of plain steps, one by one: see `uniforms`.
        """
        items = [item for item in plan.work if item.samples]
        ahead = [index for item in items for index in range(1 + len(item.drafts))]
        tokens, logprobs = self.sampler.sample(logits, seqs, ahead, masks)
        begin = 0
        for item in items:
            end = begin + 1 + len(item.drafts)
            if item.drafts:
                self.take_drafted(item, tokens[begin:end], logprobs[begin:end], outputs)
            else:
                self._outputs.append_all([item.seq], tokens[begin:end], logprobs[begin:end], outputs)
            begin = end

    def take_drafted(
        self, item: Scheduled, tokens: list[int], logprobs: list[TokenLogprob | None], outputs: list[TokenOutput]
    ) -> None:
        """Append a sequence's next token and those behind right drafts. tokens, logprobs: of its rows."""
        seq, num_accepted = item.seq, 0
        for index, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            num_sent = len(outputs)
            self._scheduler.advance(Scheduled(seq, item.start + index, 1))
            self._outputs.append_all([seq], [token], [logprob], outputs)
            if index == len(item.drafts) or token != item.drafts[index] or len(outputs) == num_sent:
                break
            num_accepted += 1
            if seq.state is not State.RUNNING:
                break
        self._note_draft(item, num_accepted)

    def _collect_prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> None:
        begin, num_rows = 0, _PROMPT_LOGPROB_ROWS
        for item in plan.work:
            seq, first = item.seq, begin
            begin += item.num_tokens
            count, num_prompt = seq.request.sampling.prompt_logprobs, seq.request.num_prompt_tokens
            is_done = seq.num_output > seq.request.num_output_tokens  # sent before a preemption
            if count is None or is_done:
                continue
            targets = seq.token_ids[item.start + 1 : min(item.start + item.num_tokens, num_prompt - 1) + 1]
            for offset in range(0, len(targets), num_rows):
                part = targets[offset : offset + num_rows]
                logits = self._runner.logits(hidden, range(first + offset, first + offset + len(part)))
                seq.prompt_logprobs += token_logprobs(logits, part, [count] * len(part))


def _none_drawn(hidden: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=hidden.device)
