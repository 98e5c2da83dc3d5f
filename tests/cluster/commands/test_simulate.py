"""`kvrelay simulate`: what it reads, prints and writes, and how it says what is wrong."""

import json
import os
import subprocess
import sys

import pytest

from kvrelay.cluster.commands.settings_flags import with_pairs
from kvrelay.cluster.commands.simulate import command
from kvrelay.errors import ConfigError
from tests.cluster.simulator.simulator_cases import profile

pytestmark = pytest.mark.processes


@pytest.fixture
def files(tmp_path):
    """A profile and a trace of sixty requests in Mooncake's format, whose blocks are not the profile's size."""
    (tmp_path / "profile.json").write_text(profile(num_blocks=4096).text())
    rows = [
        {
            "timestamp": 100 * index,
            "input_length": 1200,
            "output_length": 20,
            "hash_ids": [index % 7 * 10, index % 7 * 10 + 1, 1000 + index],
        }
        for index in range(60)
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def simulate(files, **flags):
    given = dict.fromkeys(("scenario", "ingress", "limit", "seed", "ttft_s", "tpot_s", "plot"))
    given |= {"prefill": 2, "decode": 2, "policy": None, "rate": None, "set_": None, "json_file": files / "out.json"}
    known = command.__annotations__
    given = {name: value for name, value in (given | flags).items() if name in known}
    command(str(files / "trace.jsonl"), profile=files / "profile.json", **given)
    return json.loads((files / "out.json").read_text())


def test_one_run_for_each_policy_and_rate(files, capsys):
    found = simulate(files, policy=["round_robin", "joint"], rate=[5.0, 20.0])
    assert [one["scenario"]["settings"]["router"]["policy"] for one in found] == [
        "round_robin",
        "round_robin",
        "joint",
        "joint",
    ]
    assert [round(one["offered_per_s"]) for one in found] == [5, 20, 5, 20]
    assert all(one["outcomes"] == {"done": 60} for one in found)
    printed = capsys.readouterr().out
    assert "round_robin 5/s" in printed and "joint 20/s" in printed and "TTFT" in printed


def test_each_of_several_seeds_is_a_run_like_one_with_that_seed(files):
    found = simulate(files, rate=[20.0], seed=3, seeds=2)
    assert [one["scenario"]["seed"] for one in found] == [3, 4]
    assert found == [one for seed in (3, 4) for one in simulate(files, rate=[20.0], seed=seed)]


def test_a_scenario_s_fields_hold_unless_a_flag_says_otherwise(files):
    (files / "scenario.yaml").write_text(
        "prefill: 3\ndecode: 1\nsettings:\n  router: {max_inflight: 7, local_prefill_tokens: 1}\n"
    )
    own = ["router.local_prefill_tokens=3"]
    [found] = simulate(files, scenario=files / "scenario.yaml", prefill=None, decode=2, set_=own)
    assert (found["workers"]["prefill"]["started"], found["workers"]["decode"]["started"]) == (3, 2)
    assert found["scenario"]["settings"]["router"] == {"max_inflight": 7, "local_prefill_tokens": 3}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"set_": ["router.polcy=random"]}, "policy"),
        ({"set_": ["router"]}, "section.key=value"),
        ({"policy": ["ours"]}, "there is no ours"),
        ({"prefill": -1}, "prefill"),
        ({"rate": [0.0]}, "rate"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(files, flags, said):
    with pytest.raises(ConfigError, match=said) as caught:
        simulate(files, **flags)
    assert "\n" not in str(caught.value)


def test_a_scenario_file_that_is_none_is_refused(files):
    for text in ("- a list\n", "prefill: [\n", "workers: 3\n"):
        (files / "scenario.yaml").write_text(text)
        with pytest.raises(ConfigError, match="scenario"):
            simulate(files, scenario=files / "scenario.yaml")


def test_pairs_win_over_a_scenario_s_settings_and_leave_them_as_they_are():
    before = {"router": {"policy": "round_robin"}}
    assert with_pairs(before, ["router.policy=joint", "engine.block_size=32"]) == {
        "router": {"policy": "joint"},
        "engine": {"block_size": 32},
    }
    assert before == {"router": {"policy": "round_robin"}}
    assert with_pairs({}, []) == {}


def test_figures_do_not_depend_on_how_this_process_orders_its_sets(files):
    """The same to the bit in processes with unlike hash seeds, with all that draws, crashes, fetches and forgets."""
    (files / "scenario.yaml").write_text(
        "prefill: 2\ndecode: 2\ningress: 2\nnoise: 0.1\ndetect_s: 0.1\n"
        "faults: [{kind: crash, at_s: 2, target: d1, for_s: 1}, {kind: crash, at_s: 4, target: p0, for_s: 1}]\n"
        "settings: {cache: {host_memory: 4MiB, remote: cluster}, slo: {ttft_s: 1.0}, router: {policy: power_of_two}}\n"
    )
    code = (
        "import sys; from kvrelay.cluster.commands.cli import main; "
        f"sys.argv = ['kvrelay', 'simulate', {str(files / 'trace.jsonl')!r}, "
        f"'--profile', {str(files / 'profile.json')!r}, "
        f"'--scenario', {str(files / 'scenario.yaml')!r}, '--rate', '20', '--json', sys.argv[1]]; main()"
    )
    found = []
    for seed in ("1", "2"):
        out = files / f"{seed}.json"
        subprocess.run(
            [sys.executable, "-c", code, str(out)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            timeout=120,
            check=True,
            capture_output=True,
        )
        found.append(out.read_bytes())
    assert found[0] == found[1]
