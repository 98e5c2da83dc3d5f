"""What each transport is asked to copy for a 4k prompt of a Llama-8B (bfloat16, blocks of 16 tokens): 512 MiB.

    python -m bench.transfer.descriptors

Announced in four groups of layers, as a prompt is while it is computed, or whole, as a cached prefix is. "layers
first": by arithmetic, a pool of [layers, blocks, ...], where a run ends with a layer's part of a block.
"""

import numpy as np

from kvrelay.kvtransfer.mover.copy_plan import TURN_BYTES, CopyList, cut, pair
from kvrelay.kvtransfer.transports.nixl.reader import pieces_of
from kvrelay.kvtransfer.transports.tcp.protocol import PIECE_BYTES, cut_into_pieces
from kvrelay.types import KvLayout

LAYOUT, BLOCKS = KvLayout(32, 320, 16, 8, 128, "bfloat16"), 256


def reads(sources: np.ndarray, targets: np.ndarray, num_groups: int) -> list[CopyList]:
    both, group, order = pair(LAYOUT, LAYOUT), LAYOUT.num_layers // num_groups, np.argsort(sources)
    begins, lands = both.source.chunks(sources[order]), both.target.chunks(targets[order])
    groups = (range(first, first + group) for first in range(0, LAYOUT.num_layers, group))
    units = (unit for layers in groups for unit in cut(BLOCKS, layers, both.chunk_bytes, TURN_BYTES))
    return [both.copies(begins[some], lands[some], layers) for some, layers in units]


def main() -> None:
    draw, size, regions = np.random.default_rng(0), LAYOUT.num_bytes, BLOCKS * LAYOUT.num_layers
    lists = {"contiguous": [np.arange(BLOCKS)] * 2, "scattered": [draw.permutation(320)[:BLOCKS] for _ in range(2)]}
    print(f"{'blocks':>10} {'groups':>6} {'transport':>9} {'layers first':>20} {'blocks first':>20}")
    for (name, blocks), groups in [(one, groups) for one in lists.items() for groups in (4, 1)]:
        copies, long = reads(*blocks, groups), BLOCKS * LAYOUT.block_bytes
        runs = long // TURN_BYTES if name == "contiguous" else regions
        found = {"shm, IPC": (runs, sum(len(each.num_bytes) for each in copies))}
        pieces = [piece for each in copies for piece in cut_into_pieces(each, size, size)]
        found["tcp"] = max(runs, long // PIECE_BYTES), sum(len(piece.sizes) for piece in pieces)
        found["nixl"] = regions, sum(len(piece.num_bytes) for each in copies for piece, _ in pieces_of(each))
        for transport, (before, after) in found.items():
            sizes = [f"{count:,} x {long // count >> 10:,} KiB" for count in (before, after)]
            print(f"{name:>10} {groups:>6} {transport:>9} {sizes[0]:>20} {sizes[1]:>20}")


if __name__ == "__main__":
    main()
