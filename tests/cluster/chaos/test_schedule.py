"""A seed gives each part the same faults; every round has every kind."""

from itertools import islice

import pytest

from kvrelay.cluster.chaos.faults import FAULTS
from kvrelay.cluster.chaos.hosts.faults import HOST_FAULTS
from kvrelay.cluster.chaos.schedule import LONGEST_S, SHORTEST_S, planned_faults
from kvrelay.cluster.chaos.session import kinds_of
from kvrelay.errors import ConfigError

pytestmark = pytest.mark.pure

KINDS = ("kill", "stop", "slow")


def first(count, part="decode", seed=7):
    return list(islice(planned_faults(part, KINDS, mean_gap_s=4.0, seed=seed), count))


def test_a_seed_gives_the_same_faults_again():
    assert first(30) == first(30)


def test_another_seed_or_part_gives_others():
    assert first(30) != first(30, seed=8)
    assert first(30) != first(30, part="prefill")


def test_every_round_has_every_kind_once():
    kinds = [one.kind for one in first(30)]
    assert all(sorted(kinds[at : at + 3]) == sorted(KINDS) for at in range(0, 30, 3))
    assert len({tuple(kinds[at : at + 3]) for at in range(0, 30, 3)}) > 1  # in another order


def test_gaps_have_the_wanted_mean_and_holds_their_bounds():
    found = first(3000)
    assert sum(one.gap_s for one in found) / len(found) == pytest.approx(4.0, rel=0.05)
    assert all(SHORTEST_S <= one.hold_s <= LONGEST_S and 0 <= one.choice < 1 for one in found)


def test_all_kinds_are_those_that_the_number_of_hosts_allows():
    assert kinds_of("all", 1) == tuple(FAULTS)
    assert kinds_of("all", 2) == (*FAULTS, *HOST_FAULTS)
    assert kinds_of("cut-link,kill-decode", 2) == ("cut-link", "kill-decode")
    with pytest.raises(ConfigError, match=r"unknown cut-link; .*--hosts 2"):
        kinds_of("cut-link", 1)
