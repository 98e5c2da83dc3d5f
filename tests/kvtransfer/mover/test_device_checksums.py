"""The checksum for pools on a GPU, computed here by torch on the CPU."""

import pytest

torch = pytest.importorskip("torch")

from kvrelay.kvtransfer.mover.verification import weighted_checksums  # noqa: E402


def pool():
    return torch.randint(-(2**62), 2**62, (3, 6, 32), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bit", [0, 17, 62, 63])
def test_a_flipped_bit_changes_its_region_only(bit):
    words = pool()
    before = weighted_checksums(words, [1, 1, 2, 2], [4, 1, 4, 1])
    words[2, 1, 9] ^= torch.tensor(-(2**63) if bit == 63 else 1 << bit)
    assert (weighted_checksums(words, [1, 1, 2, 2], [4, 1, 4, 1]) != before).tolist() == [False, False, False, True]


def test_swapped_words_and_swapped_blocks_show():
    words = pool()
    before = weighted_checksums(words, [0, 0], [0, 1])
    words[0, 0, [3, 4]] = words[0, 0, [4, 3]]
    after = weighted_checksums(words, [0, 0], [0, 1])
    assert after[0] != before[0]
    assert before[0] != before[1]
