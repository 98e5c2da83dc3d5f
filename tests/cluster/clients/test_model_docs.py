"""The examples of the pages on structured output, tools and reasoning, as they stand there, with a model that has them:
random weights, Qwen 3's chat format.
"""

import re
import sys

import pytest

from tests.checkpoints import chat_checkpoint
from tests.docs_examples import ADDRESS, NEED_A_MODEL, blocks, curls, run, run_curl
from tests.small_cluster import served_cluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
MODELS = re.compile(r"""(["'])(smollm2-135m-instruct|Qwen/[\w.-]+|qwen[\w.-]+)\1""", re.IGNORECASE)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with served_cluster(chat_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3")) as url:
        yield url.removesuffix("/v1")


@pytest.mark.parametrize("command", list(curls(NEED_A_MODEL)))
async def test_a_curl_command_gets_an_answer(command, url):
    await run_curl(MODELS.sub(r"\1tiny\1", command), url)


@pytest.mark.parametrize("page, text", list(blocks("python", NEED_A_MODEL)))
async def test_a_python_example_prints_an_answer(page, text, url):
    assert (await run(sys.executable, "-c", ADDRESS.sub(url, MODELS.sub(r"\1tiny\1", text)))).strip()
