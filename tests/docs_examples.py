"""The examples of README and docs: their text, and how one is run against another address."""

import asyncio
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NEED_A_MODEL = [ROOT / "docs" / f"{name}.md" for name in ("structured-output", "tools", "reasoning")]
PAGES = [ROOT / "README.md", *sorted(set((ROOT / "docs").rglob("*.md")) - set(NEED_A_MODEL))]
ADDRESS = re.compile(r"(http://)?(localhost|127\.0\.0\.1):8000")


def blocks(language: str, pages: Sequence[Path] = PAGES) -> Iterator[tuple[str, str]]:
    """Every fenced block of a language: (page, text)."""
    for page in pages:
        text = page.read_text() if page.is_file() else ""
        for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL):
            yield str(page.relative_to(ROOT)), block


def curls(pages: Sequence[Path] = PAGES) -> Iterator[object]:
    """Every curl command of the docs, one parameter for each; not those that pipe into another program."""
    for page, text in blocks("bash", pages):
        for command in re.findall(r"^curl (?:\\\n|'[^']*'|[^\n'])*$", text, re.MULTILINE):
            if "/metrics" not in command:
                yield pytest.param(command, id=f"{page}: {command.split()[-1][:20]}")


async def run(*command: str) -> str:
    """What a command printed; it must succeed."""
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def run_curl(command: str, url: str) -> str:
    """The answer to a curl command of the docs, sent to `url`; an error fails."""
    answer = await run("bash", "-c", ADDRESS.sub(url, command) + " --fail-with-body --silent")
    assert answer and '"error"' not in answer
    assert "-N" not in command or answer.endswith("data: [DONE]\n\n")
    return answer
