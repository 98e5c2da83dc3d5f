"""The docs name what there is: links, files, settings and commands in them exist."""

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from kvrelay.config import Settings, settings_from

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECTIONS = Settings.model_fields


def settings():
    """Every `section.key`."""
    return {
        f"{name}.{key}" for name, field in SECTIONS.items() for key in getattr(field.annotation, "model_fields", {})
    }


def missing_links(page, text):
    """Relative links that lead nowhere."""
    targets = re.findall(r"\]\((?!https?:|#)([^)\s#]+)", text)
    return [target for target in targets if not (page.parent / target).exists()]


def unknown_settings(text):
    """Backticked `section.key` whose section exists and whose key does not."""
    named = re.findall(r"`([a-z]+)\.([a-z_]+)(?=[`:= ])", text)
    return [f"{name}.{key}" for name, key in named if name in SECTIONS and f"{name}.{key}" not in settings()]


def missing_files(text):
    """Backticked paths below a folder of ours that are not there."""
    named = re.findall(r"`((?:[a-z_]+/)+[a-zA-Z0-9_.-]*[a-z0-9]/?)[`:]", text)
    tops = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."}
    return [name for name in named if name.split("/")[0] in tops and not (ROOT / name).exists()]


def unknown_commands(text, known):
    prose, fences = re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.findall(r"```.*?```", text, re.DOTALL)
    code = re.findall(r"`[^`\n]+`", prose) + re.findall(r"^kvrelay .*$", "\n".join(fences), re.MULTILINE)
    named = set(re.findall(r"kvrelay ([a-z]+)(?= |`|$)", "\n".join(code)))
    return sorted(named - known)


def examples(language):
    """(page, text) of every fenced block of a language."""
    fenced = re.compile(rf"```{language}\n(.*?)```", re.DOTALL)
    return [(str(page.relative_to(ROOT)), text) for page in PAGES for text in fenced.findall(page.read_text())]


def flags_in_examples():
    """command -> its `--flags` in the docs' shell examples."""
    found = defaultdict(set)
    for _, text in examples("bash"):
        for command, rest in re.findall(r"^kvrelay ([a-z]+)([^#\n]*)", text, re.MULTILINE):
            found[command] |= set(re.findall(r"--[a-z-]+", rest))
    return found


def help_of(*words):
    done = subprocess.run(
        [sys.executable, "-m", "kvrelay.cluster.commands.cli", *words, "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "200"},
    )
    return done.stdout


@pytest.fixture(scope="module")
def commands():
    """The words of `kvrelay --help`, the commands among them."""
    return set(help_of().split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page, commands):
    text = page.read_text()
    assert missing_links(page, text) == []
    assert unknown_settings(text) == []
    assert missing_files(text) == []
    assert unknown_commands(text, commands) == []


def test_what_does_not_exist_is_seen(commands):
    text = "[a](nowhere.md) `engine.no_such_key` `engine/step/no_such_file.py` `kvrelay dance`"
    assert missing_links(ROOT / "README.md", text) == ["nowhere.md"]
    assert unknown_settings(text) == ["engine.no_such_key"]
    assert missing_files(text) == ["engine/step/no_such_file.py"]
    assert unknown_commands(text, commands) == ["dance"]


@pytest.mark.parametrize("page, text", examples("yaml"))
def test_the_settings_in_examples_are_accepted(page, text):
    data = yaml.safe_load(text)
    for settings in [app["args"] for app in data["applications"]] if "applications" in data else [data]:
        settings_from(settings)


@pytest.mark.slow
def test_the_flags_in_examples_exist():
    for command, flags in flags_in_examples().items():
        known = set(re.findall(r"--[a-z-]+", help_of(command)))
        assert flags <= known, command
    assert "--no-such-flag" not in known


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
