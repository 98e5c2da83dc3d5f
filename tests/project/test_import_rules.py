"""design.md's table of who may import whom, held against the syntax tree of every file (TYPE_CHECKING included)."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure


ROOT = Path(__file__).resolve().parents[2]

MAY_IMPORT = {
    "kvrelay": set(),
    "kernels": {"kvrelay"},
    "kvcache": {"kvrelay"},
    "engine": {"kvrelay", "kernels", "kvcache"},
    "kvtransfer": {"kvrelay"},
    "prefill": {"engine", "kvtransfer", "kvrelay"},
    "decode": {"engine", "kvtransfer", "kvrelay"},
    "router": {"kvrelay"},
    "serve": {"kvrelay", "router"},
    "cluster": {"kvrelay", "kernels", "kvcache", "engine", "kvtransfer", "prefill", "decode", "router", "serve"},
}

IMPURE = {
    "torch", "ray", "transformers", "nixl", "nixl_cu12", "nixl_cu13",  # heavy or device-bound
    "socket", "asyncio", "aiohttp", "http", "urllib", "ssl", "select", "selectors",  # network
    # clock, chance, tasks
    "time", "datetime", "random", "secrets", "uuid", "threading", "multiprocessing", "subprocess",
    "os", "mmap", "ctypes", "tempfile", "pathlib", "io",  # the machine
}  # fmt: skip
MEMORY_OWNERS = {Path("kvcache/memory/storage.py"), Path("kvcache/memory/formats.py"), Path("kvcache/memory/host.py")}
TIERS = {  # own files, locks and threads; what they decide is in the pure files beside them
    Path("kvcache/stores/codecs.py"),
    Path("kvcache/stores/disk/tier.py"),
    Path("kvcache/stores/disk/folder.py"),
    Path("kvcache/stores/disk/records.py"),
    Path("kvcache/stores/disk/volume.py"),
    Path("kvcache/stores/store.py"),
    Path("kvcache/stores/fsspec.py"),
    Path("kvcache/memory/jobs.py"),
    Path("kvcache/stores/redis.py"),
    Path("kvcache/stores/sealing.py"),  # draws nonces
    Path("kvcache/stores/store.py"),
}
PURE_FILES = sorted(
    path.relative_to(ROOT)
    for pattern in (
        "router/**/*.py",
        "kvcache/**/*.py",
        "engine/scheduling/*.py",
        "engine/step/requests.py",
        "engine/step/reports.py",
        "cluster/store/node_quotas.py",
        "serve/tenants/key_file.py",
        "serve/tenants/quotas.py",
    )
    for path in ROOT.glob(pattern)
    if path.relative_to(ROOT) not in MEMORY_OWNERS | TIERS
)


def source_files(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def imports(tree):
    """Every (line, dotted module) that a file imports, wherever it stands; relative ones begin with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            if base == "kvrelay":  # from kvrelay import engine
                yield from ((node.lineno, f"kvrelay.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, base
        elif isinstance(node, ast.Call) and node.args and _is_dynamic_import(node.func):
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def _is_dynamic_import(function):
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def our_folder(module):
    """The folder of ours that a module belongs to, or None."""
    parts = module.split(".")
    if parts[0] != "kvrelay":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "kvrelay"


def violations(folder, source, name="f.py"):
    """What in this source breaks the rules for `folder`, one line each."""
    found = []
    for line, module in imports(ast.parse(source)):
        target = our_folder(module)
        if module.startswith("."):
            found.append(f"{name}:{line}: relative import of {module}")
        elif module.split(".")[0] in MAY_IMPORT.keys() - {"kvrelay"}:
            found.append(f"{name}:{line}: {module} must be imported as kvrelay.{module}")
        elif target is not None and target != folder and target not in MAY_IMPORT[folder]:
            found.append(f"{name}:{line}: {folder} must not import {target}")
    return found


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_what_the_table_allows(folder):
    files = source_files(folder)
    assert files, f"{folder}/ has no Python file"
    found = [line for path in files for line in violations(folder, path.read_text(), str(path.relative_to(ROOT)))]
    assert found == []


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("router", "from kvrelay.engine.execution.runner import Runner"),
        ("router", "from kvrelay import engine"),
        ("router", "import kvrelay.serve.api.app"),
        ("kvcache", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvrelay.engine import x"),
        ("serve", "def f():\n    import kvrelay.cluster.commands.cli"),
        ("serve", "import importlib\nimportlib.import_module('kvrelay.decode.worker')"),
        ("engine", "from .runner import Runner"),
        ("engine", "import kvcache.pool"),
        ("kvrelay", "from kvrelay.router.types import Decision"),
    ],
)
def test_the_rule_sees_a_violation(folder, source):
    assert len(violations(folder, source)) == 1


def test_the_table_has_no_cycle():
    order, left = [], dict(MAY_IMPORT)
    while left:
        ready = [folder for folder, targets in left.items() if targets <= set(order)]
        assert ready, f"a cycle among {sorted(left)}"
        order += ready
        left = {folder: targets for folder, targets in left.items() if folder not in ready}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "kvrelay" else ("kvrelay", *parts))
    return name.removesuffix(".__init__")


def test_no_modules_import_each_other_in_a_ring():
    files = {module_name(path): path for folder in MAY_IMPORT for path in source_files(folder)}
    graph = {}
    for name, path in files.items():
        targets = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets.update(f"{node.module}.{alias.name}" for alias in node.names)
                targets.add(node.module)
        graph[name] = (targets & files.keys()) - {name, "kvrelay"}
    assert ring(graph) is None


def ring(graph):
    """Modules that can never be loaded first, or None: what is left when leaves are taken off again and again."""
    left = {name: set(targets) for name, targets in graph.items()}
    while leaves := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in leaves}
    return sorted(left) or None


def test_a_ring_is_seen():
    assert ring({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    assert ring({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def top_level_names(tree):
    """Every name that a module binds, also under `if` and `try`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)


def missing_names(source, modules):
    """What this source imports from `modules` (name -> the names it binds) that is not there, one line each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            names = {alias.name for alias in node.names} - modules[node.module]
            yield from (f"{node.module}.{name}" for name in names if f"{node.module}.{name}" not in modules)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("kvrelay.", "bench.", "tests.")):
            paths = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (path for path in paths if not any(name.startswith(path) for name in modules))


def test_every_name_that_is_imported_exists():
    """Scripts that no test runs (most of bench/) do not break silently when a name moves."""
    files = {module_name(path): path for folder in MAY_IMPORT for path in source_files(folder)}
    files |= {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in ("bench", "tests")
        for path in source_files(folder)
    }
    modules = {name: set(top_level_names(ast.parse(path.read_text()))) for name, path in files.items()}
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files.values()
        for name in missing_names(path.read_text(), modules)
    }
    assert missing == set()


def test_a_name_that_has_gone_is_seen():
    modules = {"bench.figures": {"show"}, "bench.served": {"running_serve"}}
    assert list(missing_names("from bench.figures import show", modules)) == []
    assert list(missing_names("from bench import figures", modules)) == []
    assert list(missing_names("from bench.figures import shown", modules)) == ["bench.figures.shown"]
    assert list(missing_names("from bench.gone import show", modules)) == ["bench.gone.show"]


@pytest.mark.parametrize("path", PURE_FILES, ids=str)
def test_bookkeeping_is_pure(path):
    impure = {module for _, module in imports(ast.parse((ROOT / path).read_text())) if module.split(".")[0] in IMPURE}
    assert impure == set()


def test_kernels_is_no_regular_package():
    """With an __init__.py, transformers could take our folder for Hugging Face's `kernels` package."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT.keys() - {"kvrelay"}))
def test_an_init_file_holds_a_docstring_and_no_code(folder):
    for path in (ROOT / folder).rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        assert len(body) == 1, f"{path.relative_to(ROOT)} has code"
        assert isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
