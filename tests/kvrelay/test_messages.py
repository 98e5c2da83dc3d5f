"""Messages survive the wire unchanged; what is not a message is refused, never guessed."""

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.plane import messages as wire
from kvrelay.plane.reports import (
    CHANGING,
    IN_POOL,
    AssignedByOthers,
    Audited,
    KvEvents,
    KvPathLoad,
    KvSnapshot,
    LoadReport,
    Paired,
    PairReport,
    PairsSeen,
    PathReport,
    Status,
    WorkerInfo,
)
from kvrelay.types import Fingerprint

pytestmark = pytest.mark.pure


SAMPLING = wire.Sampling(max_tokens=5, temperature=0.5, stop_token_ids=(1, 2), logit_bias={7: -1.5}, logprobs=0)
REQUEST = wire.SequenceRequest(
    request_id="r1",
    token_ids=[1, 2, 3],
    num_prompt_tokens=2,
    block_hashes=[b"h" * 16],
    sampling=SAMPLING,
    salt="t",
    hints=wire.KvHints(keep=True, priority=-2, pin_s=60.0, session="/chat#1"),
)
INFO = WorkerInfo(
    worker_id="w1",
    role="decode",
    epoch="e",
    host="h",
    port=1,
    node_id="n",
    model="m",
    fingerprint=Fingerprint(1, "m", "bfloat16", 16, 2, 2, 8, "seed", order="HND", versions="kvrelay 0"),
    block_size=16,
    num_blocks=10,
    max_model_len=160,
    max_running=4,
    kv_bytes_per_token=8,
    device="cpu",
    transports=["shm", "tcp"],
)
OUTPUT = wire.TokenOutput(
    request_id="r1",
    position=0,
    token_ids=[5],
    logprobs=[wire.TokenLogprob(5, -0.25, [(5, -0.25), (6, -2.0)])],
    finish_reason="stop",
    stop_token=5,
    cached_tokens=16,
    timings=wire.Timings(queue_s=0.1, compute_s=0.2, num_chunks=3),
)

PAIR = PairReport(
    source="p0",
    target="d0",
    target_epoch="e",
    ok=False,
    reason="fingerprint",
    detail="dtype",
    remedy="set it alike",
    paths=[PathReport(path="shm", why="same host", is_chosen=True, bytes_per_s=1e9, latency_s=1e-5)],
)
TO_WORKER = [
    wire.Reserve(request=REQUEST, timeout_s=1.5),
    wire.Prefill(request=REQUEST, ticket=b"\x00\xff"),
    wire.Prefill(request=REQUEST),
    wire.Generate(request=REQUEST),
    wire.Abort(request_id="r1", reason="client"),
    wire.Ping(),
    wire.Subscribe(),
    wire.StatusQuery(query_id=3),
    wire.CacheReset(query_id=4),
    wire.Pair(worker_id="d0", epoch="e", host="h", kv_port=7, is_probe=True),
    wire.Prefetch(query_id=5, request=REQUEST, hold_s=30.0),
    wire.EndPins(session="/chat#1"),
    wire.Audit(query_id=6, hashes=[b"a" * 16]),
    wire.Assigned(tokens=700, prompts=2, sequences=3, blocks=44),
    wire.SetRole(query_id=7, role="decode", drain_s=1.5),
]
FROM_WORKER = [
    wire.Welcome(protocol=wire.PROTOCOL_VERSION, info=INFO),
    wire.Reserved(request_id="r1", ticket=b"t", held_tokens=16, waited_s=0.5),
    wire.Refused(request_id="r1", reason="full", message="no room", retry_after_s=2.0),
    wire.Tokens(outputs=[OUTPUT, wire.TokenOutput(request_id="r2", position=9, token_ids=[1, 2])]),
    wire.Failed(request_id="r1", code="transfer", message="x", retryable=True),
    wire.Transferred(request_id="r1", transport="shm", blocks=2, num_bytes=99, seconds=0.1, exposed_s=0.0),
    AssignedByOthers(2, False, tokens=700, prompts=2, sequences=3, blocks=44),
    KvEvents(seq=4, stored=[b"a" * 16], removed=[]),
    KvSnapshot(seq=4, hashes=[b"a" * 16]),
    LoadReport(
        seq=1, running=2, transport="shm", kv_refused={"checksum": 1}, kv_paths=[KvPathLoad("shm", 9, 0.5, 0.1, 0.2, 1)]
    ),
    Status(query_id=3, json=b"{}"),
    Audited(query_id=6, seq=4, tiers=[IN_POOL, CHANGING]),
    Paired(report=PAIR),
    PairsSeen(reports=[PAIR]),
    wire.RoleNow(role="both"),
    wire.Pong(),
    wire.Prefetched(query_id=5, pool_tokens=16, host_tokens=32, coming_tokens=48, problem="full", message="m"),
]


def kind(message):
    return type(message).__name__


@pytest.mark.parametrize("message", TO_WORKER, ids=kind)
def test_a_message_to_a_worker_arrives_as_sent(message):
    assert wire.decode_to_worker(wire.encode(message)) == message


@pytest.mark.parametrize("message", FROM_WORKER, ids=kind)
def test_a_message_from_a_worker_arrives_as_sent(message):
    assert wire.decode_from_worker(wire.encode(message)) == message


@pytest.mark.parametrize(("union", "sent"), [(wire.ToWorker, TO_WORKER), (wire.FromWorker, FROM_WORKER)])
def test_every_message_has_been_tried(union, sent):
    assert {type(message) for message in sent} == set(typing.get_args(union))


def test_tags_are_unique():
    kinds = typing.get_args(wire.ToWorker) + typing.get_args(wire.FromWorker)
    assert len({k.__struct_config__.tag for k in kinds}) == len(kinds)


@pytest.mark.parametrize("message", TO_WORKER, ids=kind)
def test_a_message_in_the_wrong_direction_is_refused(message):
    with pytest.raises(msgspec.ValidationError):
        wire.decode_from_worker(wire.encode(message))


def test_an_unknown_tag_is_refused():
    with pytest.raises(msgspec.ValidationError, match="launch-missiles"):
        wire.decode_to_worker(msgspec.msgpack.encode({"type": "launch-missiles"}))


@pytest.mark.parametrize("message", [*TO_WORKER, *FROM_WORKER], ids=kind)
def test_a_truncated_frame_is_refused(message):
    frame = wire.encode(message)
    decode = wire.decode_to_worker if message in TO_WORKER else wire.decode_from_worker
    for size in range(len(frame)):
        with pytest.raises(msgspec.DecodeError):
            decode(frame[:size])


def test_trailing_bytes_are_refused():
    with pytest.raises(msgspec.DecodeError):
        wire.decode_to_worker(wire.encode(wire.Subscribe()) + b"\x00")


@given(st.binary(max_size=60))
def test_noise_is_refused_or_a_message_but_never_another_error(noise):
    for decode, union in ((wire.decode_to_worker, wire.ToWorker), (wire.decode_from_worker, wire.FromWorker)):
        try:
            message = decode(noise)
        except msgspec.DecodeError:
            continue
        assert isinstance(message, typing.get_args(union))


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "abort"},  # a field is missing
        {"type": "abort", "request_id": 5},
        {"type": "reserve", "request": {}, "timeout_s": 1.0},
        {"type": "status?", "query_id": "1"},
    ],
)
def test_wrong_fields_are_refused(fields):
    with pytest.raises(msgspec.ValidationError):
        wire.decode_to_worker(msgspec.msgpack.encode(fields))


def test_a_newer_peers_extra_field_is_ignored():
    frame = msgspec.msgpack.encode({"type": "abort", "request_id": "r1", "colour": "blue"})
    assert wire.decode_to_worker(frame) == wire.Abort(request_id="r1")


def test_messages_are_frozen():
    with pytest.raises(AttributeError):
        wire.Abort(request_id="r1").request_id = "r2"  # type: ignore[misc]


def test_output_tokens_are_what_follows_the_prompt():
    assert REQUEST.num_output_tokens == 1
