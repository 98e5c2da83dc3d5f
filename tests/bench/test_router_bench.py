"""bench/router/decision.py: what it measures is there, and two indexes would be given the same."""

import time

import pytest

from bench.router import decision as bench
from bench.router.decision import MAX_TOTAL, contents
from tests.router.index.index_cases import match

pytestmark = pytest.mark.alone


def test_contents_are_the_same_for_the_same_arguments_and_bounded():
    one, again = (contents(8, 64, shared=True, seed=3) for _ in range(2))
    assert one == again != contents(8, 64, shared=True, seed=4)
    assert len({tuple(prompt[:8]) for prompt in one.prompts}) == 1
    assert all(chains[0] == one.prompts[0][:8] for chains in one.held)
    assert (
        sum(len(chain) for chains in contents(1000, 8, shared=False, seed=0).held for chain in chains) < 1.1 * MAX_TOTAL
    )


@pytest.mark.parametrize("shared", [False, True])
def test_the_router_is_built_with_them(shared):
    made = contents(4, 160, shared=shared, seed=0)
    router = bench.build(made)
    for prompt in made.prompts:
        depths = match(router.index, bench.hashes(prompt))
        assert max(depths.values()) == 80
        assert not shared or (len(depths), min(depths.values())) == (4, 20)


def test_all_news_is_taken():
    router, seqs = bench.build(contents(4, 16, shared=False, seed=0)), [0] * 4
    before = len(router.index)
    for _ in range(2):
        assert bench.event_rate(router, seqs, 10, 3, time.perf_counter_ns) > 0
        assert len(router.index) == before
    assert seqs == [12, 12, 8, 8]


def test_a_line_has_every_figure(capsys):
    bench.cell(4, 1600, False, "random", 40)
    line, *news = capsys.readouterr().out.splitlines()
    assert len(line.split()) == 4 + 3 + 3 + 2 and len(news) == 2
