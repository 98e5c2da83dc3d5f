"""The rules of a room: few modules in a folder, one arrow list per folder, small classes, names that are used once."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("kvrelay", "kernels", "kvcache", "engine", "kvtransfer", "prefill", "decode", "router", "serve", "cluster")
MOST_MODULES, MOST_METHODS, MOST_ATTRIBUTES = 15, 25, 12
NO_INIT = {"kernels"}  # see test_kernels_is_no_regular_package


def folders_with_code(*tops):
    """Folders (relative to the root) that hold Python files."""
    return sorted({path.parent.relative_to(ROOT) for top in tops for path in (ROOT / top).rglob("*.py")})


def modules(folder):
    return sorted(path for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py")


@cache
def parsed(path):
    return ast.parse(path.read_text())


@pytest.mark.parametrize("folder", folders_with_code(*TOPS, "bench", "tests"), ids=str)
def test_a_folder_holds_at_most_fifteen_modules(folder):
    assert len(modules(folder)) <= MOST_MODULES


# ---- arrows


def room_of(module):
    """The folder, as `top/room`, that a dotted module of ours lies in; None for other projects' modules."""
    parts = module.split(".")
    if parts[0] != "kvrelay":
        return None
    parts = parts[1:] if len(parts) > 1 and parts[1] in TOPS[1:] else parts
    while parts and not (ROOT.joinpath(*parts).is_dir() and any(ROOT.joinpath(*parts).glob("*.py"))):
        parts = parts[:-1]
    return "/".join(parts) or None


def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(folder, trees):
    """What the modules of a room import: other top-level folders, and rooms of its own top-level folder."""
    top = folder.split("/")[0]
    rooms = {room_of(module) for tree in trees for module in imported_modules(tree)} - {None, folder}
    return {room if room.split("/")[0] == top else room.split("/")[0] for room in rooms} - {
        "kvrelay" if top == "kvrelay" else ""
    }


def declared(docstring):
    """What the sentence "May import …" of a room's docstring lists."""
    sentence = re.search(r"May import ([^.]+)\.", docstring or "")
    return {name.strip() for name in sentence[1].split(",")} if sentence else set()


@pytest.mark.parametrize("folder", [str(f) for f in folders_with_code(*TOPS) if str(f) not in NO_INIT])
def test_a_room_says_what_it_is_for_and_imports_only_what_it_lists(folder):
    docstring = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text()))
    assert docstring, f"{folder}/__init__.py has no docstring"
    assert "May import" in docstring or re.search(r"[Ii]mports nothing of ours", docstring)
    assert arrows(folder, [parsed(path) for path in modules(folder)]) <= declared(docstring)


@pytest.mark.parametrize("top", ["engine", "kvtransfer"])
def test_rooms_of_one_folder_import_each_other_in_one_direction(top):
    rooms = [str(folder) for folder in folders_with_code(top)]
    left = {room: arrows(room, [parsed(path) for path in modules(room)]) & set(rooms) for room in rooms}
    while left:
        lowest = [room for room, targets in left.items() if not targets & left.keys()]
        assert lowest, f"a cycle among {sorted(left)}"
        left = {room: targets for room, targets in left.items() if room not in lowest}


def test_an_undeclared_arrow_is_seen():
    tree = ast.parse("from kvrelay.engine.step.engine import Engine\nfrom kvrelay.plane import messages")
    assert arrows("engine/worker", [tree]) == {"engine/step", "kvrelay"}
    assert declared("A room.\n\nMay import kvrelay, engine/models.") == {"kvrelay", "engine/models"}


# ---- classes


def classes():
    """Every class of the source: (file, node)."""
    for folder in folders_with_code(*TOPS):
        for path in modules(folder):
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.ClassDef):
                    yield str(path.relative_to(ROOT)), node


def size_of(node):
    """(methods, attributes) of a class: functions in its body; fields, and names that its methods assign on self."""
    methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    assigned = {
        one.attr
        for method in methods
        for one in ast.walk(method)
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and getattr(one.value, "id", "") == "self"
    }
    return len(methods), len(fields | assigned)


def too_large(node):
    """Whether a class has more methods or attributes than allowed, and its docstring does not speak of that. Settings
    are records.
    """
    num_methods, num_attributes = size_of(node)
    is_record = num_methods <= 3 or any("Section" in ast.unparse(base) for base in node.bases)
    is_large = num_methods > MOST_METHODS or (num_attributes > MOST_ATTRIBUTES and not is_record)
    return is_large and not re.search(r"\b(methods?|attributes|large)\b", ast.get_docstring(node) or "", re.IGNORECASE)


def test_classes_are_small_or_say_why():
    found = [f"{file}: {node.name} {size_of(node)}" for file, node in classes() if too_large(node)]
    assert found == []


def test_a_large_class_is_seen():
    body = "\n".join(f"    def f{i}(self): self.a{i} = 1" for i in range(26))
    assert too_large(ast.parse(f"class A:\n{body}").body[0])
    assert not too_large(ast.parse(f'class A:\n    """One of its methods per message."""\n{body}').body[0])


def test_a_public_class_name_is_used_once():
    files = defaultdict(list)
    for file, node in classes():
        if not node.name.startswith("_"):
            files[node.name].append(file)
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


# ---- backends answer for themselves


@pytest.mark.parametrize("top", [top for top in TOPS if top != "kernels"])
def test_no_code_outside_kernels_asks_which_backend_it_has(top):
    found = []
    for path in sorted((ROOT / top).rglob("*.py")):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance" and len(node.args) == 2:
                if "Backend" in ast.unparse(node.args[1]):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
            elif isinstance(node, ast.Compare) and re.search(
                r"backend\.name ==|\.name == ['\"](cuda|cpu)", ast.unparse(node)
            ):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []
