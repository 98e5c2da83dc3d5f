"""`kvrelay deploy` against a made-up dashboard: what it sends, shows and prints, and how it ends."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrelay import __version__
from kvrelay.cluster.commands.cli import run
from kvrelay.cluster.launch import rollout

CONFIGS = Path(__file__).parents[3] / "configs"
TRACEBACK = "Traceback:\n  File x\nkvrelay.errors.ModelNotFound: model 'a/b': the hub did not return it\n\n"


class Cluster(ThreadingHTTPServer):
    """Ray's dashboard and kvrelay's API on one port. Serve's answers are `statuses`, the last of them for ever."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server_port}"
        self.deployed: dict[str, Any] | None = None
        self.statuses, self.message, self.token = ["DEPLOYING", "DEPLOYING", "RUNNING"], "", ""
        self.on_status = lambda: None
        self.has_ingress = True
        self.requests: list[str] = []

    def details(self) -> dict[str, Any]:
        others = {"chat": {"name": "chat", "deployed_app_config": {"name": "chat", "import_path": "a:b"}}}
        if self.deployed is None:
            return {"applications": others, "proxies": {}}
        self.on_status()
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        state, app = ("RUNNING" if status == "RUNNING" else "STARTING"), self.deployed["applications"][0]
        deployments = {
            one["name"]: {
                "message": self.message,
                "status": "HEALTHY",
                "target_num_replicas": one["num_replicas"],
                "replicas": [{"replica_id": f"{one['name']}{n}", "state": state} for n in range(one["num_replicas"])],
            }
            for one in app["deployments"]
        }
        target = {"ip": "127.0.0.1", "port": self.server_port}
        return {
            "applications": {
                **others,
                "kvrelay": {
                    "name": "kvrelay",
                    "route_prefix": "/",
                    "status": status,
                    "message": "",
                    "deployed_app_config": app,
                    "deployments": deployments,
                },
            },
            "http_options": {"host": "127.0.0.1", "port": self.server_port},
            "proxies": {},
            "target_groups": [{"protocol": "HTTP", "app_name": "", "targets": [target]}],
        }

    def answer(self, path: str) -> Any:
        """The body for a GET or POST."""
        table = {"data": {"result": {"result": []}}}
        actors = [
            {"name": f"SERVE_REPLICA::kvrelay#{name}#{name}0", "node_id": "n1"}
            for name in ("ingress", "prefill", "decode")
        ]
        nodes = [{"node_id": "n1", "node_ip": "10.0.0.3", "resources_total": {}}]
        bodies = {
            "/api/serve/applications/": self.details,
            "/api/v0/nodes": lambda: {"data": {"result": {"result": nodes}}},
            "/api/v0/actors": lambda: {"data": {"result": {"result": actors}}},
            "/api/v0/logs/file": lambda: "INFO 2026-11-23 kvrelay_decode -- downloading the model 40 %\n",
            "/api/authentication_mode": lambda: {"authentication_mode": "disabled"},
            "/kvrelay/status": lambda: {"model": "tiny", "version": __version__, "workers": []},
            "/kvrelay/pairs": lambda: {"pairs": [], "rejected": [], "is_settled": True, "prefill": 1, "decode": 1},
            "/v1/completions": lambda: {
                "usage": {"completion_tokens": 4},
                "kvrelay": {"path": "disaggregated", "transfer": {"transport": "tcp"}},
            },
        }
        return bodies.get(path, lambda: table)()


class Handler(BaseHTTPRequestHandler):
    server: Cluster

    def _respond(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append(f"{self.command} {self.path}")
        text = self.rfile.read(int(self.headers.get("content-length") or 0))
        status, body = 200, ""
        given = self.headers.get("authorization", "")
        if self.server.token and path.startswith("/api/") and given != f"Bearer {self.server.token}":
            status, body = (403 if given else 401), "Unauthorized"
        elif path.startswith("/kvrelay/") and not self.server.has_ingress:
            status, body = 503, "no ingress"
        elif self.command == "PUT":
            self.server.deployed = json.loads(text)
        else:
            found = self.server.answer(path)
            body = found if isinstance(found, str) else json.dumps(found)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    do_GET = do_PUT = do_POST = _respond

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_API_SERVER_ADDRESS", "RAY_DASHBOARD_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(rollout, "POLL_S", 0.01)
    monkeypatch.setattr(rollout, "LOGS_S", 0.0)
    with Cluster() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def deploy(capsys, cluster, *flags, file="laptop"):
    """Exit status, standard output and standard error."""
    code = run(["deploy", str(CONFIGS / f"{file}.yaml"), "--address", cluster.address, *flags])
    told = capsys.readouterr()
    assert "Traceback" not in told.out + told.err
    return code, told.out, told.err


def test_a_deployment_is_sent_followed_and_probed(capsys, cluster):
    code, out, _ = deploy(capsys, cluster)
    assert code == 0
    sent = yaml.safe_load((CONFIGS / "laptop.yaml").read_text())
    chat = {"name": "chat", "import_path": "a:b"}
    assert cluster.deployed == {**sent, "applications": [*sent["applications"], chat]}  # the other application stays
    assert "laptop.yaml is valid: smollm2-135m-instruct, 1 ingress, 1 prefill, 1 decode" in out
    assert "decode   0 of 1 running; downloading the model 40 % (10.0.0.3)" in out
    assert "disaggregated path works, KV over tcp" in out and f"http://{cluster.address}/v1" in out
    assert "GET /api/v0/logs/file?node_id=n1&filename=serve%2Freplica_kvrelay_decode_decode0.log&lines=1" in (
        cluster.requests
    )


def test_a_failing_deployment_ends_with_the_one_line_that_matters(capsys, cluster):
    cluster.statuses, cluster.message = ["DEPLOYING", "DEPLOY_FAILED"], TRACEBACK
    code, _, err = deploy(capsys, cluster)
    assert code == 1 and err == "kvrelay: ModelNotFound: model 'a/b': the hub did not return it\n"


def test_one_that_never_settles_is_given_up(capsys, cluster, monkeypatch):
    cluster.statuses = ["DEPLOYING"]
    monkeypatch.setattr(rollout, "START_S", 0.2)
    code, _, err = deploy(capsys, cluster)
    assert code == 1 and "not running after" in err and "decode 0 of 1 running" in err


def test_ctrl_c_stops_the_waiting_and_not_the_deployment(capsys, cluster, monkeypatch):
    def interrupt(duration_s):
        raise KeyboardInterrupt

    cluster.statuses = ["DEPLOYING"]
    monkeypatch.setattr(rollout.time, "sleep", interrupt)
    code, out, _ = deploy(capsys, cluster)
    assert code == 130 and "stopped waiting; the deployment goes on" in out
    assert [one for one in cluster.requests if one.startswith(("PUT", "DELETE"))] == ["PUT /api/serve/applications/"]


def test_without_waiting_it_returns_at_once(capsys, cluster):
    cluster.statuses = ["DEPLOYING"]
    code, out, _ = deploy(capsys, cluster, "--no-wait")
    assert code == 0 and cluster.deployed and f"kvrelay status --address http://{cluster.address}" in out


def shown_status(capsys, cluster, *flags):
    code = run(["status", "--address", cluster.address, *flags])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_status_shows_how_far_a_download_is_while_there_is_no_ingress_and_when_there_is_one(capsys, cluster):
    cluster.statuses, cluster.has_ingress = ["DEPLOYING"], False
    deploy(capsys, cluster, "--no-wait")
    code, out, _ = shown_status(capsys, cluster)
    assert code == 1 and "no ingress" in out
    assert "HEALTHY, 0 of 1 running; downloading the model 40 % (10.0.0.3)" in " ".join(out.split())
    code, out, _ = shown_status(capsys, cluster, "--json")
    found = json.loads(out)
    assert code == 1 and found["workers"] == [] and "no ingress" in found["error"]
    assert found["serve"]["deployments"]["decode"]["progress"].endswith("downloading the model 40 % (10.0.0.3)")
    cluster.has_ingress = True
    code, out, _ = shown_status(capsys, cluster)
    assert code == 0 and "model tiny" in " ".join(out.split()) and "downloading the model 40 %" in out


def test_status_names_why_a_deployment_has_failed_and_asks_no_replica_that_runs_for_its_log(capsys, cluster):
    cluster.statuses, cluster.message, cluster.has_ingress = ["DEPLOY_FAILED"], TRACEBACK, False
    deploy(capsys, cluster, "--no-wait")
    code, out, _ = shown_status(capsys, cluster)
    assert code == 1 and "ModelNotFound: model 'a/b': the hub did not return it" in " ".join(out.split())
    cluster.statuses, cluster.message, cluster.requests = ["RUNNING"], "", []
    code, _, err = shown_status(capsys, cluster)
    assert code == 1 and "no ingress" in err and not any("/logs/" in one for one in cluster.requests)


@pytest.mark.parametrize("file", ["laptop", "gpu-1p1d"])
def test_a_check_deploys_nothing(capsys, cluster, file):
    code, out, _ = deploy(capsys, cluster, "--check", file=file)
    assert code == 0 and cluster.deployed is None
    assert ("warning: the workers request 2 GPUs, and the cluster has 0 now" in " ".join(out.split())) == (
        file != "laptop"
    )
    assert run(["deploy", str(CONFIGS / "kuberay.yaml"), "--check"]) == 0


def test_an_open_address_without_a_key_is_warned_of(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("KVRELAY_API_KEY", raising=False)
    data = yaml.safe_load((CONFIGS / "laptop.yaml").read_text())
    data["http_options"]["host"] = "0.0.0.0"
    (tmp_path / "open.yaml").write_text(yaml.safe_dump(data))
    warning = "warning: the API listens on 0.0.0.0 without an API key"
    assert run(["deploy", str(tmp_path / "open.yaml"), "--check"]) == 0
    assert warning in capsys.readouterr().out
    assert run(["deploy", str(tmp_path / "open.yaml"), "--check", "--api-key", "k"]) == 0
    assert run(["deploy", str(CONFIGS / "laptop.yaml"), "--check"]) == 0
    assert "warning" not in capsys.readouterr().out


def test_rays_token_is_asked_for_and_a_wrong_one_named_with_its_place(capsys, cluster, tmp_path, monkeypatch):
    cluster.token = "right"
    file = tmp_path / ".ray" / "auth_token"
    code, _, err = deploy(capsys, cluster)
    assert code == 1 and "asks for Ray's token" in err and f"{file}" in err and "ray get-auth-token" in err
    file.parent.mkdir()
    file.write_text("wrong")
    code, _, err = deploy(capsys, cluster)
    assert code == 1 and f"refuses the token of {file}" in err and len(err.splitlines()) == 1
    monkeypatch.setenv("RAY_AUTH_TOKEN", "stale")
    assert "refuses the token of RAY_AUTH_TOKEN" in deploy(capsys, cluster)[2]
    monkeypatch.setenv("RAY_AUTH_TOKEN", "right")
    assert deploy(capsys, cluster)[0] == 0


def test_nothing_is_sent_where_the_file_is_wrong_or_for_kubernetes(capsys, cluster, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((CONFIGS / "laptop.yaml").read_text().replace("kv_memory", "kv_memry"))
    assert run(["deploy", str(wrong), "--address", cluster.address]) == 2
    assert "did you mean engine.kv_memory?" in capsys.readouterr().err
    code, _, err = deploy(capsys, cluster, file="kuberay")
    assert code == 2 and "kubectl apply -f" in err and not cluster.requests


def test_where_nothing_listens_the_line_says_how_to_get_there(capsys):
    code = run(["deploy", str(CONFIGS / "laptop.yaml"), "--address", "127.0.0.1:9"])
    err = capsys.readouterr().err
    assert code == 1 and "no Ray dashboard answers at http://127.0.0.1:9" in err and "--dashboard-host" in err
