"""Flame graphs without further packages: a thread that samples another one's stack, and a self-contained HTML page.

Weights are seconds: each sample counts for the time since the one before it, so that durations are right even when the
sampler had to wait for the interpreter's lock.
"""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from kvrelay.errors import ConfigError

Stack = tuple[str, ...]  # outermost first
_PAGE = Path(__file__).parent / "flame.html"
_SWITCH_S = 5e-6  # otherwise a sample waits until the sampled thread releases the lock, mostly inside a kernel
_MOST_FRAMES = 100


class StackSampler:
    """Samples the stack of one thread every `period_s` between `start` and `stop`."""

    def __init__(self, thread_id: int, period_s: float = 0.0005) -> None:
        self._thread_id, self._period_s = thread_id, period_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stack-sampler", daemon=True)
        self.seconds: Counter[Stack] = Counter()  # read it after `stop`
        self.num_samples = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when no more samples are taken."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        last_s = time.perf_counter()
        while not self._stopping.wait(self._period_s):
            frame = sys._current_frames().get(self._thread_id)
            now_s = time.perf_counter()
            if frame is not None:
                self.seconds[stack_of(frame)] += now_s - last_s  # type: ignore[assignment]
                self.num_samples += 1
            last_s = now_s


@contextmanager
def sampled(thread_id: int, period_s: float = 0.0005) -> Iterator[StackSampler]:
    """Sample a thread inside the context. Threads switch faster meanwhile, process-wide."""
    sampler, before_s = StackSampler(thread_id, period_s), sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()
        sys.setswitchinterval(before_s)


def stack_of(frame: FrameType | None) -> Stack:
    """The frames' names, outermost first."""
    names: list[str] = []
    while frame is not None and len(names) < _MOST_FRAMES:
        code = frame.f_code
        names.append(f"{Path(code.co_filename).stem}:{code.co_qualname}")
        frame = frame.f_back
    return tuple(reversed(names))


def frames_under(seconds: Mapping[Stack, float], function: str) -> dict[Stack, float]:
    """Stacks that pass through a frame whose name ends in `function`, from the frame that it calls on."""
    cut: Counter[Stack] = Counter()
    for stack, value in seconds.items():
        at = next((index for index, name in enumerate(stack) if name.endswith(function)), None)
        if at is not None and at + 1 < len(stack):
            cut[stack[at + 1 :]] += value  # type: ignore[assignment]
    return dict(cut)


def tree_of(seconds: Mapping[Stack, float], name: str) -> dict[str, Any]:
    """{"name", "value", "children"}, nested; a value is the seconds of a frame with all that it calls."""
    root: dict[str, Any] = {"name": name, "value": 0.0, "children": {}}
    for stack, value in sorted(seconds.items()):
        node = root
        node["value"] += value
        for frame in stack:
            node = node["children"].setdefault(frame, {"name": frame, "value": 0.0, "children": {}})
            node["value"] += value
    return _listed(root)


def _listed(node: dict[str, Any]) -> dict[str, Any]:
    return {**node, "children": [_listed(child) for child in node["children"].values()]}


def page(title: str, trees: list[dict[str, Any]], notes: list[str]) -> str:
    """The HTML: a tree can be chosen by its name; `notes` are shown under the title of the tree of the same index."""
    data = json.dumps({"title": title, "trees": trees, "notes": notes}).replace("<", "\\u003c")
    return _PAGE.read_text().replace("/*DATA*/null", data)


def write_page(file: Path, title: str, trees: list[dict[str, Any]], notes: list[str]) -> None:
    """Raises ConfigError: the file cannot be written."""
    try:
        file.write_text(page(title, trees, notes))
    except OSError as error:
        raise ConfigError(f"--flame {file}: {error.strerror}") from error
