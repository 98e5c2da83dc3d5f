"""Packages are the folders that hold Python files: `kvrelay/` itself, and each top-level folder as
`kvrelay.<folder>`.
"""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
FOLDERS = ("kernels", "kvcache", "engine", "kvtransfer", "prefill", "decode", "router", "serve", "cluster")


def packages() -> list[str]:
    files = [path.relative_to(ROOT) for top in ("kvrelay", *FOLDERS) for path in (ROOT / top).rglob("*.py")]
    return sorted(
        {
            ".".join(path.parent.parts if path.parts[0] == "kvrelay" else ("kvrelay", *path.parent.parts))
            for path in files
        }
    )


setup(packages=packages(), package_dir={"kvrelay": "kvrelay", **{f"kvrelay.{name}": name for name in FOLDERS}})
