"""The examples of README and docs, run as they stand there against a whole ingress over HTTP.

Those that show what a model's output holds run in tests/cluster/clients/test_model_docs.py.
"""

import sys

import pytest

from tests.docs_examples import ADDRESS, blocks, curls, run, run_curl
from tests.serve.conftest import MODEL


@pytest.mark.parametrize("command", list(curls()))
async def test_a_curl_command_of_the_docs_gets_an_answer(command, make_cluster, serve_http):
    cluster = await make_cluster()
    await run_curl(command.replace("smollm2-135m-instruct", MODEL), await serve_http(cluster.app))


@pytest.mark.parametrize("page, text", list(blocks("python")))
async def test_a_python_example_of_the_docs_prints_an_answer(page, text, make_cluster, serve_http):
    cluster = await make_cluster()
    url = await serve_http(cluster.app)
    program = ADDRESS.sub(url, text).replace("smollm2-135m-instruct", MODEL)
    assert (await run(sys.executable, "-c", program)).strip()


def test_the_docs_have_examples():
    assert len(list(curls())) >= 5 and list(blocks("python"))
