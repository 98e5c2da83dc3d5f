"""The Dockerfile and compose.yaml, as far as they can be checked without a container runtime.

Stages fit together, what is copied is in the build context, the images have no compiler and no rights, and compose's
services match the image, the deployed file and our shutdown.
"""

import fnmatch
import json
import re
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvrelay.config import settings_from

ROOT = Path(__file__).resolve().parents[2]
COMPILERS = re.compile(r"\b(gcc|g\+\+|clang|build-essential|ninja-build|cmake|nvcc|[\w.]+-dev)\b")


class Stage:
    """One FROM with what follows: `steps` as (instruction, the rest of the line)."""

    def __init__(self, base: str, name: str) -> None:
        self.base, self.name = base, name
        self.steps: list[tuple[str, str]] = []

    def of(self, *instructions: str) -> list[str]:
        return [rest for instruction, rest in self.steps if instruction in instructions]


KNOWN = {"ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "HEALTHCHECK", "LABEL", "RUN", "SHELL"}
KNOWN |= {"STOPSIGNAL", "USER", "VOLUME", "WORKDIR"}


def stages(text: str) -> dict[str, Stage]:
    """Of a Dockerfile, by name. Raises ValueError: an unknown instruction, or a stage that is not above."""
    found: dict[str, Stage] = {}
    lines = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))
    arguments: dict[str, str] = {}
    for line in filter(str.strip, lines.splitlines()):
        instruction, _, rest = line.strip().partition(" ")
        rest = re.sub(r"\s+", " ", rest).strip()
        if instruction == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()  # type: ignore[union-attr]
            base = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], base)
            found[name] = Stage(base, name)
        elif instruction == "ARG" and not found:
            arguments.update([rest.split("=", 1)])  # type: ignore[list-item]
        elif instruction not in KNOWN:
            raise ValueError(f"{instruction} is no instruction")
        else:
            for source in re.findall(r"--from=(\S+)", rest) if instruction == "COPY" else ():
                if source not in found or source == name:
                    raise ValueError(f"COPY --from={source}: no such stage above")
            found[name].steps.append((instruction, rest))
    return found


def whole(found: dict[str, Stage], name: str) -> list[Stage]:
    """A stage and those that it is built on."""
    stage = found[name]
    return [*(whole(found, stage.base) if stage.base in found else ()), stage]


@pytest.fixture(scope="module")
def dockerfile() -> dict[str, Stage]:
    return stages((ROOT / "Dockerfile").read_text())


IMAGES = ("cpu", "cuda")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_no_compiler_and_no_rights(dockerfile, image):
    chain = whole(dockerfile, image)
    for stage in chain:
        assert not [step for step in stage.of("RUN") if COMPILERS.search(step)]
    assert chain[0].base == "ubuntu:24.04"  # a fixed release, and not NVIDIA's devel image
    users = [user for stage in chain for user in stage.of("USER")]
    assert users and re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])
    (entry,) = [step for stage in chain for step in stage.of("ENTRYPOINT")]
    assert entry == '["tini", "--"]'  # the server is its child: signals reach it
    assert [step for stage in chain for step in stage.of("HEALTHCHECK")]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_gets_its_kernels_from_a_stage_with_a_compiler(dockerfile, image):
    (copied,) = dockerfile[image].of("COPY")
    source = re.match(r"--from=(\S+) (\S+) (\S+)", copied)
    assert source is not None and source[2] == source[3] == "/opt/kvrelay"  # a venv works at its own path alone
    build = dockerfile[source[1]]
    steps = build.of("RUN")
    assert any(COMPILERS.search(step) for step in steps)
    assert "kvrelay prepare --cpu all" in steps
    assert any("--arch" in step and "data/aot" in step for step in steps) == (image == "cuda")
    installed = " ".join(step for stage in (build, *whole(dockerfile, image)) for step in stage.of("RUN"))
    assert set(re.findall(r"python3\.\d+", installed)) == {"python3.12"}  # one interpreter in both stages


@pytest.mark.parametrize(
    ("old", "new"),
    [("--from=build-cpu", "--from=build-cpux"), ("ENTRYPOINT", "ENTRYPOIN"), ("AS build-cuda", "AS build-gpu")],
)
def test_a_broken_dockerfile_is_refused(old, new):
    text = (ROOT / "Dockerfile").read_text()
    assert old in text
    with pytest.raises(ValueError, match=r"no such stage|is no instruction"):
        stages(text.replace(old, new))


def in_context(path: str) -> bool:
    """Whether .dockerignore lets a file of the repository through: the last line that matches decides."""
    is_in = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip().lstrip("!")
        if not pattern or pattern.startswith("#"):
            continue
        parts = path.split("/")
        names = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        if any(fnmatch.fnmatch(name, pattern.removeprefix("**/")) or fnmatch.fnmatch(name, pattern) for name in names):
            is_in = line.strip().startswith("!")
    return is_in


def test_the_build_context_is_what_is_installed_and_nothing_private():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("no git checkout")
    context = {path.split("/")[0] for path in tracked.stdout.split() if in_context(path)}
    setup = (ROOT / "setup.py").read_text()
    folders = set(re.findall(r'"(\w+)"', setup[setup.index("FOLDERS") : setup.index(")", setup.index("FOLDERS"))]))
    assert context == {*folders, "kvrelay", "configs", "LICENSE", "README.md", "pyproject.toml", "setup.py"}
    assert not any(
        map(in_context, ["secrets/kvrelay_secret", ".git/config", ".venv/bin/python", "kvrelay/__pycache__/x.pyc"])
    )


# ---- compose.yaml


COMPOSE = json.loads((resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text())


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "compose.yaml").read_text()))


def test_the_compose_specifications_own_schema_accepts_the_file_and_refuses_a_misspelt_field():
    jsonschema.validate(compose(), COMPOSE)
    for service, field in (("head", "command"), ("decode", "stop_grace_period"), ("gpu", "secrets")):
        wrong = compose()
        wrong["services"][service] = {**wrong["services"][service]}
        wrong["services"][service][field + "x"] = wrong["services"][service].pop(field)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, COMPOSE)


def test_services_fit_the_image_the_deployed_file_and_our_shutdown(dockerfile):
    from kvrelay.cluster.deployments.app import worker_options

    data = compose()
    services = data["services"]
    deployed = yaml.safe_load((ROOT / "configs/containers.yaml").read_text())["applications"][0]
    shutdown_s = worker_options(settings_from(deployed["args"]))["graceful_shutdown_timeout_s"]
    wanted = {role for one in deployed["deployments"] for role in one["ray_actor_options"]["resources"]}
    offered: set[str] = set()
    for name, service in services.items():
        assert service["build"]["target"] in dockerfile and service["image"] == f"kvrelay:{service['build']['target']}"
        assert set(service["secrets"]) == set(data["secrets"]) and service["cap_drop"] == ["ALL"]
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
        files = [part for part in service["command"] if part.startswith("/etc/kvrelay/")]
        assert files and all((ROOT / "configs" / Path(file).name).is_file() for file in files)
        if name.startswith("deploy"):
            continue
        grace_s = float(service["stop_grace_period"].removesuffix("s"))
        drain_s = float(service["environment"]["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert drain_s <= grace_s - 20
        assert drain_s >= shutdown_s + 10 or name == "head"
        for part in service["command"]:
            if part.startswith("--resources=") and "profiles" not in service:
                offered |= set(yaml.safe_load(part.removeprefix("--resources=")))
    assert offered == wanted
    assert [name for name, one in services.items() if "profiles" in one] == ["gpu", "deploy-gpu"]
    assert all(port.startswith("127.0.0.1:") for port in services["head"]["ports"])  # no TLS: for this machine


def test_secrets_reach_a_node_by_the_names_that_it_reads():
    script = (ROOT / "configs/ray-node.sh").read_text()
    names = re.search(r"for variable in ([A-Z_ ]+);", script)
    assert names is not None
    assert {name.lower().rpartition("_")[0] for name in names[1].split()} == set(compose()["secrets"])
    assert subprocess.run(["bash", "-n", ROOT / "configs/ray-node.sh"]).returncode == 0
