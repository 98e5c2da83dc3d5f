"""What a decode worker accepts at the end of a transfer, and how it waits for room."""

import asyncio
import math

import msgspec
import pytest

from kvrelay.decode.worker import Incoming, manifest_in
from kvrelay.engine.step.config import Reservation
from kvrelay.errors import TransferRefused
from kvrelay.plane.messages import Beams, Group, Manifest, Sampling, SequenceRequest, encode

pytestmark = pytest.mark.pure

VOCAB = 100


def request(num_outputs=0, group=None):
    return SequenceRequest(
        request_id="r",
        token_ids=[1] * (40 + num_outputs),
        num_prompt_tokens=40,
        block_hashes=[],
        sampling=Sampling(max_tokens=8),
        group=group,
    )


def manifest(**changes):
    return Manifest(**{"request_id": "r", "num_tokens": 40, "position": 0, "token_ids": [7], **changes})


def accepted(one, of=None):
    return manifest_in(encode(one), of or request(), VOCAB) == one


def test_a_manifest_that_fits_is_accepted():
    assert accepted(manifest())
    assert accepted(manifest(num_tokens=43, position=3), request(num_outputs=3))
    assert accepted(manifest(token_ids=[7, 8]), request(group=Group(seeds=(1, 2))))
    beams = request(group=Group(beams=Beams(width=2, num_returned=1)))
    assert accepted(manifest(token_ids=[], candidates=[(3, -0.5), (4, -1.0)]), beams)


@pytest.mark.parametrize("position", [1, -1, 4])
def test_a_manifest_at_another_position_is_refused(position):
    """Its token would be taken for another output of the sequence."""
    with pytest.raises(ValueError, match=f"output {position}, not 0"):
        manifest_in(encode(manifest(position=position)), request(), VOCAB)
    with pytest.raises(ValueError, match="output 0, not 3"):
        manifest_in(encode(manifest(num_tokens=43)), request(num_outputs=3), VOCAB)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_tokens": 39}, "39 tokens, not 40"),
        ({"token_ids": []}, "0 tokens, not 1"),
        ({"token_ids": [5, 6]}, "2 tokens, not 1"),
        ({"token_ids": [VOCAB]}, "vocabulary"),
        ({"token_ids": [-1]}, "vocabulary"),
        ({"candidates": [(3, -0.5)]}, "candidates"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(changes, why):
    with pytest.raises(ValueError, match=why):
        manifest_in(encode(manifest(**changes)), request(), VOCAB)


@pytest.mark.parametrize("candidates", [[], [(3, 0.5)], [(3, math.nan)], [(3, -1.0), (3, -2.0)], [(VOCAB, -1.0)]])
def test_candidates_that_no_beam_search_can_begin_with_are_refused(candidates):
    beams = request(group=Group(beams=Beams(width=2, num_returned=1)))
    with pytest.raises(ValueError, match="candidates"):
        manifest_in(encode(manifest(token_ids=[], candidates=candidates)), beams, VOCAB)


def test_bytes_that_are_no_manifest_are_refused():
    with pytest.raises(ValueError, match="malformed"):
        manifest_in(msgspec.msgpack.encode({"no": "manifest"}), request(), VOCAB)


# ---- waiting for room

RESERVATION = Reservation("r", 0, 3, (1, 2, 3), held_tokens=0, waited_s=0.0)


async def test_a_reservation_is_waited_for():
    incoming = Incoming(None, request())
    waiting = asyncio.create_task(incoming.reservation(30.0))
    await asyncio.sleep(0)
    assert incoming.is_waiting
    incoming.reserved(RESERVATION)
    assert await waiting is RESERVATION and not incoming.is_waiting


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan])
async def test_without_room_in_time_there_is_none(timeout_s):
    incoming = Incoming(None, request())
    assert await incoming.reservation(timeout_s) is None
    assert not incoming.is_waiting  # one that comes later goes back to the engine


async def test_a_failed_transfer_raises_and_takes_the_ticket_back():
    incoming = Incoming(None, request())
    incoming.has_ticket = True
    incoming.failed(TransferRefused("r", "cancelled: gone"))
    assert not incoming.has_ticket
    with pytest.raises(TransferRefused):
        await incoming.commit()
