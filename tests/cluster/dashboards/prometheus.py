"""A real Prometheus over a folder that `kvrelay dashboards` wrote, and the panels' queries with their variables set."""

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrelay.cluster.launch.ray_session import free_port

WINDOW = "1m"  # of rates: all that the test has scraped


def need(*programs: str) -> None:
    """Skip where Debian's package `prometheus` is not installed."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian package prometheus)")


class Prometheus:
    """Its HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **query: str) -> Any:
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from error

    def values(self, query: str) -> list[float]:
        """The value of every series; those that are not a number (a quantile of nothing) are left out."""
        found = [float(one["value"][1]) for one in self.get("/api/v1/query", query=query)["data"]["result"]]
        return [value for value in found if value == value]

    def alerts(self) -> set[str]:
        """Names of the alerting rules that it has loaded and evaluated without an error."""
        groups = self.get("/api/v1/rules")["data"]["groups"]
        return {rule["name"] for group in groups for rule in group["rules"] if not rule.get("lastError")}

    def silent(self, dashboard: dict[str, Any]) -> list[str]:
        """Titles and queries of the panels that have no data."""
        return [
            f"{dashboard['title']} / {panel['title']}: {query}"
            for panel in panels(dashboard)
            for query in queries(panel)
            if not self.values(query)
        ]


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Without the rows, which hold none."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(panel: dict[str, Any]) -> list[str]:
    """As Grafana sends them with every variable at All."""
    found = [target["expr"] for target in panel["targets"]]
    for name in ("SessionName", "Cluster", "role", "worker", "tenant"):
        found = [query.replace(f'"${name}"', '".*"') for query in found]
    found = [query.replace("$__rate_interval", WINDOW) for query in found]
    assert not any("$" in query for query in found), found
    return found


@contextlib.contextmanager
def running(config: Path, scratch: Path, *, every_s: float = 1.0) -> Iterator[Prometheus]:
    """Prometheus with these settings, but scraping every second."""
    settings = yaml.safe_load(config.read_text())
    every = f"{1000 * every_s:.0f}ms"
    settings["global"] = {"scrape_interval": every, "evaluation_interval": every}
    for job in settings["scrape_configs"]:
        for discovery in job.get("file_sd_configs", []):
            discovery["refresh_interval"] = "1s"
    quick = config.with_name("quick.yml")
    quick.write_text(yaml.safe_dump(settings))
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    command = ["prometheus", f"--config.file={quick}", f"--storage.tsdb.path={scratch / 'tsdb'}"]
    with (scratch / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={url.removeprefix('http://')}"], stdout=log, stderr=log
        )
    try:
        deadline_s = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/-/ready", timeout=5).close()
                break
            assert process.poll() is None and time.monotonic() < deadline_s, (scratch / "prometheus.log").read_text()
            time.sleep(0.1)
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait(20)
