"""One model under `kvrelay verify`: its prompts, the tokens that they must give, clusters that serve them, and the
report, one result per row, printed as rows end.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvrelay.cluster.launch.local import LocalCluster, local_cluster
from kvrelay.cluster.verify.prompts import BLOCK_SIZE, CHUNK, VerifyPrompt, expected_tokens, make_prompts
from kvrelay.config import Settings, settings_from
from kvrelay.errors import KvrelayError
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import Sampling, SequenceRequest, TokenLogprob

Overrides = Mapping[str, Mapping[str, Any]]
"""Settings by section, over the verifier's own."""


_HEADS = {"head_dim": 128, "hidden_size": 256, "moe_intermediate_size": 64}
_LATENT_HEADS = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "hidden_size": 256,
}  # fmt: skip


def tiny_model(family: str, folder: Path, *, is_wide: bool) -> Path:
    """A tiny random checkpoint. is_wide: with heads that a GPU's kernels are made for, Llama-8B's or DeepSeek's.

    Raises UnsupportedModel.
    """
    from kvrelay.engine.checkpoints.tiny import TINY_CONFIGS, tiny_checkpoint

    known = TINY_CONFIGS.get(family, {})
    heads = _LATENT_HEADS if "kv_lora_rank" in known else _HEADS
    return tiny_checkpoint(family, folder, **{name: heads[name] for name in heads if is_wide and name in known})


@dataclass(slots=True)
class RowResult:
    """One row: how many checks passed, and a note about the first that failed."""

    name: str
    passed: int = 0
    total: int = 0
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.passed == self.total and self.total > 0

    def compare(self, prompt: str, expected: Sequence[int], tokens: Sequence[int]) -> None:
        """Check that a prompt's tokens are the expected ones."""
        self.total += 1
        if list(expected) == list(tokens):
            self.passed += 1
        elif not self.note:
            pairs = enumerate(zip(expected, tokens, strict=False))
            at = next((index for index, (one, other) in pairs if one != other), min(len(expected), len(tokens)))
            self.note = f"{prompt}: token {at} differs"

    def check(self, note: str = "", *, holds: bool) -> None:
        """Check anything else. The note of the first check stands, unless a later one fails."""
        self.total += 1
        self.passed += holds
        if not holds or not self.note:
            self.note = note or self.note


@dataclass(slots=True)
class VerifyReport:
    """The rows of one model. left_out: rows or transports that do not apply here, and why."""

    model: str
    prompts: list[str]
    rows: list[RowResult] = field(default_factory=list)
    device: str = "cpu"
    dtype: str = "float32"
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)


@dataclass(slots=True)
class ServedAnswer:
    """What came back for one request. choices: tokens of each; logprobs: of the tokens of each choice."""

    prompt: VerifyPrompt
    request_id: str
    choices: list[list[int]]
    logprobs: list[list[TokenLogprob]]
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    error: KvrelayError | None = None

    @property
    def tokens(self) -> list[int]:
        return self.choices[0]

    @property
    def scores(self) -> list[float]:
        """The summed log-probability of each choice."""
        return [sum(entry.logprob for entry in choice) for choice in self.logprobs]

    def checked(self) -> "ServedAnswer":
        """Itself. Raises its error."""
        if self.error is not None:
            raise self.error
        return self


@dataclass
class Verifier:
    """Serves prompts on real workers of this machine.

    Args:
        device: of the workers: a setting of engine.device.
        prompts: none: the usual ones.
        report: an existing one, which gets the rows; none: a new one.
        progress: is called with what begins.
        on_row: is called with a row that has ended, and its seconds.
        expected: tokens by prompt, from Hugging Face in float32; in a 16-bit dtype from one worker, one prompt at a
            time.
    """

    model_dir: Path
    max_model_len: int
    num_output: int
    backend: str = "auto"
    dtype: str = "float32"
    device: str = "auto"
    prompts: list[VerifyPrompt] = field(default_factory=list)
    report: VerifyReport = None  # type: ignore[assignment]
    progress: Callable[[str], None] = lambda what: None
    on_row: Callable[[RowResult, float], None] = lambda row, seconds: None
    expected: dict[str, list[int]] = field(default_factory=dict)
    num_requests: int = 0

    def __post_init__(self) -> None:
        from kvrelay.serve.text.tokenizer import Tokenizer

        self.prompts = self.prompts or make_prompts(
            Tokenizer(self.model_dir).encode, max_model_len=self.max_model_len, num_output=self.num_output
        )
        names = [prompt.name for prompt in self.prompts]
        self.report = self.report or VerifyReport(self.model_dir.name, names, dtype=self.dtype)

    @property
    def longest_prompt(self) -> int:
        """Tokens of a prompt that leaves room for its output."""
        return self.max_model_len - self.num_output

    @property
    def kv_bytes(self) -> int:
        """Of a float32 pool that holds every prompt with its output twice."""
        from kvrelay.engine.models.spec import ModelSpec

        spec = ModelSpec.from_folder(self.model_dir)
        tokens = 2 * sum(len(prompt.token_ids) + self.num_output + 2 * BLOCK_SIZE for prompt in self.prompts)
        num_parts = 2 if spec.latent is None else 1
        return tokens * spec.num_layers * spec.num_kv_heads * spec.head_dim * num_parts * 4

    def settings(self, transport: str, checks: str, overrides: Overrides) -> Settings:
        """Small prefill chunks, no retries, every prompt prefilled where the row says."""
        own: dict[str, dict[str, Any]] = {
            "model": {"source": str(self.model_dir), "dtype": self.dtype, "max_model_len": self.max_model_len},
            "engine": {
                "backend": self.backend,
                "device": self.device,
                "block_size": BLOCK_SIZE,
                "kv_memory": self.kv_bytes,
                "token_budget": CHUNK,
                "num_threads": 1,
            },
            "transfer": {"transport": transport, "checks": checks},
            "router": {"local_prefill_tokens": 0},
        }
        for section, values in overrides.items():
            own[section] = own.get(section, {}) | dict(values)
        return settings_from(own)

    @asynccontextmanager
    async def cluster(
        self, transport: str, checks: str = "full", overrides: Overrides | None = None, **counts: int
    ) -> AsyncIterator[LocalCluster]:
        """Prefill processes, and decode workers in this process: one of each, or `counts` (num_prefill, num_inside).

        Raises KvrelayError when a worker cannot start.
        """
        settings = self.settings(transport, checks, overrides or {})
        options: dict[str, Any] = {"retry_budget": 0, "reserve_timeout_s": 600.0, **counts}
        folder = Path(settings.model.source)
        async with local_cluster(settings, folder, **options) as cluster:
            yield cluster

    async def learn(self, prompts: Sequence[VerifyPrompt]) -> None:
        """Fill in `expected` for those prompts that are not in it."""
        missing = [prompt for prompt in prompts if prompt.name not in self.expected]
        if not missing:
            return
        if self.dtype == "float32":
            self.progress("Hugging Face generate (float32)")
            tokens = await asyncio.to_thread(expected_tokens, self.model_dir, missing, self.num_output)
        else:
            self.progress("one worker")
            async with self.cluster("auto", overrides={"engine": {"prefix_caching": False}}) as cluster:
                tokens = [(await self.serve(cluster, prompt, "local")).checked().tokens for prompt in missing]
        self.expected.update({prompt.name: answer for prompt, answer in zip(missing, tokens, strict=True)})

    def of_family(self, family: str, folder: Path, *, is_wide: bool = False) -> "Verifier":
        """For a tiny random model, written to `folder`, with the same report. is_wide: see tiny_model."""
        from kvrelay.cluster.verify.prompts import latent_prompts

        own: dict[str, Any] = {"model_dir": tiny_model(family, folder, is_wide=is_wide), "expected": {}}
        return replace(self, max_model_len=4 * CHUNK, num_output=8, prompts=latent_prompts(), **own)

    def prompt(self, name: str) -> VerifyPrompt:
        return next(prompt for prompt in self.prompts if prompt.name == name)

    def request(self, prompt: VerifyPrompt, **sampling: Any) -> SequenceRequest:
        """Greedy, end-of-sequence ignored, with these changes to its sampling."""
        self.num_requests += 1
        plain = Sampling(max_tokens=self.num_output, temperature=0.0, ignore_eos=True)
        return SequenceRequest(
            request_id=f"verify-{self.num_requests}",
            token_ids=prompt.token_ids,
            num_prompt_tokens=len(prompt.token_ids),
            block_hashes=list(block_hashes(prompt.token_ids, BLOCK_SIZE)),
            tokens_per_hash=BLOCK_SIZE,
            sampling=msgspec.structs.replace(plain, **sampling),
        )

    async def serve(
        self, cluster: LocalCluster, prompt: VerifyPrompt, force: str, request: SequenceRequest | None = None
    ) -> ServedAnswer:
        """Serve one request; an error is part of the answer.

        force: `local` prefills on the decode worker, `remote` on the prefill worker. request: the prompt's, if not the
        usual one.
        """
        request = request or self.request(prompt)
        count = request.group.num_choices if request.group is not None else 1
        answer = ServedAnswer(prompt, request.request_id, [[] for _ in range(count)], [[] for _ in range(count)])
        try:
            async for output in cluster.dispatcher.generate(request, force=force):  # type: ignore[arg-type]
                answer.choices[output.choice] += output.token_ids
                answer.logprobs[output.choice] += output.logprobs
                answer.prompt_logprobs = output.prompt_logprobs or answer.prompt_logprobs
                answer.cached_tokens = output.cached_tokens or answer.cached_tokens
        except KvrelayError as error:
            answer.error = error
        return answer


async def reset_caches(cluster: LocalCluster) -> None:
    """Every worker forgets its unused cached blocks."""
    for member in cluster.members:
        await cluster.dispatcher.queries.reset_cache(member.worker_id)


if TYPE_CHECKING:
    from rich.console import Console


def row_printer(report: VerifyReport, num_rows: int, console: "Console") -> Callable[[RowResult, float], None]:
    """Print the title; returns what prints each row when it has ended, on a terminal or not."""
    against = "Hugging Face generate" if report.dtype == "float32" else f"the reference backend on {report.device}"
    _print(console, f"kvrelay verify: {report.model}, {report.dtype}, greedy, against {against}")

    def show(row: RowResult, seconds: float) -> None:
        mark, style = ("ok  ", "green") if row.ok else ("FAIL", "red")
        note = f"; {row.note}" if row.note else ""
        line = f"{row.name}: {row.passed} of {row.total}{note} ({seconds:.1f} s)"
        console.print(f"{len(report.rows):>3}/{num_rows} [{style}]{mark}[/]", end=" ")
        _print(console, line)

    return show


def print_summary(report: VerifyReport, console: "Console") -> None:
    """Print how many rows passed, the prompts, and what was left out."""
    _print(console, f"{sum(row.ok for row in report.rows)} of {len(report.rows)} rows ok")
    _print(console, f"prompts: {', '.join(report.prompts)}")
    for name, why in report.left_out.items():
        _print(console, f"left out: {name} ({why})")


def _print(console: "Console", line: Any) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
