"""Fakes that make tests instant: a byte tokenizer, and workers that speak kvrelay.plane.messages but compute nothing.

A fake worker's output depends on the prompt, the seed and the position alone, as a real one's
does, so that any worker can continue any stream. It counts what it holds: a test that ends with
`holding` not empty has found a leak.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import msgspec

from kvrelay.engine.worker.ingresses import AssignedShares
from kvrelay.errors import ConnectionLost
from kvrelay.kvcache.index.changes import PART_HASHES, parts_of
from kvrelay.plane import connection as plane
from kvrelay.plane import messages as wire
from kvrelay.plane.framing import Connection
from kvrelay.plane.messages import SequenceRequest, TokenLogprob, TokenOutput
from kvrelay.plane.reports import Audited, KvSnapshot, LoadReport, Paired, PairReport, PathReport, Status, WorkerInfo
from kvrelay.serve.api.sessions import SessionHints, SessionKey, SessionTable, too_many_sessions
from kvrelay.serve.text.chat_template import template_of_request
from kvrelay.serve.text.tokenizer import ByteDetokenizer
from kvrelay.serve.workers.worker_link import Member
from kvrelay.types import Fingerprint, Role

SECRET = b"the secret of the tests"
EOS = 256
VOCAB_SIZE = 258
BLOCK_SIZE = 16
FINGERPRINT = Fingerprint(1, "fake", "float32", BLOCK_SIZE, 2, 2, 8, "seed")


class ByteCodec:
    """Every byte is a token; 256 is the end of a text, 257 is special too."""

    vocab_size = VOCAB_SIZE
    max_model_len = 512  # of the model that is served with it
    template = tool_template = response_template = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def chat_text(self, messages, *, add_generation_prompt: bool = True, **variables) -> str:
        text = "".join(f"<{message['role']}>{message['content']}\n" for message in messages)
        return text + ("<assistant>" if add_generation_prompt else "")

    def own_chat_text(self, source: str, messages, **variables) -> str:
        return template_of_request(source, ()).render(messages, **variables)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(self._visible(token) or b"" for token in token_ids).decode(errors="replace")

    def special_tokens(self) -> list[tuple[int, str]]:
        return [(256, "<|256|>"), (257, "<|257|>")]

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else f"<|{token_id}|>".encode()

    def _visible(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < 256 else None

    def detokenizer(self, *, skip_special_tokens: bool = True, starts_text=False, kept_ids=()) -> ByteDetokenizer:
        return ByteDetokenizer(self._visible if skip_special_tokens else self.token_bytes)


Script = Callable[[SequenceRequest, int], int]


def alphabet(request: SequenceRequest, position: int) -> int:
    """The default script: letters that depend on prompt, seed and position."""
    prompt = request.token_ids[: request.num_prompt_tokens]
    return ord("a") + (sum(prompt) + request.sampling.seed + position) % 26


def scripted(text: str | bytes, *, then_eos: bool = False) -> Script:
    """A script that says `text`, over and over or once and then EOS."""
    data = text.encode() if isinstance(text, str) else text

    def script(request: SequenceRequest, position: int) -> int:
        if then_eos and position >= len(data):
            return EOS
        return data[position % len(data)]

    return script


def expected_tokens(script: Script, request: SequenceRequest) -> list[int]:
    """All that a sequence will say, whoever computes it."""
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_tokens:
        tokens.append(script(request, len(tokens)))
        if tokens[-1] == EOS and not request.sampling.ignore_eos:
            break
    return tokens


class FakeWorker:
    """One worker on a real socket. `peers` are the decode workers that its transfers reach."""

    def __init__(
        self, worker_id: str, role: Role, script: Script = alphabet, *, claims_to_be: str = "", **info: object
    ) -> None:
        self.worker_id, self.role, self.script = worker_id, role, script
        self.received: list[wire.ToWorker] = []
        self.holding: set[str] = set()
        self.dropped: set[tuple[str, int]] = set()  # choices of groups that nobody waits for any more
        self.peers: dict[str, FakeWorker] = {}
        self.answers: list[Callable[[wire.ToWorker], wire.FromWorker | None]] = []  # consulted first, once each
        self.pause_at: int | None = None  # waits before it sends this position
        self.resume = asyncio.Event()
        self.paused = asyncio.Event()
        self.hold_first_token = asyncio.Event()
        self.hold_first_token.set()
        self.pairing: Callable[[wire.Pair], PairReport | None] = self.fits  # None: it says nothing
        self.prefetched: wire.Prefetched | None = wire.Prefetched(query_id=0)  # its answer; None: it says nothing
        self.audited: tuple[int, list[int]] | None = None  # its answer; None: it says nothing
        self.is_frozen = False  # it answers nothing, and its connections stay
        self.cached_tokens = 0
        self.cached: list[bytes] = []  # of its snapshot, as of event kv_seq
        self.kv_seq = 0
        self.part_hashes = PART_HASHES  # at most, in each message of its snapshot
        self._assigned: AssignedShares[Connection] = AssignedShares()
        self.tokens_per_message = 1
        self.num_greetings = 0
        self._name, self._info = claims_to_be or worker_id, info
        self._server = plane.Server(self._serve, SECRET)
        self._connections: dict[str, Connection] = {}
        self._all_connections: set[Connection] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reserved: dict[str, SequenceRequest] = {}
        self.changed = asyncio.Condition()

    async def start(self) -> Member:
        self.port = await self._server.start("127.0.0.1")
        return Member(self.worker_id, self.role.value, "127.0.0.1", self.port)

    async def aclose(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._server.aclose()

    async def kill(self) -> None:
        """Die as a process does: every connection ends, nothing is said."""
        for connection in self._all_connections:
            connection.abort()
        await self.aclose()

    def info(self) -> WorkerInfo:
        fields: dict[str, object] = {
            "worker_id": self._name, "role": self.role.value, "epoch": "e1", "host": "127.0.0.1",
            "port": self.port, "node_id": "n1", "model": "fake", "fingerprint": FINGERPRINT, "block_size": BLOCK_SIZE,
            "num_blocks": 1024, "max_model_len": 1024, "max_running": 64, "kv_bytes_per_token": 1024,
            "device": "cpu", "transports": ["fake"], "kv_port": 7 if self.role is Role.DECODE else 0,
        }  # fmt: skip
        return WorkerInfo(**{**fields, **self._info})  # type: ignore[arg-type]

    async def until(self, condition: Callable[["FakeWorker"], bool]) -> None:
        """Wait for something that this worker received or let go of."""
        async with self.changed, asyncio.timeout(60):
            await self.changed.wait_for(lambda: condition(self))

    def count(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.received)

    # ---- the protocol

    async def _serve(self, connection: Connection) -> None:
        self._all_connections.add(connection)
        self.num_greetings += 1
        async with self.changed:
            self.changed.notify_all()
        connection.send_nowait(wire.encode(wire.Welcome(protocol=wire.PROTOCOL_VERSION, info=self.info())))
        try:
            while True:
                message = wire.decode_to_worker(await connection.receive())
                self.received.append(message)
                if not self.is_frozen:
                    self._handle(connection, message)
                async with self.changed:
                    self.changed.notify_all()
        finally:
            self._all_connections.discard(connection)
            self._assigned.leave(connection)
            self._tell_others()

    def _tell_others(self) -> None:
        for connection, others in self._assigned.take_changes():
            self._send(connection, others)

    def _handle(self, connection: Connection, message: wire.ToWorker) -> None:
        if isinstance(message, wire.Abort) and message.choice is not None:
            self.dropped.add((message.request_id, message.choice))
        elif isinstance(message, wire.Abort):
            if self._connections.get(message.request_id) is connection:  # as a real worker: who asked may abort
                self.end(message.request_id)
        elif isinstance(message, wire.Ping):
            self._send(connection, wire.Pong())
        elif isinstance(message, wire.Subscribe):
            for part in parts_of(KvSnapshot(seq=self.kv_seq, hashes=self.cached), self.part_hashes):
                self._send(connection, part)
            self._send(connection, LoadReport(seq=1, free_blocks=1024, total_blocks=1024))
            self._assigned.join(connection)
            self._tell_others()
        elif isinstance(message, wire.Assigned):
            self._assigned.hear(connection, message)
            self._tell_others()
        elif isinstance(message, wire.StatusQuery | wire.CacheReset):
            self._send(connection, Status(query_id=message.query_id, json=b"{}"))
        elif isinstance(message, wire.Prefetch):
            if self.prefetched is not None:
                self._send(connection, msgspec.structs.replace(self.prefetched, query_id=message.query_id))
        elif isinstance(message, wire.Audit):
            if self.audited is not None:
                seq, tiers = self.audited
                self._send(connection, Audited(query_id=message.query_id, seq=seq, tiers=tiers))
        elif isinstance(message, wire.EndPins):
            pass  # it pins nothing
        elif isinstance(message, wire.Pair):
            if (report := self.pairing(message)) is not None:
                self._send(connection, Paired(report=report))
        else:
            self._take(connection, message)

    def fits(self, message: wire.Pair, *, bytes_per_s: float = 1e9) -> PairReport:
        """The report of a pair that works."""
        path = PathReport(path="fake", why="it is one", is_chosen=True, bytes_per_s=bytes_per_s, latency_s=1e-5)
        return PairReport(
            source=self.worker_id, target=message.worker_id, target_epoch=message.epoch, ok=True, paths=[path]
        )

    def incompatible(self, message: wire.Pair, *, reason: str = "fingerprint") -> PairReport:
        """The report of a pair that cannot."""
        return PairReport(
            source=self.worker_id,
            target=message.worker_id,
            target_epoch=message.epoch,
            ok=False,
            reason=reason,
            detail="dtype: 'float32' != 'bfloat16'",
            remedy="start both workers with the same settings",
        )

    def _take(self, connection: Connection, message: wire.Reserve | wire.Prefill | wire.Generate) -> None:
        request = message.request
        self._connections[request.request_id] = connection
        if self.answers and (answer := self.answers.pop(0)(message)) is not None:
            self._send(connection, answer)
            return
        self.holding.add(request.request_id)
        if isinstance(message, wire.Reserve):
            self._reserved[request.request_id] = request
            ticket = self.worker_id.encode()
            self._send(connection, wire.Reserved(request_id=request.request_id, ticket=ticket, held_tokens=0))
        elif isinstance(message, wire.Generate):
            self._spawn(request, self._say(request, request.num_output_tokens, None))
        else:
            self._spawn(request, self._prefill(request, message.ticket))

    def _spawn(self, request: SequenceRequest, coroutine) -> None:
        self._tasks[request.request_id] = asyncio.create_task(coroutine)

    async def _prefill(self, request: SequenceRequest, ticket: bytes | None) -> None:
        peer = self.peers[ticket.decode()] if ticket is not None else None
        await self.hold_first_token.wait()
        first = request.num_output_tokens
        is_over = await self._say(request, first, first + 1)
        if peer is not None and not is_over:
            peer.commit(request.request_id)
        self.end(request.request_id)

    def commit(self, request_id: str) -> None:
        """The prompt's KV has arrived here; go on from position 1."""
        request, connection = self._reserved.pop(request_id, None), self._connections.get(request_id)
        if request is None or connection is None:
            return
        transferred = wire.Transferred(
            request_id=request_id, transport="fake", blocks=1, num_bytes=64, seconds=0.001, exposed_s=0.0
        )
        self._send(connection, transferred)
        self._spawn(request, self._say(request, request.num_output_tokens + 1, None))

    async def _say_group(self, request: SequenceRequest, group: wire.Group, start: int, stop: int | None) -> bool:
        """Send every choice's tokens, side by side. True when all have ended."""
        live = [choice for choice in range(group.num_choices) if choice not in group.ended]
        own = {k: _choice_of(request, group, k) for k in live}
        tokens = {k: expected_tokens(self.script, own[k]) for k in live}
        at = {k: max(start, len(group.emitted[k]) if group.emitted and stop is None else 0) for k in live}
        live = [k for k in live if at[k] < len(tokens[k])]
        while going := [k for k in live if stop is None or at[k] < stop]:
            for k in going:
                if (request.request_id, k) in self.dropped:
                    live.remove(k)
                    continue
                position, at[k] = at[k], at[k] + 1
                if at[k] == len(tokens[k]):
                    live.remove(k)
                if self.pause_at is not None and position >= self.pause_at:
                    self.paused.set()
                    await self.resume.wait()
                self.send_output(own[k], tokens[k], position, 1, is_first=position == 0, choice=k, num_left=len(live))
            await asyncio.sleep(0)
        if not live:
            self.end(request.request_id)
        return not live

    async def _say(self, request: SequenceRequest, start: int, stop: int | None) -> bool:
        """Send tokens from position `start` on. True when the sequence has ended."""
        if request.group is not None:
            return await self._say_group(request, request.group, start, stop)
        tokens = expected_tokens(self.script, request)
        last = len(tokens) if stop is None else min(stop, len(tokens))
        position = start
        while position < last:
            if self.pause_at is not None and position >= self.pause_at:
                self.paused.set()
                await self.resume.wait()
            count = min(self.tokens_per_message, last - position)
            self.send_output(request, tokens, position, count, is_first=position == request.num_output_tokens)
            position += count
            await asyncio.sleep(0)
        is_over = position >= len(tokens)
        if is_over:
            self.end(request.request_id)
        return is_over

    def send_output(
        self,
        request: SequenceRequest,
        tokens: list[int],
        position: int,
        count: int,
        *,
        is_first: bool,
        choice: int = 0,
        num_left: int = 0,
    ) -> None:
        said = tokens[position : position + count]
        is_last = position + count == len(tokens)
        top = request.sampling.logprobs
        output = TokenOutput(
            request_id=request.request_id,
            position=position,
            token_ids=said,
            choice=choice,
            num_left=num_left,
            logprobs=[] if top is None else [_logprob(token, top) for token in said],
            finish_reason=("stop" if said[-1] == EOS and not request.sampling.ignore_eos else "length")
            if is_last
            else None,
            stop_token=EOS if is_last and said[-1] == EOS and not request.sampling.ignore_eos else None,
        )
        if is_first:
            asked = request.sampling.prompt_logprobs
            prompt = request.token_ids[1 : request.num_prompt_tokens]
            output = msgspec.structs.replace(
                output,
                cached_tokens=self.cached_tokens,
                prompt_logprobs=[] if asked is None else [_logprob(token, asked) for token in prompt],
                timings=wire.Timings(queue_s=0.0001, compute_s=0.0002, num_chunks=1),
            )
        connection = self._connections.get(request.request_id)
        if connection is not None:
            self._send(connection, wire.Tokens(outputs=[output]))

    def say_raw(self, message: wire.FromWorker) -> None:
        """Send something on every connection, however wrong it is."""
        for connection in self._all_connections:
            self._send(connection, message)

    def end(self, request_id: str) -> None:
        """Let go of a sequence."""
        self.holding.discard(request_id)
        self._reserved.pop(request_id, None)
        task = self._tasks.get(request_id)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    @staticmethod
    def _send(connection: Connection, message: wire.FromWorker) -> None:
        with contextlib.suppress(ConnectionLost):
            connection.send_nowait(wire.encode(message))


def _choice_of(request: SequenceRequest, group: wire.Group, choice: int) -> SequenceRequest:
    """The request of its own that this choice of a group stands for."""
    sampling = msgspec.structs.replace(request.sampling, seed=group.seeds[choice] if group.seeds else choice)
    return msgspec.structs.replace(request, sampling=sampling)


def _logprob(token: int, top: int) -> TokenLogprob:
    """-0.5 for the token itself, and worse ones for those after it."""
    return TokenLogprob(token, -0.5, [((token + step) % 256, -0.5 - step) for step in range(top)], 1)


class OwnSessions:
    """The sessions of a single ingress."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._table, self._clock = SessionTable(), clock

    async def put(self, key: SessionKey, hints: SessionHints) -> None:
        if self._table.put(key, hints, self._clock()) is None:
            raise too_many_sessions()

    async def get(self, key: SessionKey) -> SessionHints | None:
        return self._table.get(key, self._clock())

    async def delete(self, key: SessionKey) -> SessionHints | None:
        return self._table.delete(key)


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait until `condition` holds; TimeoutError when it does not in time."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.001)
