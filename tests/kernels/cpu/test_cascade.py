"""Decode rows that share blocks read them together: the very same numbers, and only where blocks are the same."""

import dataclasses
import itertools
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from kvrelay import fp8
from kvrelay.kernels.backend import AttentionBatch, AttentionShape
from kvrelay.kernels.cpu.native_kernels import PART_TOKENS, WORTH, Schedule
from tests.kernels.oracle.kernel_cases import KernelCase, KernelStep, run_attention

TILE_TOKENS = 64  # TILE of cascade.h
NEVER = 1 << 40  # tokens that no step saves
_HEADER_WORDS = 8
_UNITS, _MEMBERS, _ROWS, _PARTS, _SAVED = range(5)  # indices into the header


@dataclass(frozen=True, slots=True)
class CascadeUnit:
    """Rows that read a partition's first tiles together.

    rows: decode rows. common: number of tiles that each shares with the row before it, 0 for the first.
    """

    part: int
    rows: tuple[int, ...]
    common: tuple[int, ...]


def units_of(schedule: Schedule) -> list[CascadeUnit]:
    """The schedule in execution order."""
    header = schedule.words[:_HEADER_WORDS].tolist()
    num_units, num_members, most = header[_UNITS], header[_MEMBERS], header[_ROWS] * header[_PARTS]
    at = _HEADER_WORDS
    first = schedule.words[at : at + num_units + 1].tolist()
    parts = schedule.words[at + most // 2 + 1 :][:num_units].tolist()
    at += most // 2 + 1 + most // 2
    rows, common = (schedule.words[start : start + num_members].tolist() for start in (at, at + most))
    return [
        CascadeUnit(parts[unit], tuple(rows[begin:end]), tuple(common[begin:end]))
        for unit, (begin, end) in enumerate(pairwise(first))
    ]


BF16 = torch.bfloat16
TREE = ((1, 0, 1100), (2, 0, 700), (3, 2, 1000), (4, 0, 130))  # (row, of row, so many tokens in common)
CONTEXTS = (1300, 1201, 1150, 1111, 200)
KINDS = {
    "GQA": {},
    "MHA": {"heads": 2, "kv_heads": 2, "head_dim": 20},
    "MQA": {"heads": 8, "kv_heads": 1, "head_dim": 32},
    "wide group": {"heads": 50, "kv_heads": 1, "head_dim": 16},
    "window": {"window": 300},
    "short window": {"window": 40},
    "softcap": {"softcap": 5.0},
    "window and softcap": {"window": 900, "softcap": 20.0},
    "latent": {"heads": 4, "kv_heads": 1, "head_dim": 48, "latent_dim": 32},
    "block of 1": {"block_size": 1, "head_dim": 16},
    "block of 48": {"block_size": 48, "head_dim": 16},
    "block of 128": {"block_size": 128, "head_dim": 16},
}


def shared_step(contexts=CONTEXTS, shared=TREE, chunks=(), seed=0, **kind):
    """A decode row for each context, then `chunks` (new tokens, context); what no context fills is NaN."""
    case = KernelCase((*((1, context) for context in contexts), *chunks), **kind)
    size, generator = case.block_size, torch.Generator().manual_seed(seed)
    lengths = [context for _, context in case.sequences]
    needed = [-(-length // size) for length in lengths]
    free, tables = torch.randperm(sum(needed), generator=generator).to(torch.int32), []
    for count in needed:
        tables.append(torch.cat((free[:count], torch.zeros(max(needed) - count, dtype=torch.int32))))
        free = free[count:]
    tables = torch.stack(tables)
    for row, of, tokens in shared:
        tables[row, : tokens // size] = tables[of, : tokens // size]
    kv = torch.randn(sum(needed), case.num_parts, size, case.kv_heads, case.head_dim, generator=generator)
    filled = torch.zeros(sum(needed), size, dtype=torch.bool)
    for row, length in enumerate(lengths):
        at = torch.arange(length)
        filled[tables[row, at // size].long(), at % size] = True
    kv = torch.where(filled[:, None, :, None, None], kv, float("nan")).to(case.dtype)
    new_tokens = [new for new, _ in case.sequences]
    starts = [0, *itertools.accumulate(new_tokens)]
    own = [torch.arange(length - new, length) for new, length in case.sequences]
    slots = [tables[row, at // size].long() * size + at % size for row, at in enumerate(own)]
    batch = AttentionBatch(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        positions=torch.cat(own),
        num_decode=len(contexts),
        max_query_len=max(new_tokens),
        max_context_len=max(lengths),
    )
    return KernelStep(
        case, torch.randn(starts[-1], case.heads, case.head_dim, generator=generator).to(case.dtype), kv, batch
    )


def run(backend, step, *, shares, worth=WORTH):
    """(attention, tokens spared) of a step with or without sharing."""
    native, before = backend.compiled_kernels, backend.cascade_saved_tokens
    native.worth = worth if shares else NEVER
    try:
        return run_attention(backend, step), backend.cascade_saved_tokens - before
    finally:
        native.worth = WORTH


def assert_same(backend, step, worth=WORTH):
    """With and without sharing: the same bits. Returns the tokens spared."""
    (together, spared), (alone, none) = (run(backend, step, shares=shares, worth=worth) for shares in (True, False))
    assert torch.equal(together, alone) and not alone.isnan().any()
    assert none == 0
    return spared


@pytest.fixture(params=["compiled", "compiled_2_threads"])
def backend(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_share_blocks_get_what_they_get_alone_bit_for_bit(backend, kind, dtype):
    assert assert_same(backend, shared_step(dtype=dtype, **KINDS[kind])) > 0


def test_and_that_is_attention_as_defined(backend, reference):
    step = shared_step(window=900, softcap=20.0)
    expected = run_attention(reference, step)
    torch.testing.assert_close(run(backend, step, shares=True)[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [(6, 2), (4, 1)], ids=str)
def test_a_cache_of_fp8_is_shared_with_its_scales(backend, heads):
    step = shared_step(heads=heads[0], kv_heads=heads[1], dtype=BF16)
    cache = fp8.encoded(
        step.kv_layer.nan_to_num(0) * torch.logspace(-2, 2, step.kv_layer.shape[2]).view(1, 1, -1, 1, 1)
    )
    shape = dataclasses.replace(step.case.shape, kv_dtype=torch.float8_e4m3fn)

    def attend(*, shares):
        backend.compiled_kernels.worth = WORTH if shares else NEVER
        plan = backend.plan(step.batch, shape)
        backend.compiled_kernels.worth = WORTH
        assert bool(units_of(plan.schedule)) is shares
        return backend.attention(step.q, cache, plan, scale=0.125, window=None, softcap=None)

    assert torch.equal(attend(shares=True), attend(shares=False))


@pytest.mark.parametrize("tokens", [63, 64, 65, 128, 200, 511, 512, 513, 576, 1023, 1024, 1030])
def test_stretches_may_end_anywhere(backend, tokens):
    step = shared_step((1031, 1060, 1100), ((1, 0, tokens), (2, 0, tokens)), head_dim=16, block_size=1)
    assert assert_same(backend, step, worth=1) == 2 * (tokens // TILE_TOKENS) * TILE_TOKENS


@pytest.mark.parametrize("contexts", [(1, 1), (64, 64), (65, 65, 65), (512, 512), (513, 512, 700)], ids=str)
def test_rows_may_have_all_blocks_in_common(backend, contexts):
    shared = [(row, 0, 10000) for row in range(1, len(contexts))]
    longest = tuple(sorted(contexts, reverse=True))
    assert_same(backend, shared_step(longest, shared, head_dim=16, block_size=1), worth=1)


@pytest.mark.parametrize("num_rows", [2, 17, 40])
def test_any_number_of_rows_is_shared(backend, num_rows):
    """More than a unit's rows; and few enough sequences that contexts are split over threads."""
    shared = [(row, 0, 590) for row in range(1, num_rows)]
    step = shared_step([600 + 3 * row for row in range(num_rows)], shared, head_dim=16, heads=2, kv_heads=1)
    assert assert_same(backend, step) > 0


def test_decode_rows_of_a_mixed_step_share_and_its_chunks_are_as_before(backend):
    step = shared_step(chunks=((37, 90), (9, 9), (60, 1200)))
    assert assert_same(backend, step) > 0


def test_a_schedule_that_claims_what_is_not_so_gives_other_results(backend):
    """The oracle can fail: of two rows made to share although their blocks differ, one gets the other's KV."""
    contexts = (600, 590)
    step, apart = shared_step(contexts, ((1, 0, 512),)), shared_step(contexts, ())
    plan = backend.plan(step.batch, step.case.shape)
    ((read, misled),) = [unit.rows for unit in units_of(plan.schedule)]

    def attend(plan):
        return backend.attention(apart.q, apart.kv_layer, plan, scale=0.125, window=None, softcap=None)

    right = attend(backend.plan(apart.batch, apart.case.shape))
    wrong = attend(dataclasses.replace(plan, batch=apart.batch))
    assert torch.equal(right[read], wrong[read]) and not torch.allclose(right[misled], wrong[misled])


def make_schedule(native, step, *, worth=1, num_threads=1, shape=None):
    batch, shape = step.batch, shape or step.case.shape
    schedule = Schedule(native.lib, batch.num_decode, batch.max_context_len)
    schedule.fill(batch, shape, num_threads, worth)
    return schedule


def equal_tiles(step, part, a, b):
    """Whole tiles from the partition's begin on that two rows have in common, token by token."""
    size, count = step.case.block_size, 0
    for begin in range(part * PART_TOKENS, (part + 1) * PART_TOKENS, TILE_TOKENS):
        if begin + TILE_TOKENS > min(int(step.batch.context_lens[row]) for row in (a, b)):
            break
        blocks = slice(begin // size, (begin + TILE_TOKENS - 1) // size + 1)
        if not torch.equal(step.batch.block_tables[a, blocks], step.batch.block_tables[b, blocks]):
            break
        count += 1
    return count


@pytest.mark.parametrize("block_size", [1, 16, 48, 128])
@pytest.mark.parametrize("seed", range(4))
def test_a_schedule_shares_all_that_is_the_same_and_nothing_else(compiled, block_size, seed):
    """Against a count by hand, over random trees of prefixes."""
    draw = torch.Generator().manual_seed(seed)

    def number(most):
        return int(torch.randint(most, (1,), generator=draw))

    contexts = [1 + number(1300) for _ in range(9)]
    shared = [(row, number(row), number(1300)) for row in range(1, 9)]
    shared = [(row, of, min(tokens, contexts[row], contexts[of])) for row, of, tokens in shared]
    step = shared_step(contexts, shared, head_dim=2, heads=2, kv_heads=2, block_size=block_size)
    units = units_of(make_schedule(compiled.compiled_kernels, step))
    for unit in units:
        assert unit.common[0] == 0 and all(unit.common[1:]) and len(unit.rows) > 1
        for (a, b), tiles in zip(itertools.pairwise(unit.rows), unit.common[1:], strict=True):
            assert tiles == equal_tiles(step, unit.part, a, b)
    assert len({(unit.part, row) for unit in units for row in unit.rows}) == sum(len(unit.rows) for unit in units)
    for part in range(3):
        reads = 0
        for tile in range(8):
            having = [row for row in range(9) if contexts[row] >= part * PART_TOKENS + (tile + 1) * TILE_TOKENS]
            firsts = [a for i, a in enumerate(having) if all(equal_tiles(step, part, a, b) <= tile for b in having[:i])]
            reads += len(having) - len(firsts)
        assert reads == sum(sum(unit.common) for unit in units if unit.part == part)


def test_what_spares_too_little_is_not_shared(compiled):
    """WORTH is a sum over the rows: two need twice as long a prefix as three."""
    for rows, tokens, pays in (
        (2, WORTH - 1, False),
        (2, WORTH, True),
        (3, WORTH // 2, True),
        (3, WORTH // 2 - 1, False),
    ):
        step = shared_step([400] * rows, [(row, 0, tokens) for row in range(1, rows)], block_size=1, head_dim=2)
        schedule = make_schedule(compiled.compiled_kernels, step, worth=WORTH)
        assert bool(units_of(schedule)) is pays
        assert int(schedule.words[_SAVED]) == (WORTH if pays else 0)


def test_without_sharing_there_is_no_schedule(compiled):
    step = shared_step(shared=())
    assert units_of(make_schedule(compiled.compiled_kernels, step)) == []
    _, spared = run(compiled, step, shares=True, worth=1)
    assert spared == 0


def test_units_are_small_enough_to_occupy_every_thread(compiled):
    """48 query rows each, of at most 16 sequences here; smaller where there are more threads than units."""
    step = shared_step([520] * 16, [(row, 0, 512) for row in range(1, 16)], head_dim=2)
    shape = AttentionShape(num_heads=9, num_kv_heads=3, head_dim=2, block_size=16, dtype=torch.float32)
    sizes = [
        [
            len(unit.rows)
            for unit in units_of(make_schedule(compiled.compiled_kernels, step, num_threads=n, shape=shape))
        ]
        for n in (1, 2, 16)
    ]
    assert sizes == [[16], [8, 8], [4, 4, 4, 4]]
