"""A prefill worker's blocks stay the sequence's until the decode worker has committed them, or never will."""

import asyncio
from types import SimpleNamespace

import pytest

from kvrelay.decode.target import SourceLink
from kvrelay.engine.worker.ingresses import RequestTable
from kvrelay.plane import messages as wire
from kvrelay.prefill.worker import Announcements, PrefillRole
from kvrelay.types import Role
from tests.kvtransfer.held_reader import held_transport, settled

pytestmark = pytest.mark.alone

BLOCKS, TARGET_BLOCKS = [5, 2, 9], [7, 8, 6]


class Engine:
    """Records what it is asked to do, and how far the decode worker was when the blocks became free."""

    def __init__(self, target):
        self._target = target
        self.calls, self.freed_at, self.requests = [], [], self

    def refusal(self, request):
        return None

    def add(self, request, **options):
        self.calls.append(("add", request.request_id, options))

    def abort(self, request_id):
        self.freed_at.append(self._target.kinds(request_id))

    def post(self, action):
        action(self)


class Prefilling:
    """A prefill role with a real source, and the target that reads from it."""

    def __init__(self, source, target):
        self.engine, self.target = Engine(target), target
        self.sent = []
        self.link = SimpleNamespace(requests=set(), peer="ingress", send=self.sent.append)
        self.requests = RequestTable("p0", Role.PREFILL, self.engine, lambda: 1.0)
        self.announcements = Announcements()
        self.role = PrefillRole("p0", source, self.engine, self.requests, self.announcements)

    async def begin(self):
        """The engine has computed every layer of the prompt."""
        ticket = self.target.grant("r", 0, TARGET_BLOCKS, 3)
        self.role.handle(self.link, wire.Prefill(request=request("r"), ticket=ticket))
        self.announcements.on_layers("r", 0, BLOCKS, range(4))
        await asyncio.sleep(0)

    def sample(self, **ends):
        self.role.on_output(wire.TokenOutput(request_id="r", position=0, token_ids=[11], **ends))

    async def until_freed(self):
        async with asyncio.timeout(60):
            while not self.engine.freed_at:
                await asyncio.sleep(0)
        return self.engine.freed_at


def request(name):
    ids = list(range(3, 51))
    return wire.SequenceRequest(
        request_id=name, token_ids=ids, num_prompt_tokens=48, block_hashes=[], sampling=wire.Sampling(max_tokens=4)
    )


@pytest.fixture(params=["full", "off"])
async def held(kv, request):
    """(the prefilling side, the held reads' finish functions, event of the first)."""
    table, reads, has_begun = held_transport()
    source = await kv.source(checks=request.param)
    prefilling = Prefilling(source, await kv.target(transports=table, checks=request.param))
    yield prefilling, reads, has_begun
    await prefilling.role.aclose()


async def finish(reads, error=None):
    while reads:
        reads.pop(0)(error)
        await asyncio.sleep(0)


async def test_blocks_are_freed_once_the_decode_worker_has_committed(held):
    prefilling, reads, has_begun = held
    await prefilling.begin()
    prefilling.sample()
    await asyncio.wait_for(has_begun.wait(), 20)
    await settled(prefilling.role.plane)
    assert prefilling.engine.freed_at == [], "freed while the decode worker reads"
    assert prefilling.engine.calls == [("add", "r", {"hold": True, "output_limit": 1, "grammar": None})]
    await finish(reads)
    assert await prefilling.until_freed() == [["commit"]], "freed before the decode worker committed"
    await settled(prefilling.role.plane)
    assert len(prefilling.engine.freed_at) == 1 and "r" not in prefilling.requests
    manifest = wire.decode_manifest((await prefilling.target.event("commit", "r"))[0])
    assert (manifest.num_tokens, manifest.position, manifest.token_ids) == (48, 0, [11])


async def test_a_commit_that_is_about_to_be_still_holds_the_blocks(held, monkeypatch):
    """The target may have asked whether the blocks were held to the end: they still are when its answer comes."""
    prefilling, reads, has_begun = held
    commits = []

    def record(link, grant):
        commits.append((link, grant))

    monkeypatch.setattr(SourceLink, "_commit", record)
    await prefilling.begin()
    prefilling.sample()
    await asyncio.wait_for(has_begun.wait(), 20)
    await finish(reads)
    async with asyncio.timeout(60):
        while not commits:
            await asyncio.sleep(0)
    await settled(prefilling.role.plane)
    assert prefilling.engine.freed_at == []
    monkeypatch.undo()
    SourceLink._commit(*commits[0])
    assert await prefilling.until_freed() == [["commit"]]


async def test_blocks_are_freed_when_the_decode_worker_refuses(held):
    prefilling, _reads, has_begun = held
    await prefilling.begin()
    await asyncio.wait_for(has_begun.wait(), 20)
    prefilling.target.revoke("r")
    await settled(prefilling.role.plane)
    assert prefilling.engine.freed_at == [], "the first token is not sampled yet"
    prefilling.sample()
    assert await prefilling.until_freed() == [[]]
    (failed,) = [message for message in prefilling.sent if isinstance(message, wire.Failed)]
    assert failed.retryable and failed.code == "transfer"


async def test_an_abort_frees_the_blocks_and_ends_the_transfer(held):
    prefilling, reads, has_begun = held
    await prefilling.begin()
    prefilling.sample()
    await asyncio.wait_for(has_begun.wait(), 20)
    prefilling.requests.remove("r")
    prefilling.role.release("r", "client")
    assert len(prefilling.engine.freed_at) == 1
    await prefilling.target.event("failed", "r")
    await finish(reads)
    await prefilling.target.event("released", "r")
    assert prefilling.target.kinds("r") == ["failed", "released"] and len(prefilling.engine.freed_at) == 1


async def test_a_request_that_ends_with_its_first_token_sends_nothing(held):
    prefilling, _reads, _has_begun = held
    await prefilling.begin()
    prefilling.sample(finish_reason="stop")
    await prefilling.target.event("failed", "r")
    assert prefilling.engine.freed_at == []  # the engine has freed them itself
