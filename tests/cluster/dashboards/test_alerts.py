"""Alert rules: promtool reads them; each fires on series of alert_cases.yml, and is silent on a sound cluster's."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from kvrelay.cluster.dashboards.files import RULES, named, rules
from tests.cluster.dashboards.prometheus import need

CASES = (Path(__file__).parent / "alert_cases.yml").read_text()


def promtool(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    need("promtool")
    return subprocess.run(["promtool", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60)


def without_annotations(text):
    """promtool compares their text, too, which is for people."""
    parsed = yaml.safe_load(text)
    for group in parsed["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]
    return yaml.safe_dump(parsed)


def ran(folder, rules_text, source="ingress"):
    (folder / RULES).write_text(without_annotations(rules_text))
    (folder / "cases.yml").write_text(named(CASES, source).replace("ray_kvrelay-", "kvrelay-"))
    return promtool("test", "rules", "cases.yml", cwd=folder)


@pytest.mark.parametrize("source", ["ingress", "ray"])
def test_promtool_reads_the_rules(tmp_path, source):
    (tmp_path / RULES).write_text(rules(source))
    done = promtool("check", "rules", RULES, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("source", ["ingress", "ray"])
def test_each_alert_fires_when_it_should_and_not_otherwise(tmp_path, source):
    done = ran(tmp_path, rules(source), source)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not():
    cases = [case for test in yaml.safe_load(CASES)["tests"] for case in test["alert_rule_test"]]
    alerts = {rule["alert"] for group in yaml.safe_load(rules("ray"))["groups"] for rule in group["rules"]}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == alerts
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == alerts


def test_a_rule_that_ignores_several_ingresses_or_never_fires_is_found(tmp_path):
    broken = rules("ingress").replace('role=~"decode|both"', 'role="decoder"')
    assert ran(tmp_path, broken).returncode != 0
    broken = re.sub(r"> 20\b", "> 2000", rules("ingress"))
    assert ran(tmp_path, broken).returncode != 0
