"""The examples of README and docs, run as they stand there against a whole ingress over HTTP."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.conftest import MODEL

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ADDRESS = re.compile(r"(http://)?(localhost|127\.0\.0\.1):8000")


def blocks(language):
    """Every fenced block of a language: (page, text)."""
    for page in PAGES:
        for text in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL):
            yield str(page.relative_to(ROOT)), text


def curls():
    """Every curl command of the docs, one for each; not those that pipe into another program."""
    for page, text in blocks("bash"):
        for command in re.findall(r"^curl (?:.*\\\n)*.*$", text, re.MULTILINE):
            if "/metrics" not in command:
                yield pytest.param(command, id=f"{page}: {command.split()[-1][:20]}")


async def run(*command):
    """What a command printed; it must succeed."""
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", list(curls()))
async def test_a_curl_command_of_the_docs_gets_an_answer(command, make_cluster, serve_http):
    cluster = await make_cluster()
    url = await serve_http(cluster.app)
    answer = await run("bash", "-c", ADDRESS.sub(url, command) + " --fail-with-body --silent")
    assert answer and '"error"' not in answer
    assert "-N" not in command or answer.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("page, text", list(blocks("python")))
async def test_a_python_example_of_the_docs_prints_an_answer(page, text, make_cluster, serve_http):
    cluster = await make_cluster()
    url = await serve_http(cluster.app)
    program = ADDRESS.sub(url, text).replace("smollm2-135m-instruct", MODEL)
    assert (await run(sys.executable, "-c", program)).strip()


def test_the_docs_have_examples():
    assert len(list(curls())) >= 5 and list(blocks("python"))
