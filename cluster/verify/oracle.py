"""`kvrelay verify`: every way in which a prompt can be served gives Hugging Face's tokens, or says so.

Runs real worker processes on this machine, in float32. A negative control flips one bit of a block
in flight: with checks on it must be refused, with checks off it must change the answer.

In a 16-bit dtype, what the model says of a fixed text is held against Hugging Face (verify_dtypes.py), and the tokens of
every way of serving against those of one worker in that dtype.

On CUDA, float32 proves paging, scheduling and transfer between pools in GPU memory, not FlashInfer's
kernels: those exist in half precision only, where tokens need not equal Hugging Face's.
"""

import asyncio
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvrelay.cluster.verify.cascade import CascadeRows
from kvrelay.cluster.verify.dtypes import DtypeRows, rows_stand_alone
from kvrelay.cluster.verify.fp8_kv import Fp8Rows
from kvrelay.cluster.verify.groups import GroupRows
from kvrelay.cluster.verify.mixed_batches import MixedRows
from kvrelay.cluster.verify.mla import add_latent_rows
from kvrelay.cluster.verify.preemption import PreemptionRows
from kvrelay.cluster.verify.priorities import LineRows
from kvrelay.cluster.verify.quantized import QuantizedRows
from kvrelay.cluster.verify.rows import Case, Report, Row, tampering, target_of
from kvrelay.cluster.verify.speculation import SpeculationRows
from kvrelay.cluster.verify.tiers import TierRows
from kvrelay.config import Settings
from kvrelay.errors import BackendUnavailable, KvrelayError
from kvrelay.hashing import block_hashes
from kvrelay.kvtransfer.paths.selection import TRANSPORTS as ALL_TRANSPORTS
from kvrelay.kvtransfer.paths.selection import is_cuda, offered
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.settings.engine import EngineSettings, ModelSettings, RoleSettings
from kvrelay.settings.router import RouterSettings
from kvrelay.settings.transfer import TransferSettings
from kvrelay.types import KvLayout, KvMemory

if TYPE_CHECKING:
    import torch

    from kvrelay.cluster.launch.local import LocalCluster
    from kvrelay.decode.target import KvTarget
    from kvrelay.kernels.backend import Backend

logger = logging.getLogger(__name__)

BLOCK_SIZE = 16
DTYPES = ("float32", "bfloat16", "float16")
TRANSPORTS = ("shm", "tcp", "nixl")
CUDA_NOTE = (
    "float32 on cuda: attention, norms and cache writes run in torch here, FlashInfer's kernels exist in half precision "
    "only. This proves paging, scheduling and transfer in GPU memory; `pytest -m gpu` compares FlashInfer's kernels "
    "with the reference in float16 and bfloat16."
)
_TEXTS = {
    "English": "The history of computing began long before the first electronic machines were built, and ",
    "German": "Die Größe der Blöcke wird über ein Verzeichnis verwaltet, damit spätere Anfragen schneller sind. ",
    "Chinese": "机器学习模型在推理时需要大量的内存来保存键值缓存。",
    "Russian": "Распределённая система должна переживать отказ любого узла без потери данных. ",
    "Arabic": "تتطلب النماذج اللغوية الكبيرة ذاكرة واسعة وسرعة عالية في نقل البيانات. ",
    "code": "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\n",
}


def pool_memory(backend: str) -> KvMemory:
    """A pool of a few bytes where a worker with this kernel backend has its own. Raises BackendUnavailable."""
    import torch

    from kvrelay.kernels.select import why_no_cuda
    from kvrelay.kvcache.memory.storage import KvStorage

    why = why_no_cuda() if backend in ("auto", "cuda") else "not asked for"
    if backend == "cuda" and why is not None:
        raise BackendUnavailable("cuda", why)
    layout = KvLayout(num_layers=1, num_blocks=2, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=16, dtype="float32")
    return KvStorage(layout, torch.device("cpu" if why is not None else "cuda")).memory


def usable_transports(asked: Sequence[str] | None, memory: KvMemory) -> tuple[list[str], dict[str, str]]:
    """(transports to verify over, those left out and why), by the rules that a worker with such a pool follows.

    Raises BackendUnavailable: one that was asked for by name cannot be used, or none can.
    """
    chosen: list[str] = []
    left_out: dict[str, str] = {}
    for name in asked or TRANSPORTS:
        try:
            chosen += offered(name, memory, ALL_TRANSPORTS)
        except BackendUnavailable as error:
            if asked:
                raise
            left_out[name] = error.why
    if not chosen:
        raise BackendUnavailable("KV transport", "; ".join(f"{name}: {why}" for name, why in left_out.items()))
    return chosen, left_out


def make_cases(encode: Callable[[str], list[int]], *, max_model_len: int, chunk: int, num_output: int) -> list[Case]:
    """Prompts of the lengths at which engines go wrong, a shared prefix, and several languages."""
    long = encode(_TEXTS["English"] * (max_model_len // 8))
    while len(long) < max_model_len:
        long += long
    near = max_model_len - num_output
    lengths = {
        "1 token": 1, "block - 1": BLOCK_SIZE - 1, "one block": BLOCK_SIZE, "block + 1": BLOCK_SIZE + 1,
        "3 blocks": 3 * BLOCK_SIZE, "several chunks": 2 * chunk + 5, "near the context limit": near,
    }  # fmt: skip
    cases = [Case(name, long[:length]) for name, length in lengths.items() if 0 < length <= near]
    shared = long[5 : 5 + min(4 * BLOCK_SIZE, near // 2)]
    cases += [
        Case(f"shared prefix {i}", shared + encode(_TEXTS[name])[:20]) for i, name in enumerate(("code", "German"))
    ]
    cases += [Case(name, encode(text)[:near]) for name, text in _TEXTS.items() if name != "English"]
    return [case for case in cases if case.token_ids]


def expected_tokens(model_dir: Path, cases: Sequence[Case], num_output: int) -> list[list[int]]:
    """What Hugging Face's greedy generate says in float32, end-of-sequence ignored."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for name in ("eos_token_id", "temperature", "top_p", "top_k"):
        setattr(model.generation_config, name, None)
    outputs: list[list[int]] = []
    for case in cases:
        ids = torch.tensor([case.token_ids])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_output, do_sample=False, pad_token_id=0
        )
        outputs.append(out[0, len(case.token_ids) :].tolist())
    return outputs


class Verifier:
    """Runs the rows against one model folder."""

    def __init__(
        self,
        model_dir: Path,
        *,
        max_model_len: int,
        num_output: int,
        backend: str = "auto",
        dtype: str = "float32",
        progress: Callable[[str], None] = print,
    ) -> None:
        from kvrelay.serve.text.tokenizer import Tokenizer

        self._model_dir, self._num_output, self._progress = model_dir, num_output, progress
        self._chunk = 64
        self._max_model_len, self._backend, self._dtype = max_model_len, backend, dtype
        encode = Tokenizer(model_dir).encode
        self.cases = make_cases(encode, max_model_len=max_model_len, chunk=self._chunk, num_output=num_output)
        self.report = Report(model_dir.name, [case.name for case in self.cases], dtype=dtype)
        self._expected: list[list[int]] = []
        self._ids = 0

    def _settings(
        self, transport: str, checks: str = "full", prefill: dict[str, Any] | None = None, **engine: Any
    ) -> Settings:
        """Small chunks so that prompts take several, a pool that holds every case at once."""
        return Settings(
            model=ModelSettings(source=str(self._model_dir), dtype=self._dtype, max_model_len=self._max_model_len),
            engine=EngineSettings.model_validate(
                {"backend": self._backend, "block_size": BLOCK_SIZE, "kv_memory": self._kv_memory(), "token_budget": self._chunk,
                 "num_threads": 1, **engine}
            ),
            transfer=TransferSettings.model_validate({"transport": transport, "checks": checks}),
            router=RouterSettings(retry_budget=0, local_prefill_tokens=0),
            prefill=RoleSettings.model_validate(prefill or {}),
        )  # fmt: skip

    def _kv_memory(self) -> int:
        from kvrelay.engine.models.spec import ModelSpec

        spec = ModelSpec.from_folder(self._model_dir)
        tokens = 2 * sum(len(case.token_ids) + self._num_output + 2 * BLOCK_SIZE for case in self.cases)
        num_parts = 2 if spec.latent is None else 1
        return tokens * spec.num_layers * spec.num_kv_heads * spec.head_dim * num_parts * 4

    async def run(self, transports: Sequence[str]) -> Report:
        """All rows. Raises KvrelayError when a worker cannot start."""
        self._progress("Hugging Face generate (float32)" if self._dtype == "float32" else "one worker")
        self._expected = await asyncio.to_thread(self.expect, self._model_dir, self.cases, self._num_output)
        for index, transport in enumerate(transports):
            await self._transport_rows(transport, is_first=index == 0)
        await self._unequal_row(transports[0])
        await self._unchecked_row(transports[0])
        return self.report

    async def run_dtype(self, transport: str, *, stands_alone: bool) -> None:
        """The rows about the model's dtype, one of 16 bits. stands_alone: see DtypeRows."""
        near = self._max_model_len - self._num_output
        await DtypeRows(
            self, self._model_dir, transport, dtype=self._dtype, most_tokens=near, stands_alone=stands_alone
        ).run()

    def expect(self, model_dir: Path, cases: Sequence[Case], num_output: int) -> list[list[int]]:
        """Hugging Face's tokens in float32; in another dtype, those of one worker, one prompt after the other."""
        if self._dtype == "float32":
            return expected_tokens(model_dir, cases, num_output)
        return asyncio.run(self._own_tokens(model_dir, cases))

    async def _own_tokens(self, model_dir: Path, cases: Sequence[Case]) -> list[list[int]]:
        from kvrelay.cluster.launch.local import local_cluster

        answers = []
        async with local_cluster(self._settings("auto", prefix_caching=False), model_dir) as cluster:
            for case in cases:
                answers.append((await self._serve(cluster, case, "local"))[0])
        return answers

    async def run_tiers(self) -> None:
        """The rows of the tiers below the pool, after `run`."""
        with tempfile.TemporaryDirectory() as scratch:
            await TierRows(self, self._model_dir, Path(scratch), self._kv_memory()).run()

    async def run_preemption(self, transport: str) -> None:
        """The rows about pre-empted sequences, after `run`."""
        await PreemptionRows(self, self._model_dir, transport).run()

    async def run_fp8(self, transport: str) -> None:
        """The rows about fp8 KV, after `run`."""
        await Fp8Rows(self, self._model_dir, transport).run()

    async def run_quantized(self, transport: str, *, is_random: bool = False) -> None:
        """The rows about quantised weights, after `run`. None where the backend has no products with them.

        is_random: the model's own weights are noise.
        """
        from kvrelay.kernels.select import quantizes

        if quantizes(self._backend)[1]:  # type: ignore[arg-type]
            await QuantizedRows(self, self._model_dir, transport, is_random=is_random).run()

    async def run_groups(self, transport: str) -> None:
        """The rows about n, best_of and beam search, after `run`."""
        await GroupRows(self, self._model_dir, transport, self._num_output).run()

    async def run_lines(self, transport: str) -> None:
        """The rows about priorities, deadlines and tenants, after `run`."""
        await LineRows(self, self._model_dir, transport, self._num_output).run()

    async def run_mixed(self, transport: str) -> None:
        """The rows about mixed batches, after `run`."""
        await MixedRows(self, self._model_dir, transport).run()

    async def run_cascade(self, transport: str) -> None:
        """The rows about decode rows that share a prefix, after `run`."""
        near = self._max_model_len - self._num_output
        await CascadeRows(self, self._model_dir, transport, near, self._num_output).run(self.expect)

    async def run_speculation(self, transport: str) -> None:
        """The rows about drafted tokens, after `run`."""
        near = self._max_model_len - self._num_output
        await SpeculationRows(self, self._model_dir, transport, near, self._num_output).run(self.expect)

    def run_kernels(self) -> None:
        """The row about the backend's kernels by themselves: each against its definition, over the grid of shapes."""
        import torch

        from kvrelay.kernels.oracle.grid import FAMILIES, judge

        row, backend = (
            self.report.row(f"kernels in {self._dtype} within rounding of their definitions"),
            self._kernels(),
        )
        num_cases = 0
        for family in FAMILIES:
            self._progress(f"kernels: {family}")
            verdict = judge(family, backend, getattr(torch, self._dtype))
            num_cases += verdict.num_cases
            worst = verdict.worst
            row.claim(
                holds=verdict.ok or verdict.num_cases == 0,
                note=f"{num_cases} cases" if worst.ok else f"{family}, {worst.case}: {worst.ratio:.3g} of its bound",
            )
            if row.ok:
                row.note = f"{num_cases} cases"

    def rows_stand_alone(self) -> bool:
        """Whether this backend promises a row of a batch the same bits whatever else is in it."""
        import torch

        return rows_stand_alone(self._kernels(), getattr(torch, self._dtype))

    def _kernels(self) -> "Backend":
        """As a worker has them."""
        from kvrelay.kernels.select import select_backend

        return select_backend(self._backend, num_threads=1)  # type: ignore[arg-type]

    @property
    def dtype(self) -> str:
        return self._dtype

    # ---- for rows in files of their own

    def settings_over(self, transport: str, checks: str, **engine: Any) -> Settings:
        """engine: settings of that name, beside the verifier's own."""
        return self._settings(transport, checks, **engine)

    def request_of(self, case: Case) -> SequenceRequest:
        return self._request(case)

    def flipped(self, cluster: "LocalCluster") -> AbstractContextManager[Callable[[], int]]:
        return flipped_bit(target_of(cluster))

    def add_row(self, name: str) -> Row:
        return self.report.row(name)

    def expected(self, index: int) -> list[int]:
        """What one case must give: see `expect`."""
        return self._expected[index]

    def tell(self, what: str) -> None:
        self._progress(what)

    async def tokens_of(self, cluster: "LocalCluster", case: Case, force: Any = "local") -> tuple[list[int], int]:
        return await self._serve(cluster, case, force)

    async def _transport_rows(self, transport: str, *, is_first: bool) -> None:
        from kvrelay.cluster.launch.local import local_cluster

        self._progress(f"starting a prefill and a decode worker over {transport}")
        async with local_cluster(self._settings(transport), self._model_dir) as cluster:
            if is_first:
                await self._row(cluster, "aggregated (one worker)", "local")
                await self._reset(cluster)
            await self._row(cluster, f"disaggregated over {transport}", "remote")
            if is_first:
                await self._row(cluster, "prefix-cached on both workers", "remote", warm=True)
                await self._reset(cluster)
                await self._batched_row(cluster)
            await self._reset(cluster)
            await self._flipped_row(cluster, transport)
            leaks = await cluster.pool_leaks()
            self.report.row(f"every block given back ({transport})").claim(
                holds=not leaks, note=leaks[0] if leaks else "free + cached = total"
            )

    async def _unequal_row(self, transport: str) -> None:
        """Blocks of another size on the prefill worker: the same tokens."""
        from kvrelay.cluster.launch.local import local_cluster

        size = 2 * BLOCK_SIZE
        async with local_cluster(self._settings(transport, prefill={"block_size": size}), self._model_dir) as cluster:
            await self._row(cluster, f"prefill in blocks of {size} tokens, decode in {BLOCK_SIZE}", "remote")

    async def _reset(self, cluster: "LocalCluster") -> None:
        for member in cluster.members:
            await cluster.dispatcher.reset_cache(member.worker_id)

    def _request(self, case: Case) -> SequenceRequest:
        self._ids += 1
        return SequenceRequest(
            request_id=f"verify-{self._ids}",
            token_ids=case.token_ids,
            num_prompt_tokens=len(case.token_ids),
            block_hashes=list(block_hashes(case.token_ids, BLOCK_SIZE)),
            tokens_per_hash=BLOCK_SIZE,
            sampling=Sampling(max_tokens=self._num_output, temperature=0.0, ignore_eos=True),
        )

    async def _serve(self, cluster: "LocalCluster", case: Case, force: Any) -> tuple[list[int], int]:
        """(tokens, cached prompt tokens) of one request; the error's name instead of tokens when it failed."""
        tokens: list[int] = []
        cached = 0
        async for output in cluster.dispatcher.generate(self._request(case), force=force):
            tokens += output.token_ids
            cached = output.cached_tokens or cached
        return tokens, cached

    async def _row(self, cluster: "LocalCluster", name: str, force: str, *, warm: bool = False) -> None:
        self._progress(name)
        row, hits = self.report.row(name), 0
        for case, expected in zip(self.cases, self._expected, strict=True):
            try:
                tokens, cached = await self._serve(cluster, case, force)
            except KvrelayError as error:
                row.claim(holds=False, note=f"{case.name}: {error}")
                continue
            hits += cached > 0
            row.count(case.name, expected, tokens)
        if warm:
            row.claim(holds=hits > len(self.cases) // 2, note=f"{hits} of {len(self.cases)} prompts hit the cache")

    async def _batched_row(self, cluster: "LocalCluster") -> None:
        self._progress("batched with others")
        row = self.report.row("batched with others")
        forces = ["remote" if index % 2 else "local" for index in range(len(self.cases))]
        results = await asyncio.gather(
            *(self._serve(cluster, case, force) for case, force in zip(self.cases, forces, strict=True)),
            return_exceptions=True,
        )
        for case, expected, result in zip(self.cases, self._expected, results, strict=True):
            if isinstance(result, BaseException):
                row.claim(holds=False, note=f"{case.name}: {result}")
            else:
                row.count(case.name, expected, result[0])

    async def _flipped_row(self, cluster: "LocalCluster", transport: str) -> None:
        """One flipped bit in a transferred block must be refused."""
        row = self.report.row(f"flipped bit refused ({transport})")
        case = next(case for case in self.cases if case.name == "one block")
        with flipped_bit(target_of(cluster)) as flips:
            try:
                tokens, _ = await self._serve(cluster, case, "remote")
            except KvrelayError as error:
                row.claim(holds=flips() > 0 and "did not arrive as they left" in str(error), note=str(error))
            else:
                row.claim(holds=False, note=f"answered with {len(tokens)} tokens from a corrupt block")

    async def _unchecked_row(self, transport: str) -> None:
        """The oracle itself can fail: with checks off the same bit changes the answer."""
        from kvrelay.cluster.launch.local import local_cluster

        self._progress("negative control with checks off")
        row = self.report.row("flipped bit with checks off changes the answer")
        index = next(i for i, case in enumerate(self.cases) if case.name == "one block")
        async with local_cluster(self._settings(transport, "off"), self._model_dir) as cluster:
            with flipped_bit(target_of(cluster)) as flips:
                tokens, _ = await self._serve(cluster, self.cases[index], "remote")
        changed = tokens != self._expected[index]
        row.claim(
            holds=flips() > 0 and changed,
            note="the answer changed" if changed else "UNDETECTED: the answer is the same with a corrupt block",
        )


def flipped_bit(target: "KvTarget") -> AbstractContextManager[Callable[[], int]]:
    """Flip the top exponent bit of one number in the first region that `target` receives; yields a counter."""

    def flip(region: "torch.Tensor", layout: KvLayout) -> None:
        # the second half holds the values; byte 3 of a float32 is its sign and exponent
        region[len(region) // 2 + 3].bitwise_xor_(0x40)

    return tampering(target, flip, most=1)


def print_report(report: Report, console: Console) -> None:
    """The readable table."""
    against = (
        "Hugging Face generate"
        if report.dtype == "float32"
        else "one worker alone, and Hugging Face's log-probabilities"
    )
    table = Table(title=f"kvrelay verify: {report.model}, {report.dtype}, greedy, against {against}")
    for column in ("way of serving", "same", "of", "", "note"):
        table.add_column(column)
    for row in report.rows:
        mark = "[green]ok[/]" if row.ok else "[red]FAIL[/]"
        table.add_row(row.name, str(row.passed), str(row.total), mark, row.note)
    console.print(table)
    console.print(f"prompts: {', '.join(report.cases)}")
    for name, why in report.left_out.items():
        console.print(f"left out: {name} ({why})")
    if is_cuda(report.device) and report.dtype == "float32":
        console.print(CUDA_NOTE)


def command(
    model: Annotated[str | None, typer.Option(help="Folder, GGUF file or hub id; default: the built-in model.")] = None,
    transport: Annotated[
        list[str] | None,
        typer.Option(help="shm, tcp, nixl; may be given several times; default: all that the device's pool can use."),
    ] = None,
    max_model_len: Annotated[int, typer.Option(min=192, help="Context limit to verify up to, tokens.")] = 512,
    tokens: Annotated[int, typer.Option(min=2, max=256, help="Tokens generated for each prompt.")] = 16,
    family: Annotated[
        list[str] | None, typer.Option(help="Instead of a model, tiny random weights of a family, or 'all' of them.")
    ] = None,
    backend: Annotated[str, typer.Option(help="Kernel backend: auto, cpu, reference, cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16: what the model computes in.")] = "float32",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the report there.")] = None,
) -> None:
    """Compare every way of serving with Hugging Face, token for token. Exit code 1 on any difference.

    In 16 bits: every way's tokens with one worker's, and a text's log-probabilities and perplexity with Hugging Face's.
    """
    console = Console()
    if dtype not in DTYPES:
        console.print(f"unknown dtype {dtype!r}; choose from {', '.join(DTYPES)}", style="red")
        raise typer.Exit(2)
    for name in transport or ():
        if name not in TRANSPORTS:
            console.print(f"unknown transport {name!r}; choose from {', '.join(TRANSPORTS)}", style="red")
            raise typer.Exit(2)
    reports: list[Report] = []
    try:
        memory = pool_memory(backend)
        chosen, left_out = usable_transports(transport, memory)
        with console.status("preparing the model") as status, tempfile.TemporaryDirectory() as scratch:
            for folder in _folders(model, family, Path(scratch), status.update):
                verifier = Verifier(
                    folder, max_model_len=max_model_len, num_output=tokens, backend=backend, dtype=dtype, progress=status.update
                )  # fmt: skip
                verifier.report.device, verifier.report.left_out = memory.device, dict(left_out)
                reports.append(verifier.report)
                if len(reports) == 1:
                    verifier.run_kernels()
                _run_all(verifier, chosen, is_random=bool(family))
                if not family and dtype == "float32":
                    asyncio.run(add_latent_rows(reports[-1], Path(scratch), chosen[0], backend=backend, expect=expected_tokens, progress=status.update))  # fmt: skip
                print_report(reports[-1], console)
    except KvrelayError as error:
        console.print(f"[red]{type(error).__name__}[/]: {error}")
        raise typer.Exit(1) from None
    if json_file is not None:
        json_file.write_text(json.dumps([{**asdict(report), "ok": report.ok} for report in reports], indent=1))
    if not all(report.ok for report in reports):
        raise typer.Exit(1)


def _run_all(verifier: Verifier, transports: Sequence[str], *, is_random: bool) -> None:
    """Every row that has a meaning in the verifier's dtype."""
    first = transports[0]
    if verifier.dtype == "float32":
        asyncio.run(verifier.run(transports))
        asyncio.run(verifier.run_fp8(first))
        asyncio.run(verifier.run_quantized(first, is_random=is_random))
        asyncio.run(verifier.run_groups(first))
    else:
        stands_alone = verifier.rows_stand_alone()
        asyncio.run(verifier.run_dtype(first, stands_alone=stands_alone))
        if not stands_alone:
            why = "a row's bits depend on its batch with these kernels, so that tokens may part where two are close"
            verifier.report.left_out["tokens of every way"] = why
            return
        asyncio.run(verifier.run(transports))
    asyncio.run(verifier.run_tiers())
    asyncio.run(verifier.run_preemption(first))
    asyncio.run(verifier.run_lines(first))
    asyncio.run(verifier.run_mixed(first))
    asyncio.run(verifier.run_cascade(first))
    asyncio.run(verifier.run_speculation(first))


def _folders(
    model: str | None, families: list[str] | None, scratch: Path, tell: Callable[[str], None]
) -> Iterator[Path]:
    """The checkpoint folders to verify, one after the other."""
    from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
    from kvrelay.engine.checkpoints.tiny import TINY_CONFIGS, tiny_checkpoint

    if not families:
        settings = ModelSettings(source=model) if model else ModelSettings()
        yield prepare_checkpoint(settings, lambda what, share: tell(f"{what} {share:.0%}"))
        return
    for name in TINY_CONFIGS if "all" in families else (family.replace("-", "_") for family in families):
        yield tiny_checkpoint(name, scratch / f"tiny-{name}")


if __name__ == "__main__":
    typer.run(command)
