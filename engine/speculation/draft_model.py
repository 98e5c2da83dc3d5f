"""A small model that drafts a sequence's next tokens, with a KV pool of its own. Lives on the engine's thread.

Its KV is never transferred: after a migration, the new worker computes the text in chunks at the first draft. Tokens
are sampled as the target model would at that position, with the same random number: where the two agree on the
probabilities, they agree on the token. `draft_choice.py` decides which sequences are drafted for.
"""

import itertools
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from kvrelay.config import Settings
from kvrelay.engine.checkpoints.loading import load_model
from kvrelay.engine.checkpoints.preflight import num_blocks_for
from kvrelay.engine.execution.runner import Runner, kv_layout
from kvrelay.engine.execution.sampler import Sampler
from kvrelay.engine.models.decoder import DecoderModel
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.sequence import Scheduled, Sequence
from kvrelay.engine.speculation.draft_cache import DraftCache, Shadow
from kvrelay.engine.speculation.draft_choice import MEASURABLE, Pass
from kvrelay.engine.speculation.draft_fit import prepare_draft_model, weight_share
from kvrelay.kernels.backend import Backend, TokenFeed
from kvrelay.kvcache.memory.storage import DTYPES, KvStorage
from kvrelay.kvcache.pool.block_pool import BlockPool

logger = logging.getLogger(__name__)

_UNREAD = -1  # in a shadow's text: a token that is still on the device


@dataclass(slots=True)
class Drafted:
    """The drafts before a step, by the identity of the sequence, and the passes that they took."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)


class DraftModel:
    """Drafts for one engine's sequences."""

    def __init__(
        self,
        model: DecoderModel,
        backend: Backend,
        *,
        block_size: int,
        kv_memory_bytes: int,
        max_running: int,
        max_model_len: int,
        vocab_size: int,
        share: float = 0.3,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            vocab_size: of the target model.
            share: its weights relative to the target model's, by bytes.

        Raises:
            ConfigError: the KV memory holds fewer than two blocks.
        """
        spec, layout = model.spec, kv_layout(model)
        num_blocks = num_blocks_for(kv_memory_bytes, layout.block_bytes)
        self.share, self._name = share, name
        self.max_model_len = min(spec.max_position, num_blocks * block_size, max_model_len)
        self._clock, self._vocab_size = clock, vocab_size
        self._storage = KvStorage(replace(layout, num_blocks=num_blocks), backend.device)
        self._runner = Runner(
            model,
            backend,
            self._storage.layers,
            block_size=block_size,
            max_running=max_running,
            max_blocks=-(-self.max_model_len // block_size) + 1,
        )
        self._sampler, self._device = Sampler(backend, ()), backend.asynchronous
        self._unread: list[tuple[list[Sequence], Tensor]] = []  # tokens on the device, in the order of passes
        pool = BlockPool(num_blocks, block_size=block_size)
        self.cache = DraftCache(pool, vocab_size=spec.vocab_size, forget=self._runner.forget)

    def warm_up(self) -> None:
        """On a GPU, choose kernels and capture steps now rather than in the first drafts."""
        self._runner.warm_up()

    def describe(self) -> str:
        layout = self._storage.memory.layout
        return (
            f"{self._name}: {self.share:.0%} of the model's weights, {layout.num_bytes / (1 << 20):.0f} MiB of KV for "
            f"{layout.num_blocks * layout.block_size} tokens"
        )

    def most_for(self, seq: Sequence) -> int:
        """Tokens that its context length allows to draft; 0: none, or the text has tokens outside its vocabulary."""
        return 0 if self.cache.is_foreign(seq) else max(0, self.max_model_len - seq.num_tokens)

    @torch.inference_mode()
    def draft(self, wanted: Rows[tuple[Sequence, int]], *, chunk: int) -> Drafted:
        """Draft this many tokens (at least 1, at most `most_for`) for each of these sequences.

        chunk: most tokens of their texts that are computed first. Sequences further behind, or without free blocks, get
        none.
        """
        drafted, self._unread = Drafted(), []
        ready = self._catch_up(wanted, chunk, drafted)
        going = ready
        while going := [(shadow, most) for shadow, most in going if shadow.num_drafted < most]:
            self._pass([Scheduled(shadow.seq, shadow.seq.num_computed, 1) for shadow, _ in going], drafted)
        self._wait(drafted)
        drafted.tokens = {id(shadow.of): shadow.seq.token_ids[shadow.num_sure :] for shadow, _ in ready}
        return drafted

    def _catch_up(self, wanted: Rows[tuple[Sequence, int]], chunk: int, drafted: Drafted) -> list[tuple[Shadow, int]]:
        """Compute missing text, nearest first; returns (shadow, tokens wanted) of those that have a first draft now."""
        needed = {seq.request_id for seq, _ in wanted}
        work: list[Scheduled] = []
        ready: list[tuple[Shadow, int]] = []
        for seq, most in sorted(wanted, key=lambda pair: self.cache.num_behind(pair[0])):
            shadow = self.cache.follow(seq)
            if shadow is None or chunk <= 0:
                continue
            own, take = shadow.seq, min(shadow.num_behind, chunk)
            is_ready = take == shadow.num_behind
            if self.cache.grow(shadow, own.num_computed + take + (most - 1 if is_ready else 0), needed):
                work.append(Scheduled(own, own.num_computed, take))
                chunk -= take
                ready += [(shadow, most)] * is_ready
        if work:
            self._pass(work, drafted)
        return ready

    def _pass(self, work: list[Scheduled], drafted: Drafted) -> None:
        """One pass over the model; shadows without an uncomputed token recompute their last one.

        On a device that computes asynchronously the tokens stay there, for the next pass, where none depends on those
        before it otherwise: `_wait` brings them all.
        """
        begin_s = self._clock()
        singles = [item for item in work if item.num_tokens == 1]
        plan = StepPlan((*singles, *(item for item in work if item.num_tokens > 1)), len(singles), ())
        hidden = self._runner.run(plan, feed=self._feed(plan))
        ends = itertools.accumulate(item.num_tokens for item in plan.work)
        last = [(end - 1, item.seq) for end, item in zip(ends, plan.work, strict=True) if item.samples]
        if last:
            rows, seqs = [row for row, _ in last], [seq for _, seq in last]
            logits = self._runner.logits(hidden, rows)
            if logits.shape[1] > self._vocab_size:  # padded differently from the target model
                logits = logits[:, : self._vocab_size].contiguous()
            if self._device is not None and self._sampler.is_memoryless(seqs):
                drawn, _ = self._sampler.draw(logits, seqs)
                self._unread.append((seqs, drawn))
                tokens = [_UNREAD] * len(seqs)
            else:
                tokens, _ = self._sampler.sample(logits, seqs)
        for item in plan.work:
            item.seq.num_computed = item.start + item.num_tokens
        if last:
            for seq, token in zip(seqs, tokens, strict=True):
                seq.token_ids.append(token)
        drafted.passes.append(Pass(len(work), plan.num_tokens, self._clock() - begin_s))
        if plan.num_tokens - len(work) >= MEASURABLE:  # its time is not that of the passes behind it
            self._wait(drafted)

    def _feed(self, plan: StepPlan) -> TokenFeed | None:
        """The last pass's tokens, for a pass that continues all of its rows' sequences."""
        if not self._unread:
            return None
        seqs, tokens = self._unread[-1]
        row_of = {id(seq): row for row, seq in enumerate(seqs)}
        return TokenFeed(torch.tensor([row_of[id(item.seq)] for item in plan.work]), tokens)

    def _wait(self, drafted: Drafted) -> None:
        """Read the tokens of the passes since the last call. Their time is shared out between these passes."""
        if not self._unread:
            return
        assert self._device is not None
        unread, self._unread = self._unread, []
        begin_s, count = self._clock(), len(unread)
        tokens = iter(self._device.pending(torch.cat([tokens for _, tokens in unread])).wait())
        for seqs, _ in unread:
            for seq in seqs:
                seq.token_ids[seq.token_ids.index(_UNREAD, -count)] = next(tokens)
        passes = drafted.passes[-count:]
        seconds = (sum(one.seconds for one in passes) + self._clock() - begin_s) / count
        drafted.passes[-count:] = [replace(one, seconds=seconds) for one in passes]


def make_draft_model(settings: Settings, folder: Path, backend: Backend, max_running: int) -> DraftModel | None:
    """The draft model for the model in `folder`, from a decode worker's settings; None: none is configured.

    Raises:
        ModelError: it is missing, or an unsupported model.
        ConfigError: it does not match the model or the backend.
    """
    draft_folder = prepare_draft_model(settings, folder)
    if draft_folder is None:
        return None
    engine, spec = settings.engine, ModelSpec.from_folder(folder)
    model = load_model(
        draft_folder,
        backend,
        DTYPES[settings.model.compute_dtype],
        block_size=engine.block_size,
        kv_layout=engine.kv_layout,
    )
    drafts = DraftModel(
        model,
        backend,
        block_size=engine.block_size,
        kv_memory_bytes=engine.draft_kv_bytes,
        max_running=max_running,
        max_model_len=min(spec.max_position, settings.model.max_model_len or spec.max_position),
        vocab_size=spec.vocab_size,
        share=weight_share(folder, draft_folder, settings),
        name=draft_folder.name,
    )
    drafts.warm_up()
    logger.info("draft model %s", drafts.describe())
    return drafts
