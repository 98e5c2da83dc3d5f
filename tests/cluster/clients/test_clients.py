"""Public clients, unmodified, against a small cluster over HTTP: structured output, tools, agent loops.

The checks are those of `python -m bench.serving.clients`, which counts them with any server and model. Here the model
has random weights and a family's chat format, so that what an answer must hold comes from the constraints alone.
"""

import dataclasses

import pytest

from bench.serving import clients
from tests.checkpoints import chat_checkpoint
from tests.small_cluster import served_cluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

QUICK = ("openai parse", "openai stream", "openai tools", "langchain")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A server with Qwen 2.5's chat format."""
    with served_cluster(chat_checkpoint("qwen2.5", tmp_path_factory.mktemp("models") / "qwen2.5")) as url:
        one = clients.Target(url, "tiny", options={"temperature": 1.0, "seed": 4, "max_tokens": 2500})
        with one.http:
            yield one


@pytest.mark.parametrize("client, name", [(client, name) for client in QUICK for name in clients.CHECKS[client]])
def test_a_public_client_gets_what_it_promises_its_caller(client, name, target):
    if name == "Meeting":  # seed 4 draws a leap second: a date-time, but none of Python's
        target = dataclasses.replace(target, options=target.options | {"seed": 3})
    assert clients.outcomes(client, target, [name]) == {name: ""}


def test_the_checks_fail_where_outputs_are_not_constrained(target):
    """The control: the same requests, with text and a free choice asked for in the end."""
    options = target.options | {"max_tokens": 60}
    text = dataclasses.replace(target, options=options | {"extra_body": {"response_format": {"type": "text"}}})
    free = dataclasses.replace(target, options=options | {"extra_body": {"tool_choice": "auto"}})
    assert all(clients.outcomes("openai parse", text, ["Person", "Tree"]).values())
    assert all(clients.outcomes("openai tools", free, ["required", "one call only"]).values())
