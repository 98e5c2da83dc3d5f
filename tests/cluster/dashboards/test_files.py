"""What ships is what the panels say, and lands where Ray's Grafana and Prometheus read it."""

import json
import re
from pathlib import Path

import pytest
import yaml

from kvrelay.cluster.dashboards.files import (
    DATA,
    RAY_SERVE_PAGE,
    RULES,
    dashboards,
    named,
    provision,
    ray_folders,
    rules,
    with_panels,
    write_folder,
)
from kvrelay.cluster.dashboards.panels import DASHBOARDS, SERVE_PAGE
from kvrelay.cluster.errors import ClusterError

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[3]
SUFFIXES = re.compile(r"_(bucket|sum|count)$")


def metrics_of_the_code():
    return set(re.findall(r'"(kvrelay_\w+)"', (ROOT / "serve" / "telemetry" / "metrics.py").read_text()))


def metrics_in(text):
    return {SUFFIXES.sub("", name) for name in re.findall(r"\bkvrelay_\w+", text)}


def test_the_files_that_ship_are_what_the_panels_build():
    pytest.importorskip("grafana_foundation_sdk")
    from kvrelay.cluster.dashboards.build import texts

    remedy = "run python -m kvrelay.cluster.dashboards.build"
    assert {name: text == (DATA / name).read_text() for name, text in texts().items()} == dict.fromkeys(
        texts(), True
    ), remedy


def test_panels_and_alerts_name_metrics_that_there_are():
    shown = {
        query for one in DASHBOARDS for row in one.rows.values() for panel in row for query in panel.queries.values()
    }
    assert metrics_in(" ".join(shown)) <= metrics_of_the_code()
    assert metrics_in((DATA / RULES).read_text()) <= metrics_of_the_code()


def test_every_panel_has_title_unit_and_description_and_every_id_is_used_once():
    for text in dashboards("ingress").values():
        page = json.loads(text)
        panels = [panel for panel in page["panels"] if panel["type"] != "row"]
        assert all(panel["title"] and panel["description"] and panel["targets"] for panel in panels)
        assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels)
        ids = [panel["id"] for panel in page["panels"]]
        assert len(ids) == len(set(ids))
        variables = [variable["name"] for variable in page["templating"]["list"]]
        assert variables == ["datasource", "SessionName", "Cluster", "role", "worker", "tenant"]


def test_ray_puts_its_prefix_before_every_name_and_nothing_else():
    text = "rate(kvrelay_requests_total[5m]) kvrelay-overview KvrelayPoolFull ray_kvrelay_workers"
    assert (
        named(text, "ray")
        == "rate(ray_kvrelay_requests_total[5m]) kvrelay-overview KvrelayPoolFull ray_kvrelay_workers"
    )
    assert named(text, "ingress") == text
    assert "(kvrelay_" not in rules("ray") and not re.search(r"[( ]kvrelay_\w+\{", "".join(dashboards("ray").values()))


def ray_session(folder):
    """What Ray's head writes, as far as we read it."""
    shown, scraped = folder / "metrics" / "grafana" / "dashboards", folder / "metrics" / "prometheus"
    shown.mkdir(parents=True)
    scraped.mkdir(parents=True)
    of_rays = [{"id": number, "title": f"Ray's {number}", "gridPos": {"x": number}} for number in (2, 7, 8, 15)]
    row = {"id": 1, "type": "row", "panels": [{"id": 20, "title": "Ray's 20", "gridPos": {}}]}
    (shown / RAY_SERVE_PAGE).write_text(json.dumps({"uid": "rayServeDashboard", "panels": [row, *of_rays]}))
    (scraped / "prometheus.yml").write_text("scrape_configs:\n- job_name: ray\n")
    return folder


def test_beside_rays_own_nothing_of_rays_is_lost_but_three_panels(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_METRICS_OUTPUT_ROOT", raising=False)
    monkeypatch.delenv("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", raising=False)
    folders = ray_folders(ray_session(tmp_path))
    before = (folders.dashboards / RAY_SERVE_PAGE).read_text()
    provision(folders, serve_page=False)
    assert (folders.dashboards / RAY_SERVE_PAGE).read_text() == before
    for _ in range(2):  # a second time changes nothing
        provision(folders)
        page = json.loads((folders.dashboards / RAY_SERVE_PAGE).read_text())
        titles = {panel["id"]: panel.get("title") for panel in page["panels"]}
        assert titles == {1: None, 2: "Ray's 2"} | {number: panel.title for number, panel in SERVE_PAGE.items()}
        assert page["panels"][2]["gridPos"] == {"x": 7} and "ray_kvrelay_" in json.dumps(page)
        settings = yaml.safe_load((folders.prometheus / "prometheus.yml").read_text())
        assert settings == {"scrape_configs": [{"job_name": "ray"}], "rule_files": [RULES]}
    uids = {json.loads(path.read_text())["uid"] for path in folders.dashboards.glob("*.json")}
    assert uids == {one.uid for one in DASHBOARDS} | {"rayServeDashboard"}
    assert (folders.prometheus / RULES).read_text() == rules("ray")
    assert not list(tmp_path.rglob("*.partial"))


def test_where_ray_has_written_nothing_the_reason_is_named(tmp_path):
    with pytest.raises(ClusterError, match="run this on the head node"):
        ray_folders(tmp_path)


def test_a_panel_within_a_collapsed_row_is_replaced_too():
    page = {"panels": [{"id": 1, "panels": [{"id": 7, "gridPos": {"y": 3}}]}]}
    assert with_panels(page, [{"id": 7, "title": "ours"}, {"id": 9}])["panels"] == [
        {"id": 1, "panels": [{"id": 7, "title": "ours", "gridPos": {"y": 3}}]}
    ]


@pytest.mark.parametrize(("source", "job"), [("ray", "file_sd_configs"), ("ingress", "static_configs")])
def test_a_folder_of_the_users_has_everything(tmp_path, source, job):
    session = Path("/tmp/ray/session_latest")
    written = write_folder(tmp_path, source, target="host:8000", session=session, prometheus="http://p:9090")
    settings = yaml.safe_load((tmp_path / "prometheus.yml").read_text())
    assert job in settings["scrape_configs"][0] and (tmp_path / settings["rule_files"][0]).is_file()
    (provider,) = yaml.safe_load((tmp_path / "grafana/provisioning/dashboards/kvrelay.yml").read_text())["providers"]
    assert len(list(Path(provider["options"]["path"]).glob("*.json"))) == len(DASHBOARDS)
    assert all(path.is_file() for path in written)
