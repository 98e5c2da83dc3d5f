"""The ready configurations parse as Ray Serve reads them, and hold settings that kvrelay accepts."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrelay.config import settings_from

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
    assert replica_arguments(few) != replica_arguments(settings_from({"engine": {"token_budget": 64}}))
