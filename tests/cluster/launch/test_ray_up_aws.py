"""The AWS file for `ray up`: Ray's own schema takes it, and Ray's own AWS code builds a cluster from it on a made-up
AWS (moto): key pair, role, subnets, security group, and the machines. And what it has in common with the local file.
"""

import copy
import re
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
FILE = ROOT / "configs" / "ray-cluster.yaml"
REGION = "us-east-1"


def written() -> dict[str, Any]:
    return dict(yaml.safe_load(FILE.read_text()))


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """EC2's client of the made-up AWS, which Ray's code then uses, too."""
    boto3 = pytest.importorskip("boto3")
    server_module = pytest.importorskip("moto.server")
    from ray.autoscaler._private.aws import config, utils

    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
    monkeypatch.setattr(config, "time", SimpleNamespace(sleep=lambda duration_s: None, time=time.time))  # AWS is slow
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "made-up",
        "AWS_SECRET_ACCESS_KEY": "made-up",
        "AWS_DEFAULT_REGION": REGION,
        "HOME": str(tmp_path),
        "MOTO_IAM_LOAD_MANAGED_POLICIES": "true",
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / ".ssh").mkdir()
    for cached in (utils.resource_cache, utils.client_cache, config._get_subnets_or_die):
        cached.cache_clear()
    try:
        yield boto3.client("ec2", region_name=REGION)
    finally:
        server.stop()
        for cached in (utils.resource_cache, utils.client_cache, config._get_subnets_or_die):
            cached.cache_clear()


def bootstrapped() -> dict[str, Any]:
    """The file as `ray up` completes it before it starts the head."""
    from ray.autoscaler._private.aws.config import bootstrap_aws
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(written())
    validate_config(config)
    return dict(bootstrap_aws(config))


def test_rays_schema_takes_the_file_and_refuses_a_misspelt_one():
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(written()))
    wrong = copy.deepcopy(written())
    wrong["worker_setup_comands"] = wrong.pop("worker_setup_commands")
    with pytest.raises(ValidationError, match="worker_setup_comands"):
        validate_config(prepare_config(wrong))


@pytest.mark.parametrize("name", ["ray-cluster", "ray-up-local"])
def test_every_host_has_the_token_fixed_ports_and_workers_at_normal_priority(name: str):
    config = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    starts = [config[f"{kind}_start_ray_commands"][-1] for kind in ("head", "worker")]
    for start in starts:
        assert "RAY_AUTH_MODE=token" in start and "RAY_worker_niceness=0" in start
        for port in ("node-manager", "object-manager", "runtime-env-agent", "metrics-export", "max-worker"):
            assert re.search(rf"--{port}-port=\d+", start), port
    assert "--port=6379" in starts[0] and "--address=$RAY_HEAD_IP:6379" in starts[1]


def test_rays_aws_code_uses_a_security_group_of_our_own_as_it_is(aws: Any):
    vpc = aws.describe_vpcs()["Vpcs"][0]["VpcId"]
    group = aws.create_security_group(GroupName="kvrelay", Description="kvrelay", VpcId=vpc)["GroupId"]
    itself = [{"GroupId": group}]
    rules = [
        {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "203.0.113.7/32"}]},
        {"IpProtocol": "tcp", "FromPort": 6379, "ToPort": 6384, "UserIdGroupPairs": itself},
    ]
    aws.authorize_security_group_ingress(GroupId=group, IpPermissions=rules)
    config = bootstrapped()
    for node_type in config["available_node_types"].values():
        assert node_type["node_config"]["SecurityGroupIds"] == [group]
    (found,) = aws.describe_security_groups(GroupIds=[group])["SecurityGroups"]
    opened = {(rule["FromPort"], rule["ToPort"]) for rule in found["IpPermissions"]}
    assert opened == {(22, 22), (6379, 6384)}


def test_rays_aws_code_makes_a_group_key_role_and_machines_where_there_are_none(aws: Any):
    import boto3
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler.tags import TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

    config = bootstrapped()
    key = Path(config["auth"]["ssh_private_key"])
    assert key.is_file() and key.stat().st_mode & 0o777 == 0o600
    head, gpu = (config["available_node_types"][name]["node_config"] for name in ("head", "gpu"))
    head = {**head, **config["head_node"]}  # as Ray puts them together when it starts the head
    assert head["SubnetIds"] and head["KeyName"] == gpu["KeyName"]
    assert head["ImageId"] == gpu["ImageId"] == "ami-YOURS"  # to be filled in: Ray's own default is too old for kvrelay
    role = head["IamInstanceProfile"]["Arn"].rpartition("/")[2]
    assert boto3.client("iam").get_instance_profile(InstanceProfileName=role)["InstanceProfile"]["Roles"]
    assert "IamInstanceProfile" not in gpu  # the head alone may start machines
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    for name, node in (("head", head), ("gpu", gpu), ("gpu", gpu)):
        provider.create_node(node, {TAG_RAY_NODE_KIND: name, TAG_RAY_USER_NODE_TYPE: name}, 1)
    machines = [one for group in aws.describe_instances()["Reservations"] for one in group["Instances"]]
    assert sorted(one["InstanceType"] for one in machines) == ["g6.4xlarge", "g6.4xlarge", "m6i.2xlarge"]
    assert {group["GroupName"] for one in machines for group in one["SecurityGroups"]} == {"kvrelay"}
    workers = provider.non_terminated_nodes({TAG_RAY_USER_NODE_TYPE: "gpu"})
    provider.terminate_nodes(provider.non_terminated_nodes({}))  # as `ray down`
    assert len(workers) == 2 and not provider.non_terminated_nodes({})
