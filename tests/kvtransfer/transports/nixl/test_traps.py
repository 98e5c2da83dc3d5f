"""Each trap of NIXL, by its name, and that our agent does not fall into it.

Where a trap can be shown cheaply and for certain, raw NIXL falls into it first (raw_nixl.py).
Which pieces of a read are posted, and when it is over, is tested in test_nixl_reads.py.
"""

import ast
import asyncio
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvrelay.errors import BackendUnavailable, TransferTimeout, TransportError
from kvrelay.kvtransfer.transports.nixl.agent import BACKEND, agent_for
from kvrelay.kvtransfer.transports.nixl.reader import NIXL, ucx

ROOT = Path(__file__).resolve().parents[4]
_spec = importlib.util.spec_from_file_location("kvrelay_nixl_peer", Path(__file__).with_name("nixl_peer.py"))
peer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(peer)
sides = peer.sides

if WHY_NOT := NIXL.why_not(sides.allocate()):
    pytest.skip(f"no NIXL: {WHY_NOT}", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.processes]

TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}  # the reads of a stopped owner stay in flight
SOME = [5, 2, 9, 63, 0, 31, 30, 29]


async def raw(scenario, env=None):
    """What NIXL does by itself."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("raw_nixl.py")),
        scenario,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
    )
    async with asyncio.timeout(90):
        out, _ = await process.communicate()
    return json.loads(out.decode().splitlines()[-1])


@pytest.fixture
def over_tcp(monkeypatch):
    """Agents made in this test use sockets, so that a read needs its owner."""
    for name, value in TCP.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
async def owner():
    async with peer.started("own") as process:
        process.told = await process.hear()
        yield process


@pytest.fixture
async def make_reader(owner):
    """Readers of the owner, each into a pool of its own or into `memory`."""
    made = []

    async def make(memory=None):
        memory = memory or sides.allocate()
        reader = peer.make_reader(memory)
        made.append(reader)
        await reader.connect(bytes.fromhex(owner.told["descriptor"]))
        return memory, reader

    yield make
    owner.signal(signal.SIGCONT)
    for reader in made:
        await reader.aclose()


async def begin_from_frozen(owner, reader, blocks=peer.ALL_BLOCKS):
    """A read whose owner is stopped: posted, and in flight until the owner runs again."""
    await reader.read(peer.copies_of([0]))  # connects
    owner.signal(signal.SIGSTOP)
    read = reader.read(peer.copies_of(blocks))
    done, _ = await asyncio.wait({read}, timeout=0.2)
    assert not done
    return read


def fill(memory, value):
    memory.owner[:] = value


# ---- the spinning agent


@pytest.mark.alone
async def test_the_stock_agent_spins_a_core_ours_sleeps(owner, make_reader):
    assert (await raw("idle_stock_agent"))["cores"] > 0.5
    _, reader = await make_reader()
    await reader.read(peer.copies_of(SOME))
    await owner.ask("idle")
    before = (await owner.ask("cpu"))["cpu_s"], peer.cpu_s()
    await asyncio.sleep(2)  # what is measured, not waited for
    after = (await owner.ask("cpu"))["cpu_s"], peer.cpu_s()
    assert [used - earlier <= 0.06 for used, earlier in zip(after, before, strict=True)] == [True, True]


# ---- transfers cannot be taken back


async def test_a_released_transfer_writes_later_so_ours_are_never_released_in_flight(over_tcp, owner, make_reader):
    assert (await raw("released_while_in_flight", TCP)) == {"state": "PROC", "overwritten": 64}
    memory, reader = await make_reader()
    read = await begin_from_frozen(owner, reader)
    reader.abandon(read)
    await reader.aclose()  # does not wait for it, and does not end it
    assert not read.done()
    fill(memory, 7)
    owner.signal(signal.SIGCONT)
    with pytest.raises(TransportError, match="abandoned"):
        await read
    assert sides.digest(memory, peer.ALL_BLOCKS) == owner.told["digest"]  # all of it landed before the read was over


async def test_a_forgotten_peer_is_reported_as_an_end_though_the_bytes_still_come(over_tcp, owner, make_reader):
    """So a peer is forgotten when its last reader has closed, and a second reader of it is not disturbed."""
    assert (await raw("forgotten_while_in_flight", TCP)) == {
        "state": "PROC",
        "said": "nixlNotFoundError",
        "overwritten": 64,
    }
    memory, reader = await make_reader()
    _, other = await make_reader(memory)  # as after a reconnect: the same source, the same agent
    read = await begin_from_frozen(owner, reader)
    await other.aclose()
    done, _ = await asyncio.wait({read}, timeout=0.2)
    assert not done
    owner.signal(signal.SIGCONT)
    await read
    assert sides.digest(memory, peer.ALL_BLOCKS) == owner.told["digest"]


async def test_a_frozen_owner_leaves_a_read_in_flight_our_deadline_ends_the_transfer_and_quarantine_the_rest(
    over_tcp, kv, monkeypatch
):
    source = await kv.process("source", transport="nixl", fill=4)
    target = await kv.target("nixl", lease_s=60.0, stall_s=0.5)
    freeze_at_read(monkeypatch, target, source)
    await announce(target, source, "r1", SOME)
    assert isinstance(await target.event("failed", "r1"), TransferTimeout)
    assert target.stats().quarantined_blocks == len(SOME)
    assert target.kinds("r1") == ["failed"]
    with pytest.raises(ValueError, match="earlier grant"):
        target.grant("r1", 0, SOME, len(SOME))
    source.signal(signal.SIGKILL)  # it is replaced: now nothing can come any more
    await target.event("released", "r1")
    assert target.stats().quarantined_blocks == 0


@pytest.mark.parametrize("end", ["killed", "woken"])
async def test_a_transfer_cancelled_during_a_read_is_released_when_the_read_has_ended(over_tcp, kv, monkeypatch, end):
    source = await kv.process("source", transport="nixl", fill=4)
    target = await kv.target("nixl", lease_s=60.0)
    is_frozen = freeze_at_read(monkeypatch, target, source)
    await announce(target, source, "r1", SOME)
    await is_frozen.wait()
    target.revoke("r1")
    assert target.stats().quarantined_blocks == len(SOME)
    assert target.kinds("r1") == []
    source.signal(signal.SIGKILL if end == "killed" else signal.SIGCONT)
    await target.event("released", "r1")
    assert target.stats().quarantined_blocks == 0
    fill(target.memory, 7)  # the blocks are re-used
    if end == "woken":
        await announce(target, source, "r2", [40])
        source.tell("commit", request_id="r2")
        await target.event("commit", "r2")
    assert (sides.regions(target.memory)[:, SOME] == 7).all()


async def announce(target, source, request_id, blocks):
    ticket = target.grant(request_id, 0, blocks, len(blocks))
    source.tell("open", request_id=request_id, ticket=ticket.hex())
    source.tell("announce", request_id=request_id, blocks=blocks, layers=(0, 4))


def freeze_at_read(monkeypatch, target, source):
    """The source is stopped right before the target's first read of it; the event of the read having begun."""
    has_begun = asyncio.Event()
    read = type(NIXL.make_reader(target.memory, b"", peer.HOST)).read

    def freeze_first(self, *args):
        if not has_begun.is_set():
            source.signal(signal.SIGSTOP)
            has_begun.set()
        return read(self, *args)

    monkeypatch.setattr("kvrelay.kvtransfer.transports.nixl.reader.NixlReader.read", freeze_first)
    return has_begun


CUT = {  # as ucx.FOR_READING, but shorter: what the user has set is kept
    "UCX_TLS": "tcp", "UCX_TCP_USER_TIMEOUT": "2s",
    "UCX_TCP_KEEPIDLE": "1s", "UCX_TCP_KEEPINTVL": "1s", "UCX_TCP_KEEPCNT": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def namespaces():
    """Skips where this user may not make a network of its own."""
    probe = ["unshare", "-rnm", "sh", "-c", "mount -t sysfs none /sys && ip link add va type veth peer name vb"]
    try:
        subprocess.run(probe, check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no network namespaces here: {error}")


@pytest.mark.parametrize("when", ["asked", "asking"])
async def test_a_cut_link_keeps_a_read_for_minutes_ours_ends_with_its_connection_and_nothing_comes_late(
    namespaces, when
):
    """With UCX's own settings 18 s and more than 150 s: see facts in ucx.py."""
    process = await asyncio.create_subprocess_exec(
        "unshare",
        "-rnm",
        sys.executable,
        str(Path(__file__).with_name("cut_link.py")),
        when,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **CUT},
    )
    async with asyncio.timeout(100):
        out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    told = json.loads(out.decode().splitlines()[-1])
    assert told["errors"] == ["TransportError", "TransportError"]
    assert not told["late"]
    assert told["again"] == (when == "asking")  # the same reader connects anew to an owner that lives


async def test_our_own_settings_for_a_cut_link_are_for_agents_that_read(monkeypatch, kv):
    """One that is read must not give up early: UCX aborts the process when its answer finds no connection."""
    given, variables = [], ucx.variables
    monkeypatch.setattr(ucx, "variables", lambda values: given.append(dict(values)) or variables(values))
    source, target = await kv.pair("nixl")
    await kv.send(source, target, "r1", [1], [2]).commit(b"")
    assert given == [{"UCX_NET_DEVICES": "lo"}, {"UCX_NET_DEVICES": "lo", **ucx.FOR_READING}]
    assert ucx.FOR_READING["UCX_TCP_USER_TIMEOUT"] == "10s"


# ---- failures


@pytest.mark.parametrize("tls", ["tcp", None])
async def test_failures_come_as_exceptions_of_nixl_and_leave_us_as_our_own(monkeypatch, tls, owner_of):
    if tls:
        for name, value in TCP.items():
            monkeypatch.setenv(name, value)
    async with owner_of() as owner:
        memory = sides.allocate()
        reader = peer.make_reader(memory)
        await reader.connect(bytes.fromhex(owner.told["descriptor"]))
        await reader.read(peer.copies_of(SOME))
        owner.signal(signal.SIGKILL)
        await owner.ended()
        with pytest.raises(TransportError, match="nixl"):
            await reader.read(peer.copies_of(SOME))
        fill(memory, 7)
        with pytest.raises(TransportError, match="nixl"):
            await reader.read(peer.copies_of(SOME))
        assert (memory.owner == 7).all()
        await reader.aclose()


@pytest.fixture
def owner_of():
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def start(**config):
        async with peer.started("own", **config) as process:
            process.told = await process.hear()
            yield process

    return start


# ---- what must not be torn down


async def test_tearing_an_agent_down_aborts_the_other_process_so_we_let_go_without_tearing_down(
    over_tcp, owner, make_reader
):
    assert (await raw("torn_down_while_in_flight", TCP))["owner"] == -signal.SIGABRT
    memory, reader = await make_reader()
    read = await begin_from_frozen(owner, reader)
    reader.abandon(read)
    await reader.aclose()
    del reader
    gc.collect()
    owner.signal(signal.SIGCONT)
    assert await owner.ask("ping") == {"alive": True}
    with pytest.raises(TransportError, match="abandoned"):
        await read
    _, again = await make_reader(memory)
    await again.read(peer.copies_of(SOME))
    assert await owner.ask("ping") == {"alive": True}


async def test_freed_memory_breaks_its_readers_so_a_pool_outlives_whoever_exported_it(owner, make_reader):
    assert (await raw("freed_by_its_owner"))["state"] not in ("DONE", "PROC")
    memory, reader = await make_reader()
    await reader.read(peer.copies_of(SOME))  # connects, for which the owner must run
    await owner.ask("let go")  # closed, every reference dropped, collected
    await reader.read(peer.copies_of(peer.ALL_BLOCKS))
    assert sides.digest(memory, peer.ALL_BLOCKS) == owner.told["digest"]


async def test_an_agent_is_kept_for_its_pools_next_user_and_its_thread_ends(owner, make_reader):
    memory, reader = await make_reader()
    agent = await agent_for(memory)
    name, thread = agent.name, agent._thread
    agent.release()
    await reader.aclose()
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()
    _, again = await make_reader(memory)
    await again.read(peer.copies_of(SOME))
    assert (await agent_for(memory)).name == name
    agent.release()


async def test_a_process_with_a_stuck_read_ends_at_once_by_itself(owner):
    """It is replaced, not torn down politely: nothing is waited for, nothing aborts, no agent is destroyed."""
    config = {"descriptor": owner.told["descriptor"], "owner": owner.pid}
    async with peer.started("leave_with_a_read_in_flight", env=TCP, **config) as leaver:
        assert await leaver.hear() == {"in_flight": True}
        status, _, errors = await leaver.ended()
    assert (status, "mpool" in errors, "terminate" in errors) == (0, False, False)


async def test_source_and_target_may_both_be_replaced_under_their_old_names(kv):
    for incarnation in ("1", "2"):
        source = await kv.process("source", transport="nixl", epoch=f"p{incarnation}", fill=int(incarnation))
        target = await kv.target("nixl", epoch=f"d{incarnation}")
        await announce(target, source, "r1", SOME)
        source.tell("commit", request_id="r1")
        await target.event("commit", "r1")
        source.tell("digest", blocks=SOME)
        assert (await source.hear("digest"))["value"] == sides.digest(target.memory, SOME)
        source.signal(signal.SIGKILL)
        await target.aclose()


async def test_restarted_sources_cost_the_target_nothing_that_stays(kv):
    target = await kv.target("nixl")
    num_open = []
    for number in range(4):
        source = await kv.process("source", transport="nixl", epoch=f"p{number}")
        await announce(target, source, f"r{number}", SOME)
        source.tell("commit", request_id=f"r{number}")
        await target.event("commit", f"r{number}")
        source.signal(signal.SIGKILL)
        await source.aclose()
        num_open.append(len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task")))
    assert num_open[-1] <= num_open[1] + 2  # a new agent for each would add eleven descriptors each time


# ---- fork


async def test_an_agent_does_not_survive_a_fork_and_the_child_is_told(owner):
    async with peer.started("fork_beside_an_agent", descriptor=owner.told["descriptor"]) as forker:
        told = await forker.hear()
    assert "start it with spawn" in told["child"]
    assert told["digest"] == owner.told["digest"]


FORKS = {"fork", "forkpty", "ProcessPoolExecutor", "multiprocessing", "set_start_method"}
FOLDERS = ("kvrelay", "kernels", "kvcache", "engine", "kvtransfer", "prefill", "decode", "router", "serve", "cluster")


def forks(source):
    """Names in this source by which a process could be forked without exec."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            if node.attr != "fork" or (isinstance(node.value, ast.Name) and node.value.id == "os"):
                found.add(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.name.split(".")[0] for alias in node.names} | {
                (getattr(node, "module", "") or "").split(".")[0]
            }
    return found & FORKS


def test_nothing_of_ours_forks():
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    found = {str(path.relative_to(ROOT)): names for path in files if (names := forks(path.read_text()))}
    spawning = {
        "cluster/profiles/neighbours.py": {"multiprocessing"},
        "cluster/commands/simulate.py": {"multiprocessing", "ProcessPoolExecutor"},
    }
    forking = {"cluster/launch/supervisor.py": {"fork"}, "kvrelay/grammar/checker.py": {"fork"}}
    assert found == forking | spawning, (
        "the first forks before anything is imported that could have an agent, the second in a process without one"
    )
    assert all('get_context("spawn")' in (ROOT / path).read_text() for path in spawning)


@pytest.mark.parametrize("source", ["import os\nos.fork()", "import multiprocessing", "from os import fork"])
def test_a_fork_would_be_seen(source):
    assert forks(source)


# ---- the environment


@pytest.mark.parametrize("tls", ["cma", "sm", "self,sm", "cuda_copy,cuda_ipc"])
async def test_transports_that_cannot_connect_are_refused_by_name(monkeypatch, tls):
    monkeypatch.setenv("UCX_TLS", tls)
    for side in (sides.SourceSide("nixl"), sides.TargetSide("nixl")):
        with pytest.raises(BackendUnavailable, match=f"UCX_TLS={tls} .*add tcp"):
            await side.start()
        await side.aclose()


async def test_nixl_itself_does_not_say_which_variable_is_wrong():
    assert (await raw("made", {"UCX_TLS": "cma"}))["error"] == "nixlBackendError: NIXL_ERR_BACKEND"
    assert (await raw("made", {"UCX_TLS": "cma,tcp"}))["error"] == ""


@pytest.mark.parametrize("tls", ["", "tcp", "cma,tcp", "rc,cuda", "^sm", "all"])
def test_transports_that_may_connect_are_left_to_ucx(tls):
    assert ucx.problem({"UCX_TLS": tls}) is None


async def test_other_settings_under_which_no_agent_can_be_made_are_named_too(monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "nosuch0")
    source = sides.SourceSide("nixl")
    with pytest.raises(BackendUnavailable, match="UCX_NET_DEVICES=nosuch0"):
        await source.start()
    await source.aclose()


async def test_what_the_user_has_set_is_not_changed_and_ours_is_gone_afterwards():
    environment = {"UCX_NET_DEVICES": "eth7"}
    with ucx.variables({"UCX_NET_DEVICES": "lo", "UCX_TCP_KEEPIDLE": "4s"}, environment):
        assert environment == {"UCX_NET_DEVICES": "eth7", "UCX_TCP_KEEPIDLE": "4s"}
    assert environment == {"UCX_NET_DEVICES": "eth7"}


async def test_nothing_is_written_to_stdout_whatever_ucx_has_to_say(owner):
    async with peer.started(
        "read_and_close",
        env={"UCX_TLS": "nosuch,tcp,cma,sm"},
        descriptor=owner.told["descriptor"],
        digest=owner.told["digest"],
    ) as target:
        status, out, errors = await target.ended()
    assert (status, out) == (0, "")
    assert "'nosuch' is not available" in errors  # by default UCX says that on stdout


async def test_a_pool_behind_a_loopback_address_listens_nowhere_else(owner):
    listening = [c.laddr.ip for c in psutil.Process(owner.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert listening and set(listening) <= {"127.0.0.1", "::1"}


async def test_files_do_not_go_through_nixl(owner, make_reader):
    """Buffered files through its POSIX plugin read at 0.03 GB/s: ours are never NIXL's. Decided by BACKEND."""
    memory, _ = await make_reader()
    agent = await agent_for(memory)
    assert BACKEND == "UCX" and list(agent.api.backends) == ["UCX"]
    agent.release()
