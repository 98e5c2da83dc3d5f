"""The oracle, on tiny random models of every family and on the real one; and the oracle can fail."""

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from kvrelay.cluster.verify import cli, verifier
from kvrelay.cluster.verify.cli import TRANSPORTS, pool_memory, usable_transports
from kvrelay.cluster.verify.rows import run_setup
from kvrelay.cluster.verify.steering import flip_exponent_bit, tampering
from kvrelay.cluster.verify.suites import paths
from kvrelay.cluster.verify.verifier import Verifier, VerifyReport, print_summary
from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
from kvrelay.engine.checkpoints.tiny import TINY_CONFIGS, tiny_checkpoint
from kvrelay.errors import BackendUnavailable, ChecksumMismatch, ModelNotFound
from kvrelay.kernels.select import why_no_cuda
from kvrelay.kvtransfer.paths import selection
from kvrelay.kvtransfer.paths.selection import TRANSPORTS as ALL_TRANSPORTS
from kvrelay.settings.engine import ModelSettings
from kvrelay.types import KvMemory
from tests.kvtransfer.peer_process import ALL_LAYERS, LAYOUT, SourceSide, TargetSide

# shown by test_latent.py, or by a family that is served like them and takes the CI's time already
OTHERWISE = ("deepseek_v2", "deepseek_v3", "qwen2_moe", "mixtral")
ON_HOST = [name for name in TRANSPORTS if name != "cuda_ipc"]
ON_CUDA = KvMemory(LAYOUT, 0, "cuda:0", None, None, None)


async def verify(folder, transports, *, backend="auto", dtype="float32", num_setups=None):
    made = Verifier(folder, max_model_len=160, num_output=8, backend=backend, dtype=dtype)
    for setup in paths(transports)[:num_setups]:
        await run_setup(made, setup)
    return made.report


def failures(report):
    return [(row.name, row.passed, row.total, row.note) for row in report.rows if not row.ok]


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in TINY_CONFIGS if name not in OTHERWISE])
async def test_every_family_is_the_same_however_it_is_served(family, tmp_path):
    report = await verify(tiny_checkpoint(family, tmp_path / family), ["shm"])
    assert failures(report) == []


@pytest.mark.slow
async def test_every_transport_carries_the_same_blocks_of_the_real_model():
    try:
        folder = prepare_checkpoint(ModelSettings())
    except ModelNotFound as error:
        pytest.skip(f"the default model cannot be had here: {error}")
    report = await verify(folder, ON_HOST)
    assert failures(report) == []
    assert len(report.rows) == 5 + 3 * len(ON_HOST)


@pytest.mark.slow
async def test_a_wrong_expectation_fails_the_report(tmp_path, monkeypatch):
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    wrong = lambda model_dir, prompts, count: [[5] * count for _ in prompts]  # noqa: E731
    monkeypatch.setattr(verifier, "expected_tokens", wrong)
    report = await verify(folder, ["shm"], num_setups=1)
    assert not report.ok
    assert {name for name, *_ in failures(report)} >= {"aggregated (one worker)", "disaggregated over shm"}


@pytest.mark.gpu
@pytest.mark.slow
async def test_every_way_of_serving_between_gpu_pools_is_the_same(tmp_path):
    if (why := why_no_cuda()) is not None:
        pytest.skip(why)
    chosen, _ = usable_transports(None, pool_memory("cuda", "auto"))
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    assert failures(await verify(folder, chosen, backend="cuda")) == []


@pytest.fixture
def needs_nixl(monkeypatch):
    if why := ALL_TRANSPORTS["nixl"].why_not(ON_CUDA):
        pytest.skip(why)
    ipc = replace(ALL_TRANSPORTS["cuda_ipc"], why_not=lambda memory: None if memory is ON_CUDA else "not CUDA memory")
    monkeypatch.setattr(selection, "TRANSPORTS", {**ALL_TRANSPORTS, "cuda_ipc": ipc})


def test_a_pool_on_a_gpu_is_verified_over_cuda_ipc_and_nixl(needs_nixl):
    chosen, left_out = usable_transports(None, ON_CUDA)
    assert chosen == ["cuda_ipc", "nixl"]
    assert left_out == {
        "shm": "the pool is not a shared mapping in host memory",
        "tcp": "the pool is not in host memory",
    }


def test_a_pool_in_host_memory_is_verified_over_all(needs_nixl):
    assert usable_transports(None, pool_memory("cpu", "auto")) == (ON_HOST, {"cuda_ipc": "not CUDA memory"})


def test_a_transport_asked_for_by_name_must_work(needs_nixl):
    assert usable_transports(["tcp"], pool_memory("cpu", "auto")) == (["tcp"], {})
    with pytest.raises(BackendUnavailable, match=r"tcp.*not in host memory"):
        usable_transports(["nixl", "tcp"], ON_CUDA)


def test_without_any_transport_every_reason_is_named(monkeypatch):
    monkeypatch.setattr(cli, "TRANSPORTS", ("shm", "tcp"))
    with pytest.raises(BackendUnavailable, match=r"shm: .*shared mapping.*; tcp: .*host memory"):
        usable_transports(None, ON_CUDA)


def run_command(*arguments):
    app = typer.Typer()
    app.command()(cli.command)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_refuses_what_cannot_run_here(monkeypatch):
    if why_no_cuda() is not None:
        result = run_command("--backend", "cuda")
        assert result.exit_code == 1 and "BackendUnavailable" in result.output and "cuda" in result.output
    monkeypatch.setattr(cli, "pool_memory", lambda backend, device: ON_CUDA)
    result = run_command("--transport", "shm")
    assert result.exit_code == 1 and "shared mapping" in result.output
    assert run_command("--transport", "pigeon").exit_code == 2


@pytest.mark.slow
def test_the_command_prints_rows_as_they_end_and_its_controls_log_to_a_file(capfd):
    result = run_command("--family", "llama", "--transport", "shm", "--tokens", "4", "--max-model-len", "192")
    assert result.exit_code == 0
    rows = [line for line in result.output.splitlines() if re.match(r" +\d+/10 ok +\S", line)]
    assert len(rows) == 10 and rows[0].startswith("  1/10 ok   aggregated (one worker): 7 of 7 (")
    assert "10 of 10 rows ok" in result.output and "left out: everything else (kvrelay verify --all)" in result.output
    assert "the workers' log" not in result.output and capfd.readouterr().err == ""


@pytest.mark.slow
def test_kernels_are_compared_with_the_reference_on_their_device(tmp_path):
    report = tmp_path / "report.json"
    few = ("--family", "llama", "--transport", "shm", "--tokens", "4", "--json", str(report))
    result = run_command("--device", "cpu", *few)
    assert result.exit_code == 0 and "bfloat16, greedy, against the reference backend on cpu" in result.output
    (found,) = json.loads(report.read_text())
    rows = {row["name"]: row["note"] for row in found["rows"]}
    assert len(rows) == 16
    assert "prompts rms" in rows["disaggregated over shm"] and "did not arrive" in rows["flipped bit refused (shm)"]


async def test_workers_that_cannot_start_are_a_row_and_end_nothing(tmp_path):
    verifier = Verifier(tiny_checkpoint("llama", tmp_path / "llama"), max_model_len=160, num_output=4)
    first = paths(["shm"])[0]
    await run_setup(verifier, replace(first, overrides={"engine": {"device": "cuda:9"}}, learns=False))
    (row,) = verifier.report.rows
    assert not row.ok and row.name == first.title and "no CUDA device" in row.note


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_workers_log_is_named_and_kept_where_a_row_failed(is_kept):
    text = io.StringIO()
    with cli.workers_log(Console(file=text), SimpleNamespace(ok=not is_kept)):
        os.write(2, b"a checksum mismatch")
    found = [Path(word) for word in text.getvalue().split() if word.startswith("/")]
    assert [path.read_text() for path in found] == ["a checksum mismatch"] * is_kept
    for path in found:
        path.unlink()


def test_all_rows_are_counted_before_the_first_one(tmp_path):
    """Of a model that is no random one: all that `kvrelay verify --all` has over two transports."""
    verifier = Verifier(tiny_checkpoint("llama", tmp_path / "llama"), max_model_len=512, num_output=16)
    setups = cli.all_setups(verifier, ["shm", "tcp"], tmp_path, is_random=False, is_first=True)
    assert sum(setup.num_rows for _, setup in setups) == 91


def test_the_report_says_what_was_left_out():
    report = VerifyReport("tiny", ["1 token"], left_out={"shm": "the pool is elsewhere"})
    text = io.StringIO()
    print_summary(report, Console(file=text, width=1000))
    assert "left out: shm (the pool is elsewhere)" in text.getvalue()


def without_host_view(seed):
    """A pool as a GPU's is to the KV plane: a tensor and an address, no view to write through."""
    content = torch.randint(0, 256, (LAYOUT.num_bytes,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    return KvMemory(LAYOUT, content.data_ptr(), "cpu", None, None, content)


@pytest.mark.parametrize("checks", ["full", "off"])
async def test_a_bit_is_flipped_in_a_pool_without_a_host_view(needs_nixl, checks):
    source = SourceSide("nixl", memory=without_host_view(1), checks=checks)
    target = TargetSide("nixl", memory=without_host_view(2), checks=checks)
    await source.start()
    await target.start()
    try:
        with tampering(flip_exponent_bit, most=1) as flips:
            transfer = source.open("r1", target.grant("r1", 0, [3, 4], 2))
            transfer.announce(0, [1, 2], ALL_LAYERS)
            if checks == "off":
                await transfer.commit(b"")
            else:
                with pytest.raises(ChecksumMismatch, match="did not arrive as they left"):
                    await transfer.commit(b"")
        assert flips() == 1
        sent, landed = (side.memory.owner.view(-1, LAYOUT.block_bytes) for side in (source, target))
        assert (sent[[1, 2]] != landed[[3, 4]]).sum() == 1
        transfer = source.open("r2", target.grant("r2", 0, [5], 1))
        transfer.announce(0, [1], ALL_LAYERS)
        await transfer.commit(b"")
        assert torch.equal(landed[5], sent[1])
    finally:
        await target.aclose()
        await source.aclose()
