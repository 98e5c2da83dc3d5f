"""Transfers under kills, freezes, aborts and bad tickets: no block is wrong, none is lost; and such faults would
show.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.kvtransfer.chaos.content import LAYOUT, content, digests
from tests.kvtransfer.chaos.end import Blocks

pytestmark = pytest.mark.processes


ROOT = Path(__file__).resolve().parents[3]


def run(tmp_path, *flags):
    """(exit code, figures)."""
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.kvtransfer.chaos.chaos", "--json", str(out), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text())


@pytest.mark.slow
def test_no_block_is_wrong_or_lost_whatever_happens_to_transfers_and_processes(tmp_path):
    code, figures = run(tmp_path, "-n", "200", "--fault-every", "20")
    assert (code, figures["problems"]) == (0, [])
    assert (figures["leaked_blocks"], figures["wrong_blocks"], figures["late_writes"]) == (0, 0, 0)
    assert sum(figures["outcomes"].values()) == 200
    assert figures["faults"] and {"shm", "tcp"} <= figures["transports"].keys()


@pytest.mark.slow
def test_bits_flipped_where_nobody_checks_are_found_by_the_comparison(tmp_path):
    code, figures = run(tmp_path, "-n", "200", "--corrupt")
    assert code == 1
    assert figures["wrong_blocks"] > 0
    assert not [problem for problem in figures["problems"] if "had to be refused" in problem]  # every flip hit


@pytest.mark.slow
def test_a_forgotten_release_is_found_at_the_end(tmp_path):
    code, figures = run(tmp_path, "-n", "60", "--leak", "--fault-every", "1000")
    assert code == 1
    assert figures["leaked_blocks"] > 0


def test_a_write_into_blocks_that_nobody_holds_is_found():
    blocks = Blocks()
    held = blocks.take(3)
    blocks.give_back(held)
    blocks.regions[2, held[1], 100] ^= 1
    every = blocks.take(blocks.held.num_blocks)
    assert blocks.num_late_writes == 1
    blocks.give_back(every)
    blocks.take(3)
    assert blocks.num_late_writes == 1


def test_content_tells_epochs_blocks_generations_and_layers_apart():
    regions = [
        region.tobytes()
        for epoch in ("source-0#1", "source-0#2")
        for generation in (1, 2)
        for region in content(epoch, [4, 5], [generation, generation]).reshape(-1, LAYOUT.region_bytes)
    ]
    assert len(set(regions)) == 2 * 2 * 2 * LAYOUT.num_layers


def test_digests_tell_swapped_layers_of_one_block():
    whole = content("source-0#1", [4], [1])
    assert digests(whole) != digests(np.flip(whole, axis=0))
