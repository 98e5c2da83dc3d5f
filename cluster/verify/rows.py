"""What the files that add rows to `kvrelay verify` share: prompts, the report and its rows, and what runs a prompt."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvrelay.config import Settings
from kvrelay.decode.worker import DecodeWorker
from kvrelay.plane.messages import SequenceRequest
from kvrelay.types import KvLayout, KvMemory

if TYPE_CHECKING:
    import torch

    from kvrelay.cluster.launch.local import LocalCluster
    from kvrelay.decode.target import KvTarget


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt."""

    name: str
    token_ids: list[int]


Expect = Callable[[Path, Sequence[Case], int], list[list[int]]]
"""(folder, prompts, tokens) -> Hugging Face's tokens."""


@dataclass(slots=True)
class Row:
    """One way of serving: how many cases gave the expected tokens, and what went wrong first."""

    name: str
    passed: int = 0
    total: int = 0
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.passed == self.total and self.total > 0

    @property
    def wrong(self) -> int:
        return self.total - self.passed

    def count(self, case: str, expected: Sequence[int], got: Sequence[int]) -> None:
        self.total += 1
        if list(expected) == list(got):
            self.passed += 1
        elif not self.note:
            at = next((i for i, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1]), len(got))
            self.note = f"{case}: token {at} differs"

    def claim(self, *, holds: bool, note: str) -> None:
        self.total += 1
        self.passed += holds
        if not holds or not self.note:
            self.note = note

    def claim_changed(self, answers: "Row", *, also: bool = True) -> None:
        """A control: of `answers`, which count what must not be the same, one is not; and something else holds."""
        note = f"{answers.wrong} of {answers.total} answers changed"
        self.claim(holds=also and answers.wrong > 0, note=note if answers.wrong else "UNDETECTED: the same answers")


@dataclass(slots=True)
class Report:
    """What was compared and what came out."""

    model: str
    cases: list[str]
    rows: list[Row] = field(default_factory=list)
    device: str = "cpu"
    dtype: str = "float32"
    left_out: dict[str, str] = field(default_factory=dict)  # rows, or transports that the pool cannot use, and why

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    def row(self, name: str) -> Row:
        self.rows.append(Row(name))
        return self.rows[-1]


class Verifier(Protocol):
    """What rows use of verify.Verifier."""

    cases: list[Case]

    def add_row(self, name: str) -> Row: ...
    def expected(self, index: int) -> list[int]: ...
    def settings_over(self, transport: str, checks: str, **engine: Any) -> Settings: ...
    def request_of(self, case: Case) -> SequenceRequest: ...
    async def tokens_of(self, cluster: "LocalCluster", case: Case, force: Any = ...) -> tuple[list[int], int]: ...
    def flipped(self, cluster: "LocalCluster") -> AbstractContextManager[Callable[[], int]]: ...
    def tell(self, what: str) -> None: ...


def target_of(cluster: "LocalCluster") -> "KvTarget":
    """Where the decode worker of this process receives KV."""
    worker = cluster.inside[0]
    assert isinstance(worker, DecodeWorker)
    return worker.target


Change = Callable[["torch.Tensor", KvLayout], None]
"""(bytes of a region, layout of the pool) -> None: changes the bytes in place."""


@contextmanager
def tampering(target: "KvTarget", change: Change, *, most: int | None = None) -> Iterator[Callable[[], int]]:
    """Change the regions that `target` receives, `most` of them at most; yields a counter of those."""
    import torch

    count = 0

    def tamper(memory: KvMemory, offset: int, num_bytes: int) -> None:
        nonlocal count
        if count == most:
            return
        assert isinstance(memory.owner, torch.Tensor)  # through the tensor: a GPU's pool has no host view
        with torch.inference_mode():
            change(memory.owner.reshape(-1).view(torch.uint8)[offset : offset + num_bytes], memory.layout)
        count += 1

    target.tamper = tamper
    try:
        yield lambda: count
    finally:
        target.tamper = None
