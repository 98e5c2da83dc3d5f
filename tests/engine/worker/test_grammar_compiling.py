"""A worker compiles a request's grammar beside its loop and its engine; whatever happens meanwhile, nothing is left."""

import asyncio
import threading
from types import SimpleNamespace

import msgspec
import pytest
import torch

from kvrelay.decode.worker import DecodeRole
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.execution.constraints import Constraint
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.worker.ingresses import RequestTable
from kvrelay.engine.worker.service import WorkerServer, WorkerService
from kvrelay.engine.worker.thread import EngineThread
from kvrelay.errors import InvalidRequest
from kvrelay.kernels.select import select_backend
from kvrelay.plane import messages as wire
from kvrelay.serve.requests.retries import AttemptFailed, Retries
from kvrelay.types import Role
from tests.fakes import until

DIGITS = wire.GrammarSpec("regex", "[0-9]{6}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def request(name: str, grammar: wire.GrammarSpec | None = DIGITS, **own) -> wire.SequenceRequest:
    prompt = list(range(10, 50))
    sampling = wire.Sampling(max_tokens=12, temperature=1.0, seed=3, grammar=grammar, **own)
    return wire.SequenceRequest(
        request_id=name, token_ids=prompt, num_prompt_tokens=40, block_hashes=[], sampling=sampling
    )


class HeldCompiler:
    """The engine's own compiler, which waits until it may begin."""

    def __init__(self, compiler) -> None:
        self._compiler, self.may_go, self.begun = compiler, threading.Event(), []

    def compile(self, spec):
        self.begun.append(threading.current_thread())
        assert self.may_go.wait(20)
        return self._compiler.compile(spec)


class Link:
    """Of an ingress."""

    def __init__(self) -> None:
        self.requests, self.sent, self.peer = set(), [], "ingress"
        self.send = self.sent.append


class Worker:
    """A worker's requests, engine and dispatch, without its sockets and its KV plane."""

    def __init__(self, folder) -> None:
        engine = load_engine(
            folder, select_backend("cpu", "cpu", 1), torch.float32, EngineConfig(kv_memory_bytes=4 << 20)
        )
        engine.constraints.grammars = self.compiler = HeldCompiler(engine.constraints.grammars)
        self.thread = EngineThread(
            lambda: engine, on_step=lambda result: WorkerService._on_step(self, result), on_failure=print
        )
        self.requests = RequestTable("d0", Role.DECODE, self.thread, lambda: 1.0)
        self.released: list[tuple[str, str]] = []
        self.ends = self.source = self.target = self._reports = self
        service = SimpleNamespace(
            thread=self.thread, requests=self.requests, options=SimpleNamespace(secret=b"s"), tls=None
        )
        self.server = WorkerServer(service, self, self, self)
        self.links: list[Link] = []

    # ---- as both ends of the KV plane and the reports

    def drop(self, request_id, reason):
        self.released.append((request_id, reason))

    def release(self, request_id, reason):
        self.drop(request_id, reason)
        self.thread.post(lambda engine: engine.abort(request_id))

    def on_output(self, output):
        pass

    def on_reservations(self, reservations):
        pass

    def publish(self, result):
        pass

    # ---- as the ingress

    def link(self) -> Link:
        self.links.append(Link())
        return self.links[-1]

    def send(self, link, message) -> None:
        self.server._dispatch(link, message)

    def disconnect(self, link) -> None:
        """As WorkerServer does it at the connection's end."""
        for request_id in list(link.requests):
            self.requests.remove(request_id)
            self.release(request_id, "the ingress disconnected")

    async def assert_empty(self) -> None:
        await until(lambda: not self.requests._compiling)
        async with asyncio.timeout(60):
            while await self.thread.call(lambda engine: bool(engine.scheduler.sequences)):
                await asyncio.sleep(0.01)
        await self.thread.call(lambda engine: engine.check())
        assert not len(self.requests) and not any(link.requests for link in self.links)


@pytest.fixture
async def worker(folder):
    found = Worker(folder)
    await found.thread.start()
    yield found
    found.compiler.may_go.set()
    await found.assert_empty()
    await found.thread.aclose()


def outputs(link) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for message in link.sent:
        for out in getattr(message, "outputs", ()):
            found.setdefault(out.request_id, []).extend(out.token_ids)
    return found


def ended(link) -> set[str]:
    return {out.request_id for one in link.sent for out in getattr(one, "outputs", ()) if out.finish_reason}


async def test_others_are_served_meanwhile_and_then_it_is(worker):
    link = worker.link()
    worker.send(link, wire.Generate(request=request("bound")))
    worker.send(link, wire.Generate(request=request("plain", None)))
    await until(lambda: "plain" in ended(link))
    assert "bound" not in outputs(link)
    assert threading.main_thread() not in worker.compiler.begun and worker.compiler.begun
    worker.compiler.may_go.set()
    await until(lambda: "bound" in ended(link))
    text = bytes_of(outputs(link)["bound"])
    assert len(text) == 6 and text.isdigit()


def bytes_of(token_ids: list[int]) -> str:
    """Printable bytes come first in the byte tokenizer's vocabulary."""
    return "".join(chr(token - 3 + ord("!")) for token in token_ids if token > 2)


@pytest.mark.parametrize("how", ["abort", "disconnect"])
async def test_a_request_that_goes_while_its_grammar_compiles_never_reaches_the_engine(worker, how):
    link, taken = worker.link(), []
    worker.send(link, wire.Generate(request=request("gone")))
    await until(lambda: bool(worker.compiler.begun))
    engine = worker.thread.engine
    engine.add = lambda one, **options: taken.append(one.request_id)
    if how == "abort":
        worker.send(link, wire.Abort(request_id="gone"))
    else:
        worker.disconnect(link)
    worker.compiler.may_go.set()
    await worker.assert_empty()
    await asyncio.sleep(0.05)
    await worker.thread.call(lambda engine: None)
    del engine.add
    assert taken == [] and link.sent == []
    assert [name for name, _ in worker.released] == ["gone"]


async def test_the_same_id_again_is_a_duplicate_until_the_first_is_gone(worker):
    link, other = worker.link(), worker.link()
    worker.send(link, wire.Generate(request=request("one")))
    worker.send(other, wire.Generate(request=request("one")))
    assert [message.reason for message in other.sent] == ["duplicate"]
    worker.send(link, wire.Abort(request_id="one"))
    worker.send(other, wire.Generate(request=request("one", wire.GrammarSpec("regex", "[a-c]{3}"))))
    worker.compiler.may_go.set()
    await until(lambda: "one" in ended(other))
    assert link.sent == [] and set(bytes_of(outputs(other)["one"])) <= set("abc")


async def test_a_draining_worker_ends_what_it_has_begun_to_compile(worker):
    link = worker.link()
    worker.send(link, wire.Generate(request=request("one")))
    worker.requests.is_draining = True
    worker.send(link, wire.Generate(request=request("two")))
    assert [(one.request_id, one.reason) for one in link.sent] == [("two", "draining")]
    worker.compiler.may_go.set()
    await until(lambda: "one" in ended(link))


async def test_a_choice_that_is_aborted_meanwhile_is_not_computed(worker):
    link = worker.link()
    group = wire.Group(seeds=(1, 2))
    one = msgspec.structs.replace(request("g"), group=group)
    worker.send(link, wire.Generate(request=one))
    worker.send(link, wire.Abort(request_id="g", choice=0))
    worker.compiler.may_go.set()
    await until(lambda: "g" in ended(link))
    choices = {out.choice for message in link.sent for out in message.outputs if out.position > 0}
    assert choices == {1}


async def test_what_does_not_compile_is_refused_by_name(worker):
    link = worker.link()
    worker.compiler.may_go.set()
    worker.send(link, wire.Generate(request=request("one", wire.GrammarSpec("regex", "(["))))
    await until(lambda: bool(link.sent))
    [refused] = link.sent
    assert isinstance(refused, wire.Refused) and refused.reason == "grammar" and "regular expression" in refused.message
    assert worker.released == [("one", "grammar")]


async def test_an_unexpected_error_of_a_library_is_refused_too(worker, monkeypatch, caplog):
    def fail(spec):
        raise RuntimeError("panicked")

    monkeypatch.setattr(worker.compiler, "compile", fail)
    link = worker.link()
    worker.send(link, wire.Generate(request=request("one")))
    await until(lambda: bool(link.sent))
    assert link.sent[0].reason == "grammar" and "panicked" in caplog.text
    caplog.clear()


async def test_an_output_that_cannot_be_continued_fails_for_good(worker, monkeypatch):
    link = worker.link()
    worker.compiler.may_go.set()
    with monkeypatch.context() as patch:
        patch.setattr(Constraint, "cut", lambda *args: [])
        patch.setattr(Constraint, "matcher_row", no_more)
        worker.send(link, wire.Generate(request=request("one")))
        worker.send(link, wire.Generate(request=request("plain", None)))
        await until(lambda: any(isinstance(one, wire.Failed) for one in link.sent) and "plain" in ended(link))
    [failed] = [one for one in link.sent if isinstance(one, wire.Failed)]
    assert (failed.code, failed.retryable, failed.message) == ("grammar", False, "too many states")
    assert 0 < len(outputs(link)["one"]) < 6 and worker.released == [("one", "too many states")]


def no_more(self, drafts, row, real=Constraint.matcher_row):
    if self.num_seen == 3:
        self.problem = "too many states"
    return real(self, drafts, row)


async def test_a_reservation_waits_for_its_grammar(worker):
    """The decode role itself, with nothing behind its KV plane."""
    role = DecodeRole.__new__(DecodeRole)
    role._thread, role._requests, role._incoming, role._tasks = worker.thread, worker.requests, {}, {}
    link, reserved = worker.link(), []
    worker.on_reservations = reserved.extend
    role.handle(link, wire.Reserve(request=request("r"), timeout_s=30.0))
    await until(lambda: bool(worker.compiler.begun))
    assert not await worker.thread.call(lambda engine: bool(engine.scheduler.sequences))
    worker.compiler.may_go.set()
    await until(lambda: bool(reserved))
    assert await worker.thread.call(lambda engine: engine.scheduler.sequences["r"].constraint is not None)
    role.release("r", "the test is over")
    worker.requests.remove("r")


async def test_a_reservation_that_does_not_compile_leaves_no_task(worker):
    role = DecodeRole.__new__(DecodeRole)
    role._thread, role._requests, role._incoming, role._tasks = worker.thread, worker.requests, {}, {}
    link = worker.link()
    worker.compiler.may_go.set()
    role.handle(link, wire.Reserve(request=request("r", wire.GrammarSpec("regex", "([")), timeout_s=30.0))
    await until(lambda: bool(link.sent))
    assert link.sent[0].reason == "grammar" and not role._incoming
    await until(lambda: not role._tasks)


def test_the_ingress_makes_it_a_400():
    with pytest.raises(InvalidRequest, match="no such key") as caught:
        Retries().failed(AttemptFailed("d0", "grammar", "no such key"))
    assert caught.value.status == 400 and caught.value.code == "invalid_grammar"
