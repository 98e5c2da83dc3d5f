"""Pools that differ in block size, order of heads and dtype: every token's K and V arrive at its place, verified.

The oracle addresses one token at a time in either pool, and knows nothing of plans.
"""

import asyncio
import dataclasses

import numpy as np
import pytest
import torch

from kvrelay.errors import ChecksumMismatch, TransferRefused
from kvrelay.kvtransfer.protocol.messages import Reason, reason_of
from kvrelay.prefill.source_link import TargetAddress

TRANSPORTS = ["loopback", "shm", "tcp", "nixl"]
NUM_TOKENS = 100
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def layout(kv, block_size=16, order="NHD", dtype="bfloat16"):
    return dataclasses.replace(
        kv.lib.LAYOUT, block_size=block_size, num_blocks=1024 // block_size, order=order, dtype=dtype
    )


def fingerprint(kv, of):
    return dataclasses.replace(kv.lib.FINGERPRINT, block_size=of.block_size, dtype=of.dtype, order=of.order)


def tokens(memory, blocks, first, stop):
    """[layers, tokens, 2, heads, head_dim] of these tokens of a sequence that lies in `blocks`."""
    of = memory.layout
    inner = (of.block_size, of.num_kv_heads) if of.order == "NHD" else (of.num_kv_heads, of.block_size)
    pool = torch.frombuffer(memory.view, dtype=DTYPES[of.dtype])
    pool = pool.view(of.num_blocks, of.num_layers, 2, *inner, of.head_dim).transpose(0, 1)
    rows = []
    for token in range(first, stop):
        block, slot = blocks[token // of.block_size], token % of.block_size
        rows.append(pool[:, block, :, slot] if of.order == "NHD" else pool[:, block, :, :, slot])
    return torch.stack(rows, dim=1)


def filled(kv, of, seed=1):
    memory = kv.lib.allocate(of)
    pool = torch.frombuffer(memory.view, dtype=DTYPES[of.dtype])
    pool.copy_(torch.randn(len(pool), generator=torch.Generator().manual_seed(seed)).to(pool.dtype))
    return memory


async def unequal(kv, source_layout, target_layout, transport="loopback", *, probes=(None, None), **settings):
    source = await kv.source(
        transport,
        memory=filled(kv, source_layout),
        fingerprint=fingerprint(kv, source_layout),
        probe_buffers=probes[0],
        **settings,
    )
    target = await kv.target(
        transport,
        memory=kv.lib.allocate(target_layout),
        fingerprint=fingerprint(kv, target_layout),
        probe_buffers=probes[1],
        **settings,
    )
    return source, target


def blocks_for(of, num_tokens, seed):
    count = -(-num_tokens // of.block_size)
    return np.random.default_rng(seed).permutation(of.num_blocks)[:count].tolist()


async def carry(kv, source, target, *, first_block=0, chunks=((0, NUM_TOKENS),), request_id="r1"):
    """A whole prompt in chunks of tokens, as a prefill worker announces them; returns both block lists."""
    sent, landed = source.memory.layout, target.memory.layout
    source_blocks, target_blocks = blocks_for(sent, NUM_TOKENS, 3), blocks_for(landed, NUM_TOKENS, 4)
    ticket = target.grant(
        request_id, first_block, target_blocks[first_block:], len(target_blocks), num_tokens=NUM_TOKENS
    )
    transfer = source.open(request_id, ticket)
    for start, stop in chunks:
        first, last = start // sent.block_size, -(-stop // sent.block_size)
        for layer in range(0, sent.num_layers, 2):
            transfer.announce(first, source_blocks[first:last], range(layer, layer + 2))
    await transfer.commit(b"")
    return source_blocks, target_blocks


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("sent", "landed"),
    [((32, "NHD"), (16, "NHD")), ((16, "NHD"), (64, "NHD")), ((16, "NHD"), (16, "HND")), ((32, "HND"), (8, "NHD"))],
    ids=lambda side: f"{side[0]}-{side[1]}",
)
async def test_every_token_arrives_at_its_place(kv, transport, sent, landed):
    source, target = await unequal(kv, layout(kv, *sent), layout(kv, *landed), transport)
    source_blocks, target_blocks = await carry(kv, source, target)
    assert torch.equal(
        tokens(target.memory, target_blocks, 0, NUM_TOKENS), tokens(source.memory, source_blocks, 0, NUM_TOKENS)
    )
    others = [block for block in range(target.memory.layout.num_blocks) if block not in target_blocks]
    assert not kv.lib.regions(target.memory)[:, others].any()


@pytest.mark.parametrize(("sent", "landed", "first_block"), [(32, 16, 3), (16, 32, 1), (64, 8, 5), (8, 64, 1)])
async def test_only_what_the_target_lacks_travels_in_chunks_too(kv, sent, landed, first_block):
    source, target = await unequal(kv, layout(kv, sent), layout(kv, landed))
    source_blocks, target_blocks = await carry(
        kv, source, target, first_block=first_block, chunks=((0, 64), (64, NUM_TOKENS))
    )
    first = first_block * landed
    assert torch.equal(
        tokens(target.memory, target_blocks, first, NUM_TOKENS), tokens(source.memory, source_blocks, first, NUM_TOKENS)
    )
    assert not tokens(target.memory, target_blocks, 0, first).any()
    small = min(sent, landed)
    chunks = -(-NUM_TOKENS // small) - first // small
    assert target.stats().num_bytes == chunks * small * target.memory.layout.block_bytes // landed


@pytest.mark.parametrize("checks", ["full", "sampled"])
async def test_a_flipped_bit_is_found_wherever_its_chunk_lies(kv, checks, monkeypatch):
    monkeypatch.setattr("kvrelay.kvtransfer.mover.verification.SAMPLED_SHARE", 1.0)
    source, target = await unequal(kv, layout(kv, 32, "HND"), layout(kv, 16, "NHD"), checks=checks)
    seen = []

    def flip(memory, offset, size):
        seen.append(offset)
        if len(seen) == 500:
            memory.view[offset + size // 2] ^= 1

    kv.tamper(flip)
    with pytest.raises(ChecksumMismatch):
        await carry(kv, source, target)


# ---- dtypes


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("sent", "landed"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")]
)
async def test_unlike_dtypes_are_cast_after_they_were_verified(kv, transport, sent, landed):
    source, target = await unequal(
        kv, layout(kv, 32, "NHD", sent), layout(kv, 16, "HND", landed), transport, convert_dtype=True
    )
    source_blocks, target_blocks = await carry(kv, source, target, first_block=2)
    expected = tokens(source.memory, source_blocks, 32, NUM_TOKENS).to(DTYPES[landed])
    assert torch.equal(tokens(target.memory, target_blocks, 32, NUM_TOKENS), expected)


async def test_a_flipped_bit_is_found_before_the_cast(kv):
    source, target = await unequal(kv, layout(kv, dtype="float32"), layout(kv), convert_dtype=True)

    def flip(memory, offset, size):
        memory.view[offset] ^= 1  # the lowest bit of a float32: after the cast to bfloat16 nobody could tell

    kv.tamper(flip)
    with pytest.raises(ChecksumMismatch):
        await carry(kv, source, target)
    await target.event("released", "r1")


async def test_blocks_are_not_released_while_a_cast_still_writes_them(kv, monkeypatch):
    source, target = await unequal(kv, layout(kv, dtype="float32"), layout(kv), convert_dtype=True)
    loop, casts = asyncio.get_running_loop(), []

    def held(executor, work, *args):
        if getattr(work, "__name__", "") != "settle":
            return type(loop).run_in_executor(loop, executor, work, *args)
        casts.append(loop.create_future())
        return casts[-1]

    monkeypatch.setattr(loop, "run_in_executor", held)
    commit = asyncio.create_task(carry(kv, source, target))
    while not casts:
        await asyncio.sleep(0)
    target.revoke("r1")
    with pytest.raises(TransferRefused):
        await commit
    assert target.stats().quarantined_blocks > 0 and "released" not in target.kinds("r1")
    casts[0].set_result(None)
    await target.event("released", "r1")


async def test_unlike_dtypes_are_refused_unless_asked_for(kv):
    source, target = await unequal(kv, layout(kv, dtype="float32"), layout(kv))
    with pytest.raises(TransferRefused, match=r"dtype.*transfer\.convert_dtype") as refused:
        await carry(kv, source, target)
    assert reason_of(refused.value) is Reason.FINGERPRINT


async def test_a_probe_measures_unlike_pools_too(kv):
    probes = kv.lib.FreeBlocks(1, 2), kv.lib.FreeBlocks(20, 21, 22, 23)
    for sent, landed in (((32,), (16, "HND")), ((16, "NHD", "float32"), (32,))):
        source, target = await unequal(
            kv, layout(kv, *sent), layout(kv, *landed), "tcp", probes=probes, convert_dtype=True
        )
        report = await source.pair(TargetAddress("decode-0", "d1", "127.0.0.1", target.port))
        assert report.ok and report.paths[0].bytes_per_s > 0 and not report.paths[0].problem
        assert source.probe_buffers.taken == target.probe_buffers.taken == []
        await carry(kv, source, target)
