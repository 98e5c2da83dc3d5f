"""Serve files are checked before Serve gets them: each mistake is one line that names the key and the nearest known."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrelay.cluster.deployments.serve_config import IMPORT_PATH, PLANNER_POLICY_PATH
from kvrelay.cluster.deployments.serve_file import cluster_warnings, read_serve_file, with_other_applications
from kvrelay.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
BASE: dict[str, Any] = {
    "http_options": {"host": "0.0.0.0", "port": 8000},
    "applications": [
        {
            "name": "kvrelay",
            "route_prefix": "/",
            "import_path": IMPORT_PATH,
            "args": {"model": {"source": "smollm2-135m-instruct"}, "engine": {"kv_memory": "256MiB"}},
            "deployments": [{"name": name, "num_replicas": 1} for name in ("ingress", "prefill", "decode")],
        }
    ],
}


def written(folder: Path, place: str, value: Any) -> Path:
    """BASE with `value` at the dotted `place`, whose last part may be new; None removes it."""
    data: Any = copy.deepcopy(BASE)
    *parents, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    spot = data
    for part in parents:
        spot = spot[part] if isinstance(spot, list) else spot.setdefault(part, {})
    if value is None:
        del spot[last]
    else:
        spot[last] = value
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_serve_file_of_ours_is_valid_and_the_others_name_their_command(path: Path):
    data = next(yaml.safe_load_all(path.read_text()))
    if "applications" in data or data.get("kind") == "RayService":
        (found,) = read_serve_file(path)
        assert {"ingress", "decode"} <= set(found.counts) and not found.warnings
        assert found.is_kubernetes is ("apiVersion" in data)
    else:
        with pytest.raises(ConfigError, match=rf"(ray up|kubectl apply -f|docker compose up) {path}"):
            read_serve_file(path)


APP = "applications.0"


@pytest.mark.parametrize(
    ("place", "value", "line"),
    [
        ("aplications", [], "unknown key aplications; did you mean applications?"),
        ("http_options.prot", 80, "unknown key http_options.prot; did you mean http_options.port?"),
        (f"{APP}.arg", {}, f"unknown key {APP}.arg; did you mean {APP}.args?"),
        (f"{APP}.args.engin", {}, "unknown setting engin; did you mean engine?"),
        (
            f"{APP}.args.engine.token_budge",
            3,
            "unknown setting engine.token_budge; did you mean engine.token_budget?",
        ),
        (f"{APP}.args.engine.kv_memory", "lots", "engine.kv_memory: 'lots' is not a size"),
        (f"{APP}.args.transfer", {"transport": "carrier"}, "transfer.transport: "),
        (f"{APP}.args.cluster", {"decode": 0}, "cluster.decode: "),
        (f"{APP}.args.cluster", {"prefill": 0}, "cluster.prefill: 0 (aggregated): remove one"),
        (f"{APP}.args.model.source", "./model", "'./model': replicas run in other folders"),
        (f"{APP}.args.model.source", "no such/thing at all", "nor a hub id (org/name)"),
        (f"{APP}.args.model.chat_template", "chat.jinja", "write an absolute path"),
        (f"{APP}.args.serve", {"api_keys_file": "keys.yaml"}, "serve.api_keys_file: 'keys.yaml': replicas run in"),
        (f"{APP}.deployments.1.name", "prefil", "unknown deployment prefil; did you mean prefill?"),
        (f"{APP}.deployments.1.num_replica", 2, "did you mean applications.0.deployments.prefill.num_replicas?"),
        (f"{APP}.deployments.2.num_replicas", 0, "decode.num_replicas: cannot be 0: without a decode worker"),
        (f"{APP}.deployments.1.num_replicas", 0, "prefill.num_replicas: cannot be 0: requests that are on their way"),
        (f"{APP}.deployments.0.num_replicas", 0, "ingress.num_replicas: cannot be 0: without an ingress no request"),
        (f"{APP}.deployments.1.num_replicas", "two", "num_replicas"),
        (f"{APP}.deployments.1.ray_actor_options", {"num_gpu": 1}, "ray_actor_options.num_gpus?"),
        (f"{APP}.deployments.2", {"name": "decode", "autoscaling_config": {"max_replica": 3}}, ".max_replicas?"),
        *(
            (
                f"{APP}.deployments.{number}",
                {"name": name, "autoscaling_config": {"min_replicas": 0, "max_replicas": 3}},
                f"{name}.autoscaling_config.min_replicas: cannot be 0: {why}",
            )
            for number, (name, why) in enumerate(
                {
                    "ingress": "without an ingress",
                    "prefill": "requests that are on their way",
                    "decode": "without a decode",
                }.items()
            )
        ),
        (
            f"{APP}.autoscaling_policy",
            {
                "policy_function": PLANNER_POLICY_PATH,
                "policy_kwargs": {"ttft": 1.0},
            },
            "unknown setting planner.ttft; did you mean planner.ttft_s?",
        ),
        (
            f"{APP}.autoscaling_policy",
            {"policy_function": PLANNER_POLICY_PATH},
            "autoscaling_policy: the planner needs an autoscaling_config of ingress, prefill, decode",
        ),
        (f"{APP}.import_path", "kvrelay.app:build", f"expected an application with import_path: {IMPORT_PATH}"),
        (f"{APP}.import_path", None, f"{APP}.import_path"),
        (f"{APP}.deployments", {"decode": 1}, f"{APP}.deployments"),
        ("applications", None, "applications"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_the_key(tmp_path: Path, place: str, value: Any, line: str):
    with pytest.raises(ConfigError) as caught:
        read_serve_file(written(tmp_path, place, value))
    text = str(caught.value)
    assert line in text and text.startswith(f"{tmp_path}/serve.yaml: ") and len(text.splitlines()) == 1


def test_the_planner_needs_bounds_of_both_roles_and_of_the_ingress(tmp_path: Path):
    """Serve asks its policy about deployments with an autoscaling_config only, and the planner decides all or none."""
    bounds = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 3}}
    listed = [{"name": "ingress", **bounds}, {"name": "prefill", "num_replicas": "auto"}, {"name": "decode", **bounds}]
    path = written(tmp_path, f"{APP}.autoscaling_policy", {"policy_function": PLANNER_POLICY_PATH})
    data = yaml.safe_load(path.read_text())
    (app,) = data["applications"]

    def read(deployments: list[dict[str, Any]], prefill: int = 1) -> None:
        app["deployments"], app["args"]["cluster"] = deployments, {"prefill": prefill}
        path.write_text(yaml.safe_dump(data))
        read_serve_file(path)

    read(listed)
    app["autoscaling_policy"]["policy_kwargs"] = {"history": "past.csv"}
    with pytest.raises(ConfigError, match=r"planner.history: 'past.csv': .*write an absolute path"):
        read(listed)
    app["autoscaling_policy"]["policy_kwargs"] = {"history": "/past.csv"}
    read([listed[0], listed[2]], prefill=0)  # each worker does both
    with pytest.raises(ConfigError, match=r"an autoscaling_config of prefill$"):
        read([listed[0], listed[2]])
    with pytest.raises(ConfigError, match=r"an autoscaling_config of decode$"):
        read([*listed[:2], {"name": "decode", "num_replicas": 2}])


@pytest.mark.parametrize("text", ["a: [1", "- a\n", "", "kind: RayService\n", "kind: RayService\nspec: 3\n"])
def test_what_is_no_serve_file_is_refused_in_one_line(tmp_path: Path, text: str):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_serve_file(path)
    assert str(path) in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_settings_without_an_effect_and_secrets_are_warned_of(tmp_path: Path):
    (found,) = read_serve_file(written(tmp_path, f"{APP}.args.serve", {"port": 80, "api_key": "k"}))
    assert found.warnings == (
        "serve.port has no effect here; set http_options.port",
        "Ray's dashboard shows serve.api_key; set KVRELAY_API_KEY instead",
    )


def test_gpus_that_the_cluster_lacks_and_ports_that_serve_has_already_are_warned_of(tmp_path: Path):
    (found,) = read_serve_file(written(tmp_path, f"{APP}.args.cluster", {"num_gpus_per_worker": 1}))
    details = {"proxies": {"n": {}}, "http_options": {"host": "0.0.0.0", "port": 9000}}
    gpus, port = cluster_warnings(found, details, [{"resources_total": {"GPU": 1.0}}, {"resources_total": {}}])
    assert gpus.startswith("the workers request 2 GPUs, and the cluster has 1 now")
    assert port == "Serve already listens on port 9000; 8000 takes effect after `serve shutdown`"
    assert not cluster_warnings(found, {}, [{"resources_total": {"GPU": 2.0}}])


def test_other_applications_of_the_cluster_stay():
    chat = {"name": "chat", "import_path": "a:b"}
    details = {"applications": {"chat": {"deployed_app_config": chat}, "kvrelay": {"deployed_app_config": {"x": 1}}}}
    merged = with_other_applications(BASE, details)
    assert merged["applications"] == [*BASE["applications"], chat]
    assert with_other_applications(BASE, {}) == BASE
    second = {"name": "next", "route_prefix": "/next", "import_path": IMPORT_PATH}
    details = {"applications": {"next": {"deployed_app_config": second}}}
    assert with_other_applications(BASE, details)["applications"] == [*BASE["applications"], second]


def test_a_file_may_have_several_applications_of_ours(tmp_path: Path):
    second = {"name": "next", "route_prefix": "/next", "import_path": IMPORT_PATH, "args": {"model": {"source": "a/b"}}}
    found = read_serve_file(written(tmp_path, "applications", [*BASE["applications"], second]))
    assert [(one.app_name, one.settings.model.source) for one in found] == [
        ("kvrelay", "smollm2-135m-instruct"),
        ("next", "a/b"),
    ]
    assert found[1].only()["applications"] == [second]


def test_a_model_that_changes_under_the_same_name_is_warned_of(tmp_path: Path):
    (found,) = read_serve_file(written(tmp_path, f"{APP}.args.model.source", "a/b"))
    details = {"applications": {"kvrelay": {"deployed_app_config": BASE["applications"][0]}}}
    (line,) = cluster_warnings(found, details, [])
    assert line.startswith("kvrelay serves smollm2-135m-instruct now: requests fail") and "another name" in line
