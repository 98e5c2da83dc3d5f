"""The RayService files: KubeRay's, Kubernetes', Ray Serve's and our own schemas accept them, and their parts fit.

No Kubernetes runs here: what these tests cannot see is listed in docs/kubernetes.md.
"""

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

from kvrelay.cluster.deployments.app import worker_options
from kvrelay.config import settings_from
from kvrelay.errors import ConfigError
from tests.cluster.deployments.kuberay_crd import closed, main, schema_of
from tests.cluster.deployments.kuberay_schema import RAY_SERVICE

ROOT = Path(__file__).parents[3]
FILES = ("kuberay", "kuberay-cpu")
KUBERNETES = "1.31"  # a version that is in use; KubeRay asks for 1.27 at least
PROCESS_END_S = 30.0  # Ray's own processes, after the drain
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


def service(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text()))


def groups(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The head's, then the workers'."""
    cluster = spec["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def container(group: dict[str, Any]) -> dict[str, Any]:
    (only,) = group["template"]["spec"]["containers"]
    return dict(only)


def serve_file(spec: dict[str, Any]) -> dict[str, Any]:
    return dict(yaml.safe_load(spec["spec"]["serveConfigV2"]))


def check(spec: dict[str, Any]) -> None:
    """By all schemas. Raises the first's error."""
    jsonschema.validate(spec, RAY_SERVICE)
    for group in groups(spec):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": spec["metadata"], **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    check_serve_file(serve_file(spec))


def check_serve_file(data: dict[str, Any]) -> None:
    """Ray Serve's schema, which drops keys that it does not know: those are refused here. Then our settings."""
    known = [(data, ServeDeploySchema)]
    known += [(app, ServeApplicationSchema) for app in data["applications"]]
    known += [(one, DeploymentSchema) for app in data["applications"] for one in app["deployments"]]
    for part, schema in known:
        if strange := set(part) - set(schema.model_fields):
            raise ValueError(f"Ray Serve does not know {strange}")
    for app in ServeDeploySchema.model_validate(data).applications:
        settings_from(app.args)


@pytest.mark.parametrize("name", FILES)
def test_every_schema_accepts_the_file(name):
    check(service(name))


def test_a_closed_schema_refuses_what_the_crd_does_not_list_and_nothing_else():
    count = {"type": "integer", "minimum": 0, "nullable": True, "description": "How many."}
    spec = {
        "type": "object",
        "required": ["count"],
        "properties": {
            "count": count,
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            "free": {"type": "object", "properties": {"a": count}, "x-kubernetes-preserve-unknown-fields": True},
            "ports": {"type": "array", "items": {"type": "object", "properties": {"port": count}}},
        },
    }
    whole = {"type": "object", "properties": {name: {"type": "object"} for name in ("metadata", "status")}}
    whole["properties"]["spec"] = spec
    version = {"name": "v1", "schema": {"openAPIV3Schema": whole}}
    schema = schema_of({"spec": {"group": "g.io", "names": {"kind": "One"}, "versions": [version]}})
    good = {"count": None, "labels": {"any": "x"}, "free": {"any": 1}, "ports": [{"port": 1}]}
    thing = {"apiVersion": "g.io/v1", "kind": "One", "metadata": {}, "spec": good}
    jsonschema.validate(thing, schema)
    for wrong in (
        {},
        {"count": -1},
        {"cuont": 1},
        {"labels": {"any": 1}},
        {"ports": [{"prot": 1}]},
        {"free": {"a": "1"}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(thing | {"spec": good | wrong if wrong else {}}, schema)
    for wrong in ({"kind": "Two"}, {"apiVersion": "g.io/v2"}, {"status": {}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(thing | wrong, schema)
    assert closed(count) == {"type": ["integer", "null"], "minimum": 0}


def test_files_are_validated_against_a_crd_by_the_script(tmp_path, capsys):
    """The CRD here is our own schema's: KubeRay's is not in a package that CI could install."""
    names = {"group": "ray.io", "names": {"kind": "RayService"}}
    crd = {"spec": names | {"versions": [{"name": "v1", "schema": {"openAPIV3Schema": RAY_SERVICE}}]}}
    (tmp_path / "crd.yaml").write_text(json.dumps(crd))
    main(str(tmp_path / "crd.yaml"), *(str(ROOT / f"configs/{name}.yaml") for name in FILES))
    assert capsys.readouterr().out.count(": valid\n") == len(FILES)
    wrong = service("kuberay")
    _misspell(wrong, f"{CLUSTER}/enableInTreeAutoscaling")
    (tmp_path / "wrong.yaml").write_text(json.dumps(wrong))
    with pytest.raises(jsonschema.ValidationError):
        main(str(tmp_path / "crd.yaml"), str(tmp_path / "wrong.yaml"))


def _misspell(at: Any, path: str) -> None:
    """Rename the last key of a path such as a/0/b in place."""
    *way, last = path.split("/")
    for part in way:
        at = at[int(part) if part.isdigit() else part]
    at[last + "x"] = at.pop(last)


CLUSTER = "spec/rayClusterConfig"
POD = f"{CLUSTER}/workerGroupSpecs/0/template/spec"


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("spec/serveConfigV2", jsonschema.ValidationError),
        ("spec/rayClusterDeletionDelaySeconds", jsonschema.ValidationError),
        (f"{CLUSTER}/enableInTreeAutoscaling", jsonschema.ValidationError),
        (f"{CLUSTER}/autoscalerOptions/idleTimeoutSeconds", jsonschema.ValidationError),
        (f"{CLUSTER}/authOptions/secretName", jsonschema.ValidationError),
        (f"{CLUSTER}/workerGroupSpecs/1/maxReplicas", jsonschema.ValidationError),
        (f"{CLUSTER}/workerGroupSpecs/0/template/spec", jsonschema.ValidationError),
        ("metadata/name", jsonschema.ValidationError),
        (f"{POD}/terminationGracePeriodSeconds", kubernetes_validate.ValidationError),
        (f"{POD}/securityContext/runAsNonRoot", kubernetes_validate.ValidationError),
        (f"{POD}/containers/0/readinessProbe/failureThreshold", kubernetes_validate.ValidationError),
        (f"{POD}/volumes/2/secret/items/0/key", kubernetes_validate.ValidationError),
        (f"{POD}/volumes/1/emptyDir/sizeLimit", kubernetes_validate.ValidationError),
    ],
)
@pytest.mark.parametrize("name", FILES)
def test_a_misspelt_field_is_refused(name, path, error):
    spec = copy.deepcopy(json.loads(json.dumps(service(name))))  # without the file's shared parts
    _misspell(spec, path)
    with pytest.raises(error):
        check(spec)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("route_prefix", "route_prefixx", ValueError),
        ("ray_actor_options", "ray_actor_option", ValueError),
        ("kv_memory", "kv_memoryy", ConfigError),
        ("proxy_location: EveryNode", "proxy_location: Everywhere", ValueError),
    ],
)
@pytest.mark.parametrize("name", FILES)
def test_a_misspelt_key_of_the_serve_file_is_refused(name, old, new, error):
    spec = service(name)
    assert old in spec["spec"]["serveConfigV2"]
    spec["spec"]["serveConfigV2"] = spec["spec"]["serveConfigV2"].replace(old, new)
    with pytest.raises(error):
        check(spec)


def _leave_s(spec: dict[str, Any]) -> float:
    """How long Ray drains a node whose pod ends."""
    values = {one.get("value") for group in groups(spec) for one in container(group)["env"] if one["name"] == DRAIN}
    (value,) = values
    return float(value)


@pytest.mark.parametrize("name", FILES)
def test_pods_have_time_for_our_shutdown(name):
    """Ray drains a node for as long as a replica may take, and the pod's grace period outlasts that."""
    spec = service(name)
    (app,) = serve_file(spec)["applications"]
    shutdown_s = worker_options(settings_from(app["args"]))["graceful_shutdown_timeout_s"]
    assert shutdown_s <= _leave_s(spec) - 10
    for group in groups(spec):
        grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s >= _leave_s(spec) + PROCESS_END_S
        assert spec["spec"]["rayClusterDeletionDelaySeconds"] > grace_s


@pytest.mark.parametrize("name", FILES)
def test_each_group_can_hold_the_replicas_that_may_run(name):
    """A role's replicas ask for the resource that its group's pods offer, and both have the same bounds."""
    spec = service(name)
    (app,) = serve_file(spec)["applications"]
    for group in groups(spec):
        offered = json.loads(json.loads(group["rayStartParams"]["resources"]))  # quoted for KubeRay's shell
        offered |= {
            "CPU": int(group["rayStartParams"]["num-cpus"]),
            "GPU": int(group["rayStartParams"].get("num-gpus", 0)),
        }
        deployment = next(one for one in app["deployments"] if one["name"] in offered)
        wanted = deployment["ray_actor_options"]
        assert wanted["resources"] == {deployment["name"]: 1}
        assert wanted["num_cpus"] <= offered["CPU"] and wanted.get("num_gpus", 0) <= offered["GPU"]
        limits = container(group)["resources"]["limits"]
        assert offered["GPU"] == int(limits.get("nvidia.com/gpu", 0))
        if "groupName" in group:
            assert group["groupName"] == deployment["name"]
            bounds = deployment.get("autoscaling_config", {"min_replicas": deployment.get("num_replicas")})
            assert group["minReplicas"] == group["replicas"] == bounds["min_replicas"]
            assert group["maxReplicas"] >= bounds.get("max_replicas", 1)


@pytest.mark.parametrize("name", FILES)
def test_containers_run_without_rights_and_get_their_secrets_from_one_secret(name):
    spec = service(name)
    auth = spec["spec"]["rayClusterConfig"]["authOptions"]
    assert auth == {"mode": "token", "secretName": "kvrelay"}
    user = re.search(r"USER (\d+):(\d+)", (ROOT / "Dockerfile").read_text())
    assert user is not None
    for group in groups(spec):
        pod = group["template"]["spec"]["securityContext"]
        assert pod["runAsNonRoot"] and [pod["runAsUser"], pod["runAsGroup"]] == [int(user[1]), int(user[2])]
        own = container(group)["securityContext"]
        assert own == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        variables = {
            one["name"]: one["value"] for one in container(group)["env"]
        }  # files: a value can be read in /proc
        mounts = {one["mountPath"]: one["name"] for one in container(group)["volumeMounts"]}
        volumes = {one["name"]: one for one in group["template"]["spec"]["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert "/var/cache/kvrelay" in mounts and set(volumes) == set(mounts.values())
        held = {one["path"] for one in volumes["secrets"]["secret"]["items"]}
        for name in ("KVRELAY_API_KEY_FILE", "KVRELAY_SECRET_FILE"):
            folder, _, file = variables[name].rpartition("/")
            assert mounts[folder] == "secrets" and file in held
    assert "api_key" not in json.dumps(serve_file(spec))


def test_ray_reads_the_time_that_it_drains_for_from_this_variable():
    from ray._private import ray_constants

    assert f'"{DRAIN}"' in Path(ray_constants.__file__).read_text()


def redis_parts() -> dict[str, dict[str, Any]]:
    """The objects of kuberay-redis.yaml by kind."""
    text = (ROOT / "configs/kuberay-redis.yaml").read_text()
    return {one["kind"]: one for one in json.loads(json.dumps(list(yaml.safe_load_all(text))))}


def test_the_redis_of_the_gcs_is_one_that_kubernetes_takes_and_the_service_file_finds():
    parts = redis_parts()
    for one in parts.values():
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    (port,) = parts["Service"]["spec"]["ports"]
    options = service("kuberay")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == f"{parts['Service']['metadata']['name']}:{port['port']}"
    pod = parts["StatefulSet"]["spec"]["template"]
    (server,) = pod["spec"]["containers"]
    labels = pod["metadata"]["labels"]
    assert labels == parts["Service"]["spec"]["selector"] == parts["StatefulSet"]["spec"]["selector"]["matchLabels"]
    (password,) = server["env"]
    assert password["valueFrom"] == options["redisPassword"]["valueFrom"]
    assert server["args"][-2:] == ["--requirepass", f"$({password['name']})"]
    assert (
        [one["name"] for one in server["ports"]]
        == [port["targetPort"]]
        == [server["livenessProbe"]["tcpSocket"]["port"]]
    )
    (mount,), (claim,) = server["volumeMounts"], parts["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert mount["name"] == claim["metadata"]["name"] and mount["mountPath"] == server["args"][1]  # --dir
    assert pod["spec"]["securityContext"]["runAsNonRoot"]


@pytest.mark.parametrize(
    "path",
    [
        "StatefulSet/spec/serviceName",
        "StatefulSet/spec/template/spec/containers/0/startupProbe/tcpSocket",
        "StatefulSet/spec/volumeClaimTemplates/0/spec/accessModes",
        "Service/spec/selector",
    ],
)
def test_a_misspelt_field_of_the_redis_is_refused(path):
    parts = redis_parts()
    _misspell(parts, path)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(parts[path.split("/")[0]], KUBERNETES, strict=True)


@pytest.mark.parametrize("name", FILES)
def test_ray_in_the_image_is_the_version_that_the_file_names(name):
    import ray

    assert service(name)["spec"]["rayClusterConfig"]["rayVersion"] == ray.__version__
