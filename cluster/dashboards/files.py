"""Writes dashboards, alert rules and Prometheus settings where Grafana and Prometheus read them.

Either into the folder in which the head node's Ray provisions its own, or into a folder of the user's. The texts in
data/ have the names of /metrics.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from kvrelay.cluster.errors import ClusterError

DATA = Path(__file__).with_name("data")
SERVE_PANELS, RAY_SERVE_PAGE = "serve-page-panels.json", "serve_grafana_dashboard.json"
RULES = "kvrelay-alerts.yml"
SESSION = "/tmp/ray/session_latest"
SCRAPE_S = 10
Source = Literal["ray", "ingress"]
"""What Prometheus scrapes: Ray's agent on every node, or the /metrics of one ingress."""
_NAME = re.compile(r"\bkvrelay_(?=[a-z])")


def named(text: str, source: Source) -> str:
    """The text with metrics named as the source names them: Ray puts `ray_` before each."""
    return _NAME.sub("ray_kvrelay_", text) if source == "ray" else text


def dashboards(source: Source) -> dict[str, str]:
    """File name -> Grafana's JSON."""
    return {path.name: named(path.read_text(), source) for path in sorted(DATA.glob("kvrelay-*.json"))}


def rules(source: Source) -> str:
    """Prometheus's alert rules."""
    return named((DATA / RULES).read_text(), source)


# ---- beside Ray's own


@dataclass(frozen=True, slots=True)
class RayFolders:
    """Where the Ray of one head node provisions Grafana and Prometheus."""

    dashboards: Path
    prometheus: Path


def ray_folders(session: Path) -> RayFolders:
    """As Ray chooses them. Raises ClusterError where the head's dashboard has written none."""
    root = Path(os.environ.get("RAY_METRICS_OUTPUT_ROOT") or session / "metrics")
    own = os.environ.get("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR")
    folders = RayFolders(Path(own) if own else root / "grafana" / "dashboards", root / "prometheus")
    if not (folders.dashboards / RAY_SERVE_PAGE).is_file() or not (folders.prometheus / "prometheus.yml").is_file():
        raise ClusterError(
            f"{root} holds no Grafana files of Ray: run this on the head node while its dashboard runs, "
            "or name the session's folder with --session"
        )
    return folders


def provision(folders: RayFolders, *, serve_page: bool = True) -> list[Path]:
    """Add our dashboards and alerts to Ray's; `serve_page`: and three panels to the Serve page of Ray's dashboard.

    Returns the files written. Ray writes its own anew when the head starts; then this is due again.
    """
    pages, settings = dashboards("ray"), folders.prometheus / "prometheus.yml"
    if serve_page:
        panels = json.loads(named((DATA / SERVE_PANELS).read_text(), "ray"))
        of_ray = json.loads((folders.dashboards / RAY_SERVE_PAGE).read_text())
        pages[RAY_SERVE_PAGE] = json.dumps(with_panels(of_ray, panels), indent=4)
    known = yaml.safe_load(settings.read_text())
    known["rule_files"] = sorted({*(known.get("rule_files") or []), RULES})
    scraped = {RULES: rules("ray"), settings.name: _yaml(known)}
    return _write(folders.dashboards, pages) + _write(folders.prometheus, scraped)


def with_panels(page: dict[str, Any], panels: list[dict[str, Any]]) -> dict[str, Any]:
    """A dashboard in which these panels replace those of the same id, at their places; others of ours are left out."""
    ours = {panel["id"]: panel for panel in panels}

    def replaced(panel: dict[str, Any]) -> dict[str, Any]:
        if panel.get("panels"):
            return panel | {"panels": [replaced(inner) for inner in panel["panels"]]}
        return {**ours[panel["id"]], "gridPos": panel["gridPos"]} if panel.get("id") in ours else panel

    return page | {"panels": [replaced(panel) for panel in page["panels"]]}


# ---- in a folder of the user's


def write_folder(folder: Path, source: Source, *, target: str, session: Path, prometheus: str) -> list[Path]:
    """Everything for a Prometheus and a Grafana of the user's.

    Args:
        target: host:port of the ingress to scrape, for the source "ingress".
        session: the head's session folder, whose service discovery file lists the nodes, for the source "ray".
        prometheus: the URL under which Grafana reaches Prometheus.
    """
    folder = folder.absolute()
    grafana = folder / "grafana"
    provider = {
        "name": "kvrelay",
        "folder": "kvrelay",
        "type": "file",
        "options": {"path": str(grafana / "dashboards")},
    }
    datasource = {"name": "Prometheus", "type": "prometheus", "url": prometheus, "isDefault": True, "access": "proxy"}
    provisioning = grafana / "provisioning"
    return (
        _write(folder, {"prometheus.yml": _yaml(scraping(source, target, session)), RULES: rules(source)})
        + _write(grafana / "dashboards", dashboards(source))
        + _write(provisioning / "dashboards", {"kvrelay.yml": _yaml({"apiVersion": 1, "providers": [provider]})})
        + _write(provisioning / "datasources", {"kvrelay.yml": _yaml({"apiVersion": 1, "datasources": [datasource]})})
    )


def scraping(source: Source, target: str, session: Path) -> dict[str, Any]:
    """Prometheus's settings."""
    discovered = {"file_sd_configs": [{"files": [str(session / "prom_metrics_service_discovery.json")]}]}
    job = discovered if source == "ray" else {"static_configs": [{"targets": [target]}]}
    every = f"{SCRAPE_S}s"
    return {
        "global": {"scrape_interval": every, "evaluation_interval": every},
        "rule_files": [RULES],
        "scrape_configs": [{"job_name": "ray" if source == "ray" else "kvrelay", **job}],
    }


def _yaml(value: object) -> str:
    return yaml.safe_dump(value, sort_keys=False)


def _write(folder: Path, texts: dict[str, str]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        partial = folder / f".{name}.partial"  # Grafana reads the folder every few seconds
        partial.write_text(text)
        partial.replace(folder / name)
    return [folder / name for name in texts]
