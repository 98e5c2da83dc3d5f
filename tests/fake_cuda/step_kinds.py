"""The kinds of steps, what one of each costs on the host, and the table of it:
`tests/fake_cuda/run.sh --run tests.fake_cuda.step_kinds`."""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda import counters, engines

STALLS = ("device_waits", "stream_waits", "sync_copies")
PAGEABLE = ("pageable_to_device", "pageable_to_host")
_PLAINLY_DRAWN = {"temperature": 0.8, "seed": 3}
_DRAWN = _PLAINLY_DRAWN | {"top_p": 0.9, "top_k": 50}
_MASKED = {"allowed_token_ids": (7, 9, 31999)}  # a grammar's masks take the same way


@dataclass(frozen=True)
class StepKind:
    """Sequences that decode, and what one of their steps may cost.

    model: of engines.CONFIGS. sampling, config: of the requests, of the engine. prompt: tokens of a prompt that is
    computed beside them. shared: tokens of a prefix that they share. draft: a draft model, of engines.CONFIGS. graphs:
    launches of graphs in one step, of the number of layers.
    """

    model: str = "llama"
    sequences: int = 4
    sampling: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    prompt: int = 0
    shared: int = 0
    draft: str | None = None
    graphs: Callable[[int], int] = lambda num_layers: 1
    kernels: int = 5  # beside the graphs, at most: head and drawing
    waits: int = 1


def _pieces(num_layers: int) -> int:
    return num_layers + 1


KINDS = {
    "decode, 1 row": StepKind(sequences=1),
    "decode, 5 rows": StepKind(sequences=5),
    "decode, 16 rows": StepKind(sequences=16),
    "decode, drawn at random": StepKind(sampling=_PLAINLY_DRAWN),
    "decode, drawn with top-k and top-p": StepKind(sampling=_DRAWN, kernels=28),
    "decode, constrained": StepKind(sampling=_MASKED),
    "decode, constrained and drawn at random": StepKind(sampling=_MASKED | _PLAINLY_DRAWN),
    "mixed, constrained": StepKind(sampling=_MASKED, prompt=700, graphs=_pieces, kernels=20),
    "decode with log-probabilities": StepKind(sampling={"logprobs": 3}, kernels=45),
    "decode with penalties": StepKind(sampling={"presence_penalty": 0.5, "repetition_penalty": 1.1}, kernels=14),
    "decode with penalties and log-probabilities": StepKind(
        sampling={"presence_penalty": 0.5, "logprobs": 2}, kernels=45
    ),
    "prompt": StepKind(sequences=0, prompt=700, graphs=_pieces, kernels=8),
    "prompt, more than 512 tokens a step": StepKind(
        sequences=0, prompt=4000, config={"token_budget": 640}, graphs=lambda num_layers: 0, kernels=30
    ),
    "mixed": StepKind(prompt=700, graphs=_pieces, kernels=20),
    "decode, experts": StepKind("qwen3-moe"),
    "mixed, experts": StepKind("qwen3-moe", prompt=700, graphs=_pieces, kernels=20),
    "decode, latent attention": StepKind("deepseek"),
    "mixed, latent attention": StepKind("deepseek", prompt=700, graphs=_pieces, kernels=14),
    "decode, cascade attention": StepKind(
        sequences=12, shared=512, config={"prefix_caching": True}, graphs=_pieces, kernels=28
    ),
    "decode, drafts from the text": StepKind(config={"draft_tokens": 4}, graphs=_pieces, kernels=12),
    "decode, three drafts of a model": StepKind(
        config={"draft_tokens": 4, "prompt_lookup": False},
        draft="llama",
        graphs=lambda num_layers: 2 * _pieces(num_layers) + 2,
        kernels=40,
        waits=2,
    ),
}


@contextmanager
def stepping(kind: StepKind, engine: Any) -> Iterator[Callable[[], object]]:
    """Yields what runs one step of this kind."""
    with contextlib.ExitStack() as stack:
        if kind.shared:
            step = stack.enter_context(engines.sharing(engine, kind.sequences, kind.shared))
        elif kind.sequences:
            step = stack.enter_context(engines.decoding(engine, kind.sequences, **kind.sampling))
        else:
            step = engine.step
        if kind.prompt:
            stack.callback(engine.abort, engines.add_prompt(engine, kind.prompt))
        yield step


class Measurements:
    """Runs steps of kinds, and keeps the engines between them: call `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folders: dict[str, Path] = {}
        self._engines: dict[str, Any] = {}

    def of(self, kind: StepKind, num_steps: int = 3) -> "Row":
        """The most that one of some steps has cost."""
        with pytest.MonkeyPatch.context() as patch:
            engines.patch(patch)
            engines.patch_drafts(patch)
            if kind.shared:
                patch.setattr("kvrelay.kernels.cuda.cuda_graphs.EAGER_WORTH_BYTES", 1)
            with stepping(kind, self._engine(kind)) as step:
                for _ in range(16 if kind.draft else 0):  # its cache catches up first
                    step()
                return row_of(engines.counts_of(step, num_steps))

    def close(self) -> None:
        while self._engines:
            self._engines.popitem()[1].close()

    def folder(self, model: str) -> Path:
        if model not in self._folders:
            self._folders[model] = engines.folder_of(self._folder, model)
        return self._folders[model]

    def _engine(self, kind: StepKind) -> Any:
        key = f"{kind.model} {kind.config} {kind.draft}"
        if key not in self._engines:
            draft = None if kind.draft is None else self.folder(kind.draft)
            self._engines[key] = engines.make(self.folder(kind.model), draft=draft, **kind.config)
        return self._engines[key]


@dataclass(frozen=True)
class Row:
    """The most that a step of a kind has cost."""

    waits: int
    pageable_copies: int
    graphs: int
    kernels: int
    other_copies: int
    captures: int


def row_of(counts: list[dict[str, int]]) -> Row:
    most = Counter[str]()
    for one in counts:
        most |= Counter(one)
    return Row(
        sum(most[name] for name in (*STALLS, "event_waits")),
        sum(most[name] for name in PAGEABLE),
        most["graph_launches"],
        most["kernels"] + most["side_kernels"],
        sum(most[name] for name in ("pinned_to_device", "pinned_to_host", "on_device")),
        most["captures"],
    )


def main() -> None:
    print("| step | waits | pageable copies | graphs | kernels beside them | other copies | illegal calls |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        measurements = Measurements(Path(folder))
        for name, kind in KINDS.items():
            before = counters.read()["illegal"]
            row = measurements.of(kind)
            illegal = counters.read()["illegal"] - before
            numbers = (row.waits, row.pageable_copies, row.graphs, row.kernels, row.other_copies, illegal)
            print("|", name, "|", " | ".join(map(str, numbers)), "|", flush=True)
        measurements.close()


if __name__ == "__main__":
    main()
