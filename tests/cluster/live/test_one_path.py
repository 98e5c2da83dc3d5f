"""One request's way through the code: how many files it executes, and that architecture.md names functions that exist.

`pytest -s tests/cluster/live/test_one_path.py` prints the files that one streamed chat request executes, from its
arrival at the ingress to its last token, with the number of functions that ran in each.
"""

import ast
import contextlib
import re
import sys
import threading
from collections import defaultdict
from pathlib import Path

import httpx
import pytest

from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from tests.small_cluster import small_cluster

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[3]
MAX_FILES = 70
SETTINGS = {
    "model": {"dtype": "float32", "max_model_len": 1024},
    "engine": {"kv_memory": "4MiB", "num_threads": 1, "backend": "reference"},
    "transfer": {"transport": "shm"},
    "router": {"local_prefill_tokens": 0},
}


BY_THE_CLOCK = {"LivenessWatch.run", "ResidentAudit.sweep"}  # with what they call: no request causes it


class Tracer:
    """Records the functions of this repository that run while it is on, in every thread that starts under
    `watching`, without BY_THE_CLOCK.
    """

    def __init__(self) -> None:
        self.functions: dict[Path, set[str]] = defaultdict(set)
        self.is_on = False
        self._seen: set[object] = set()
        self._local = threading.local()

    def __call__(self, frame, event, arg) -> None:
        if event == "call" and frame.f_code.co_qualname in BY_THE_CLOCK:
            self._local.beside = frame
        if (beside := getattr(self._local, "beside", None)) is not None:
            if event == "return" and frame is beside:
                self._local.beside = None
            return
        if event != "call" or not self.is_on or frame.f_code in self._seen:
            return
        code = frame.f_code
        self._seen.add(code)
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT):
            name = path.relative_to(ROOT)
            if name.parts[0] not in ("tests", ".venv"):
                self.functions[name].add(code.co_qualname)

    @contextlib.contextmanager
    def watching(self):
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def report(self) -> str:
        lines = [f"{len(names):4} {path}: {_few(names)}" for path, names in sorted(self.functions.items())]
        num_functions = sum(map(len, self.functions.values()))
        return "\n".join([*lines, f"{num_functions} functions in {len(self.functions)} files"])


def _few(names: set[str]) -> str:
    return ", ".join(sorted(names)) if len(names) <= 4 else "..."


@contextlib.asynccontextmanager
async def one_of_each(folder):
    """The HTTP client of a small cluster's ingress, without a socket between them."""
    async with (
        small_cluster(folder, SETTINGS) as app,
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as client,
    ):
        yield client


async def stream_chat(client, text):
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {"x-kvrelay-prefill": "remote"}
    response = await client.post("/v1/chat/completions", json=body | {"stream": True}, headers=headers)
    assert response.status_code == 200, response.text
    assert response.text.endswith("data: [DONE]\n\n")


async def test_one_streamed_chat_request_runs_through_few_files(tmp_path):
    """Of ingress, prefill and decode together; load reports count if one is due meanwhile."""
    folder = tiny_checkpoint("llama", tmp_path / "tiny")
    tracer = Tracer()
    with tracer.watching():
        async with one_of_each(folder) as client:
            await stream_chat(client, "The first request of all loads what later ones find loaded. " * 2)
            tracer.is_on = True
            await stream_chat(client, "A request that comes to workers which are warm has one way to go. " * 2)
            tracer.is_on = False
    print(f"\n{tracer.report()}")
    assert len(tracer.functions) <= MAX_FILES
    assert any(path.parts[0] == "prefill" for path in tracer.functions)
    assert any(path.parts[0] == "decode" for path in tracer.functions)


def names_in(path):
    """Functions, classes and methods (Class.method) of a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            found |= {f"{node.name}.{one.name}" for one in node.body if hasattr(one, "name")}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return found


def missing(section):
    """The `file: name` references of a text that do not exist."""
    references = re.findall(r"`([a-z_/]+\.py): ([A-Za-z_.]+)`", section)
    assert len(references) > 20
    return [
        f"{file}: {name}"
        for file, name in references
        if not (ROOT / file).is_file() or name not in names_in(ROOT / file)
    ]


def test_the_way_of_a_request_is_described_with_names_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text[text.index("## One request") :].split("\n## ")[0]
    assert missing(section) == []
    assert missing(section.replace("RequestDriver.tokens", "RequestDriver.nothing")) != []
