"""Every panel of every dashboard has data: a real Prometheus scrapes a small cluster's /metrics under load, and answers
the queries of the JSON that ships.
"""

import copy
import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml

from kvrelay.cluster.dashboards.files import SESSION, dashboards, write_folder
from kvrelay.cluster.dashboards.panels import workers
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from tests.cluster.dashboards.prometheus import need, panels, queries, running
from tests.small_cluster import CHAT_SETTINGS, served_cluster

pytestmark = [pytest.mark.slow, pytest.mark.alone]

SETTINGS = CHAT_SETTINGS | {
    "model": {"dtype": "float32", "max_model_len": 1024},
    "engine": {"kv_memory": "4MiB", "num_threads": 1},
    "cache": {"host_memory": "8MiB"},
    "slo": {"classes": {"interactive": {"ttft_s": 60.0}, "never": {"ttft_s": 1e-6}}},
    "scheduler": {"tenant_by": "auto"},
}
TENANTS = 3
LOAD_S = 8.0  # a dozen scrapes


def ask(client: httpx.Client, number: int, **fields: object) -> int:
    body = {
        "model": "tiny",
        "prompt": f"Tenant {number % TENANTS} asks about the fox, the hound and the forest. " * 6,
        "max_tokens": 12,
        "ignore_eos": True,
        "user": f"tenant-{number % TENANTS}",
        "a_field_of_the_clients": 1,
        "priority": number % 2,
    }
    headers = {"x-kvrelay-prefill": "remote"}
    return client.post("/completions", json=body | fields, headers=headers).status_code


def scrape_twice(config, target):
    """Under two names, as two ingresses that see the same workers."""
    settings = yaml.safe_load(config.read_text())
    settings["scrape_configs"][0]["static_configs"] = [{"targets": [target, target.replace("127.0.0.1", "localhost")]}]
    config.write_text(yaml.safe_dump(settings))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A Prometheus that has scraped a cluster which served, refused and failed requests; and the cluster's /metrics."""
    need("prometheus", "promtool")
    temp = tmp_path_factory.mktemp("prometheus")
    folder = tiny_checkpoint("llama", temp / "tiny")
    with served_cluster(folder, SETTINGS) as url, httpx.Client(base_url=url, timeout=60) as client:
        target = url.removeprefix("http://").removesuffix("/v1")
        write_folder(
            temp / "watch", "ingress", target=target, session=Path(SESSION), prometheus="http://localhost:9090"
        )
        scrape_twice(temp / "watch" / "prometheus.yml", target)
        with running(temp / "watch" / "prometheus.yml", temp, every_s=0.5) as prometheus:
            deadline_s, number, seen = time.monotonic() + LOAD_S, 0, set()
            while time.monotonic() < deadline_s:
                seen.add(ask(client, number))
                seen.add(ask(client, number, slo={"class": "interactive"}))
                seen.add(ask(client, number, slo={"class": "never"}))
                seen.add(ask(client, number, model="another"))
                number += 1
            time.sleep(1.5)
            assert {200, 404} <= seen, seen
            yield prometheus, client.get(f"http://{target}/metrics").text


@pytest.mark.parametrize("name", dashboards("ingress"))
def test_every_query_of_every_panel_returns_data(loaded, name):
    prometheus, _ = loaded
    shown = page(name)
    assert len(panels(shown)) >= 12
    assert prometheus.silent(shown) == []


def page(name):
    return json.loads(dashboards("ingress")[name])


def test_a_panel_with_a_misspelt_metric_is_found(loaded):
    prometheus, _ = loaded
    shown = copy.deepcopy(page("kvrelay-faults.json"))
    victim = panels(shown)[3]
    victim["targets"][0]["expr"] = victim["targets"][0]["expr"].replace("losses", "loses")
    assert [line.split(":")[1] for line in prometheus.silent(shown)] == [f" Faults / {victim['title']}"]


def test_workers_that_two_ingresses_see_are_counted_once(loaded):
    prometheus, text = loaded
    free = re.findall(r'kvrelay_kv_blocks\{role="(\w+)",state="(?:free|cached|used)",worker="[^"]+"\} (\S+)', text)
    assert len(free) == 6 and prometheus.values('count(kvrelay_kv_blocks{state="free"})') == [4]
    total = workers("kvrelay_kv_blocks", "role", 'state=~"used|cached|free"', "state")
    found = prometheus.values(queries({"targets": [{"expr": total}]})[0])
    assert sorted(found) == sorted(sum(float(n) for role, n in free if role == one) for one in ("prefill", "decode"))


def test_prometheus_evaluates_every_alert_rule_without_an_error(loaded):
    prometheus, _ = loaded
    assert len(prometheus.alerts()) >= 15


def test_promtool_finds_nothing_wrong_with_the_metrics(loaded):
    _, text = loaded
    done = subprocess.run([shutil.which("promtool"), "check", "metrics"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
