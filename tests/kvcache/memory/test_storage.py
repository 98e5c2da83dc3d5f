"""The pool's memory: where a key lies in it is what its layout says, in either order."""

import dataclasses

import numpy as np
import pytest
import torch

from kvrelay.kvcache.memory.storage import KvStorage
from kvrelay.types import BlockId, KvLayout

LAYOUT = KvLayout(num_layers=2, num_blocks=3, block_size=4, num_kv_heads=2, head_dim=3, dtype="float32")
CPU = torch.device("cpu")


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_a_token_lies_where_the_order_says(order):
    storage = KvStorage(dataclasses.replace(LAYOUT, order=order), CPU)
    assert [layer.shape for layer in storage.layers] == [(3, 2, 4, 2, 3)] * 2
    storage.layers[1][2, 1, 3, 0] = 7.0  # the last layer's last block: V, last token, first head
    shape = (3, 2, 2, 4, 2, 3) if order == "NHD" else (3, 2, 2, 2, 4, 3)
    memory = np.frombuffer(storage.memory.view, dtype=np.float32).reshape(shape)
    row = memory[2, 1, 1, 3, 0] if order == "NHD" else memory[2, 1, 1, 0, 3]
    assert row.tolist() == [7.0] * 3 and np.count_nonzero(memory) == 3
    assert storage.memory.layout.order == order


def test_both_orders_are_of_one_size_and_a_layers_blocks_lie_a_block_apart():
    plain, heads_first = (KvStorage(dataclasses.replace(LAYOUT, order=order), CPU) for order in ("NHD", "HND"))
    assert len(plain.memory.view) == len(heads_first.memory.view) == LAYOUT.num_bytes
    assert plain.layers[0][0].is_contiguous() and not heads_first.layers[0][0].is_contiguous()
    assert all(4 * layer.stride(0) == LAYOUT.block_bytes for layer in (*plain.layers, *heads_first.layers))


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_copies_are_whole_blocks_made_in_order(order):
    layout = KvLayout(3, 5, 4, 2, 8, "bfloat16", order=order)
    storage = KvStorage(layout, torch.device("cpu"))
    storage.fill_with_noise([BlockId(i) for i in range(5)])
    before = storage.tensor.clone()
    storage.copy_blocks([(BlockId(0), BlockId(1)), (BlockId(1), BlockId(2)), (BlockId(4), BlockId(0))])
    for block, content in enumerate((4, 0, 0, 3, 4)):
        assert torch.equal(storage.tensor[block], before[content])


def test_any_changed_bit_changes_the_sum_of_its_block_alone():
    storage = KvStorage(LAYOUT, CPU)
    storage.fill_with_noise([BlockId(i) for i in range(3)])
    view, before = storage.memory.view, storage.sums([0, 1, 2])
    for bit in range(0, 8 * LAYOUT.block_bytes, 37):
        at = LAYOUT.block_bytes + bit // 8
        view[at] ^= 1 << bit % 8
        after = storage.sums([2, 1, 0])
        assert after[1] != before[1] and (after[0], after[2]) == (before[2], before[0])
        view[at] ^= 1 << bit % 8
    assert storage.sums([0, 1, 2]) == before
