"""Pictures of simulations: what is read, which load is shown, and that every panel gets its lines."""

import pytest

from kvrelay.cluster.simulator import results
from kvrelay.cluster.simulator.results import Run, check_picture, held_load, nearest, over_load, plot, runs_of
from kvrelay.errors import ConfigError

pytestmark = pytest.mark.pure


def summary(load, policy="joint", kept=1.0, **more):
    return {
        "scenario": {"settings": {"router": {"policy": policy}}},
        "offered_per_s": load,
        "goodput_per_s": load * kept,
        "kept_share": kept,
        "hit_ratio": 0.4,
        "ttft_s": {"p99": 2.0},
        "workers": {"prefill": {"utilisation": 0.5}},
        **more,
    }


DETAILS = {
    "ttft_percentiles_s": [0.1 * index + 0.01 for index in range(101)],
    "tpot_percentiles_s": [0.001 * index for index in range(101)],
}


def test_a_run_is_named_by_its_policy():
    (named,) = runs_of([summary(3.0, "dynamo")])
    assert (named.name, named.load) == ("dynamo", 3.0)
    (unnamed,) = runs_of([summary(1.0) | {"scenario": {}}])
    assert unnamed.name == "default policy"


def test_the_load_shown_is_the_highest_that_anyone_holds():
    runs = [
        Run("a", 2.0, summary(2.0)), Run("a", 4.0, summary(4.0, kept=0.89)), Run("b", 3.0, summary(3.0, kept=0.9)),
    ]  # fmt: skip
    assert held_load(runs) == 3.0
    assert held_load(runs[1:2]) == 4.0
    assert {name: run.load for name, run in nearest(runs, 3.1).items()} == {"a": 4.0, "b": 3.0}


def test_seeds_at_a_load_are_averaged_and_what_has_no_figure_is_left_out():
    runs = [
        Run("a", 2.0, summary(2.0)),
        Run("a", 2.001, summary(2.0, kept=0.5)),
        Run("a", 1.0, summary(1.0, ttft_s={})),
    ]
    assert over_load(runs, lambda one: one["goodput_per_s"]) == {"a": [(1.0, 1.0), (2.0, 1.5)]}
    assert over_load(runs, lambda one: one["ttft_s"].get("p99")) == {"a": [(2.0, 2.0)]}


@pytest.mark.slow
def test_every_panel_has_a_line_for_each_contender(tmp_path, monkeypatch):
    drawn = {}

    def noting(plain):
        def draw(axes, title, *rest):
            plain(axes, title, *rest)
            drawn[title.split(",")[0]] = sum(len(line.get_xdata()) > 1 for line in axes.lines)

        return draw

    for name in ("_draw_over_load", "_draw_shares"):
        monkeypatch.setattr(results, name, noting(getattr(results, name)))
    runs = [Run(name, load, summary(load, **DETAILS)) for name in ("a", "b") for load in (1.0, 2.0)]
    path = tmp_path / "picture.png"
    plot(runs, path, title="test")
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert drawn == {
        "goodput": 2,
        "prompt tokens found in caches": 2,
        "TTFT p99": 2,
        "TTFT": 3,
        "TPOT": 3,
        "busy prefill workers": 2,
    }


@pytest.mark.slow
def test_what_was_not_written_leaves_its_panel_empty(tmp_path):
    plot([Run("a", 1.0, summary(1.0, ttft_s={}))], tmp_path / "picture.svg", title="test")
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def test_a_picture_that_cannot_be_is_refused_before_the_work(tmp_path):
    with pytest.raises(ConfigError, match="unknown picture format"):
        check_picture(tmp_path / "picture.exe")
    with pytest.raises(ConfigError, match="no such folder"):
        check_picture(tmp_path / "nowhere" / "picture.png")
