"""What a section of bench/gpu/gpu.py gets, and how its rows reach the driver: JSON lines, once they are known."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch


class LeftOut(Exception):
    """This section cannot run here; the message says why. No failure."""


@dataclass(frozen=True, slots=True)
class Context:
    """One section's order. Sizes are the real ones, or with `tiny` such as a CPU does in seconds.

    rehearse: the device computes nothing and its memory is the host's; models are narrow. limit_s: what the driver
    grants it. limits: what section "limits" measured, by name. model: folder of a real checkpoint, or None.
    """

    device: str  # "cuda" | "cpu"
    tiny: bool
    scratch: Path
    rows_file: Path
    limits: dict[str, float] = field(default_factory=dict)
    model: str | None = None
    limit_s: float = 60.0
    rehearse: bool = False
    began_s: float = field(default_factory=time.monotonic)

    @classmethod
    def from_json(cls, text: str) -> "Context":
        order = json.loads(text)
        return cls(**{**order, "scratch": Path(order["scratch"]), "rows_file": Path(order["rows_file"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @property
    def left_s(self) -> float:
        """Until the driver ends this section."""
        return self.limit_s - (time.monotonic() - self.began_s)

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def add(self, **row: Any) -> None:
        """One row of the section's table, kept whatever happens next. "ok": whether what it checks holds."""
        with self.rows_file.open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")
        print(row, flush=True)

    def share_of(self, limit: str, rate: float) -> float | None:
        """`rate` as a share of a measured limit in the same unit; None when that was not measured."""
        known = self.limits.get(limit)
        return rate / known if known else None

    def room(self, size: int) -> int:
        """Bytes of device memory to take where `size` is wanted."""
        return min(size, 1 << 30) if self.rehearse else size

    def synchronize(self) -> None:
        """Wait until the device has finished all launched work."""
        if self.is_cuda:
            torch.cuda.synchronize()
