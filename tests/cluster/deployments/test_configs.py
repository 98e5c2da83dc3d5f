"""The ready configurations parse as Ray Serve reads them, and hold settings that kvrelay accepts."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrelay.cluster.launch.ray_environment import SHARED_ADDRESS
from kvrelay.config import settings_from
from kvrelay.types import Role

pytestmark = pytest.mark.alone


FOLDER = Path(__file__).parents[3] / "configs"
SERVE_FILES = ["laptop", "laptop-2p3d", "aggregated", "autoscaling", "gpu-1p1d", "containers"]


def config_of(name: str) -> dict[str, Any]:
    data = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return dict(yaml.safe_load(data["spec"]["serveConfigV2"])) if name.startswith("kuberay") else dict(data)


@pytest.mark.parametrize("name", [*SERVE_FILES, "kuberay", "kuberay-cpu"])
def test_serve_and_kvrelay_accept_it(name: str):
    from ray.serve.schema import ServeDeploySchema

    from kvrelay.cluster.deployments.serve_config import IMPORT_PATH

    schema = ServeDeploySchema.model_validate(config_of(name))
    (app,) = schema.applications
    assert app.import_path == IMPORT_PATH
    settings = settings_from(app.args)
    names = {deployment.name for deployment in app.deployments}
    assert names == ({"ingress", "decode"} if settings.cluster.prefill == 0 else {"ingress", "prefill", "decode"})


def test_the_two_laptop_files_differ_in_counts_only():
    one, more = (config_of(name)["applications"][0] for name in ("laptop", "laptop-2p3d"))
    assert one["args"] == more["args"]
    assert {d["name"]: d["num_replicas"] for d in more["deployments"]} == {"ingress": 1, "prefill": 2, "decode": 3}


def test_the_policy_that_autoscaling_names_is_ours_and_takes_its_settings():
    from ray._common.utils import import_attr
    from ray.serve.config import AutoscalingConfig

    from kvrelay.cluster.autoscaling.policies import PlannerPolicy

    (app,) = config_of("autoscaling")["applications"]
    policy = app["autoscaling_policy"]
    assert import_attr(policy["policy_function"]) is PlannerPolicy
    assert PlannerPolicy(**policy["policy_kwargs"])
    bounds = {d["name"]: AutoscalingConfig(**d["autoscaling_config"]) for d in app["deployments"]}
    assert bounds["ingress"].min_replicas == bounds["ingress"].max_replicas == 1
    assert all(each.downscale_delay_s == each.upscale_delay_s == 0 for each in bounds.values())


def test_arguments_of_replicas_do_not_change_with_the_counts():
    from kvrelay.cluster.deployments.app import replica_arguments

    few = settings_from({"cluster": {"prefill": 1, "decode": 1, "secret": "a"}})
    many = settings_from({"cluster": {"prefill": 2, "decode": 3, "secret": "b"}})
    assert replica_arguments(few) == replica_arguments(many)
    assert settings_from(replica_arguments(few)).engine == few.engine
    without = settings_from(replica_arguments(settings_from({"cluster": {"prefill": 0, "decode": 9}}))).cluster
    assert without.first_role(Role.DECODE) == "both" and few.cluster.first_role(Role.DECODE) == "decode"
    assert replica_arguments(few) != replica_arguments(settings_from({"engine": {"token_budget": 64}}))


def test_sealed_blocks_need_no_secret_where_the_application_is_built(monkeypatch: pytest.MonkeyPatch):
    """`kvrelay serve` gives it to the registry alone; a replica that joins is refused where that has made one up."""
    from kvrelay.cluster.deployments.app import build
    from kvrelay.config import check_sealed
    from kvrelay.errors import ConfigError

    monkeypatch.delenv("KVRELAY_SECRET", raising=False)
    cache = {"host_memory": "1MiB", "disk_path": "/kv", "sealed": True}
    settings = settings_from({"model": {"source": "m"}, "cache": cache})
    assert build(settings) is not None
    check_sealed(settings, has_secret=True)
    with pytest.raises(ConfigError, match=r"cache\.sealed"):
        check_sealed(settings, has_secret=False)


def exported(text: str) -> dict[str, str]:
    """The variables that `export` lines of a shell set, apart from those of other subjects."""
    lines = re.findall(r"^ *export ((?:[^\n;]|\n(?! *(?:export|ray)))+)", text, re.MULTILINE)
    plain = [
        re.sub(r"\$('[^']*')", lambda quoted: quoted[1].replace("\\n", "\n"), line) for line in lines
    ]  # as bash does
    pairs = [word.split("=", 1) for line in plain for word in shlex.split(line)]
    return {name: value for name, value in pairs if name.startswith("RAY_SERVE_")}


def test_files_and_docs_that_offer_one_address_set_the_variables_that_kvrelay_serve_sets():
    cluster = yaml.safe_load((FOLDER / "ray-cluster.yaml").read_text())
    for commands in (cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"]):
        assert exported(commands[-1].partition(";")[0]) == SHARED_ADDRESS
    for name in ("kuberay", "kuberay-cpu"):
        spec = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["spec"]["rayClusterConfig"]
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            (container,) = group["template"]["spec"]["containers"]
            given = {one["name"]: one.get("value") for one in container["env"] if one["name"].startswith("RAY_SERVE_")}
            assert given == SHARED_ADDRESS
    docs = (FOLDER.parent / "docs/deploy.md").read_text()
    (block,) = re.findall(r"## One address for several ingresses\n.*?```bash\n(.*?)```", docs, re.DOTALL)
    assert exported(block) == SHARED_ADDRESS
    local = (FOLDER / "ray-up-local.yaml").read_text()
    assert not any(name in local for name in SHARED_ADDRESS) and "One address for several ingresses" in local


@pytest.mark.parametrize("name", ["ray-cluster", "ray-up-local"])
def test_no_setup_command_quotes_a_tilde_which_a_shell_would_then_not_expand(name: str):
    data = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    commands = [*data["setup_commands"], *data.get("worker_setup_commands", [])]
    assert commands and not any(re.search(r"['\"]~", one) for one in commands)
    assert not re.search(r"['\"]~/kvrelay-source", (FOLDER / f"{name}.yaml").read_text())
