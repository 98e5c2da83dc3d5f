"""`fmt: skip` is for tables only: everything else has the formatter's layout."""

import ast
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[2]
SKIP = "# fmt: " + "skip"
LITERALS = (ast.List, ast.Tuple, ast.Set, ast.Dict)


def is_table(node, line):
    """An assigned literal, or a decorator with one (the rows of a parametrised test)."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return isinstance(node.value, LITERALS)
    for decorator in getattr(node, "decorator_list", []):
        if decorator.lineno <= line <= decorator.end_lineno and isinstance(decorator, ast.Call):
            return any(isinstance(argument, LITERALS) for argument in decorator.args)
    return False


def skips_without_a_table(text):
    """Numbers of the lines with a `fmt: skip` whose statement is no table."""
    lines = [number for number, line in enumerate(text.splitlines(), 1) if SKIP in line]
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)] if lines else []
    return [line for line in lines if not is_table(innermost(statements, line), line)]


def innermost(statements, line):
    def first(node):
        return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])

    return max((node for node in statements if first(node) <= line <= node.end_lineno), key=first)


def test_only_tables_have_a_layout_of_their_own():
    files = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split()
    found = {name: skips_without_a_table((ROOT / name).read_text()) for name in files if (ROOT / name).exists()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_call_with_a_layout_of_its_own_is_found():
    assert skips_without_a_table(f"ROWS = [\n    (1, 2),\n]  {SKIP}\n") == []
    assert skips_without_a_table(f"def f():\n    g(\n        1,\n    )  {SKIP}\n") == [4]
