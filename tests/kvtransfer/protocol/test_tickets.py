"""Tickets: only what this cluster sealed opens, and unchanged."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import TransferRefused
from kvrelay.kvtransfer.protocol import messages
from kvrelay.kvtransfer.protocol.messages import Reason, Ticket, open_ticket, reason_of, refusal, seal
from kvrelay.types import Fingerprint, KvLayout

pytestmark = pytest.mark.pure


SECRET = b"secret"
LAYOUT = KvLayout(30, 64, 16, 3, 64, "bfloat16")
FINGERPRINT = Fingerprint(1, "m", "bfloat16", 16, 30, 3, 64, "seed")


def ticket(**changes):
    fields = {
        "request_id": "r1",
        "target_worker": "d0",
        "target_epoch": "e1",
        "target_host": "127.0.0.1",
        "target_port": 4000,
        "first_block": 1,
        "num_blocks": 4,
        "num_tokens": 61,
        "layout": LAYOUT,
        "target_blocks": [9, 4, 7],
        "generations": [2, 0, 5],
        "fingerprint": FINGERPRINT,
        "lease_s": 10.0,
        "nonce": b"n" * 16,
    }
    return Ticket(**{**fields, **changes})


def reason(data, secret=SECRET):
    with pytest.raises(TransferRefused) as refused:
        open_ticket(data, secret)
    return reason_of(refused.value)


def test_a_sealed_ticket_opens_as_it_was():
    assert open_ticket(seal(ticket(), SECRET), SECRET) == ticket()


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(position, bit):
    data = bytearray(seal(ticket(), SECRET))
    data[position % len(data)] ^= 1 << bit
    assert reason(bytes(data)) is Reason.BAD_MAC


@given(st.binary(max_size=300))
def test_garbage_is_refused_and_never_crashes(data):
    assert reason(data) is Reason.BAD_MAC


@given(length=st.integers(0, 10_000))
def test_a_cut_ticket_is_refused(length):
    data = seal(ticket(), SECRET)
    assert reason(data[: length % len(data)]) is Reason.BAD_MAC


def test_another_clusters_ticket_is_refused():
    assert reason(seal(ticket(), b"other"), SECRET) is Reason.BAD_MAC


@pytest.mark.parametrize("missing", list(Ticket.__struct_fields__))
def test_a_sealed_ticket_without_a_field_is_refused(missing):
    """CVE-2026-94622's case: incomplete parameters must not reach anything that indexes with them."""
    fields = {key: value for key, value in msgspec.to_builtins(ticket()).items() if key != missing}
    body = msgspec.msgpack.encode(fields)

    assert reason(messages._mac(body, SECRET) + body) is Reason.BAD_MAC


@pytest.mark.parametrize(
    "changes",
    [
        {"first_block": 5},
        {"first_block": -1, "target_blocks": [1, 2, 3, 4, 5], "generations": [0] * 5},
        {"target_blocks": [1, 2]},
        {"generations": [1]},
        {"num_tokens": 65},
        {"num_tokens": 48},
        {"target_blocks": [1, 1, 2]},
        {"target_blocks": [1, -1, 2]},
    ],
)
def test_numbers_that_do_not_fit_together_are_out_of_range(changes):
    assert reason(seal(ticket(**changes), SECRET)) is Reason.OUT_OF_RANGE


def test_a_ticket_for_nothing_is_a_ticket():
    empty = ticket(first_block=4, target_blocks=[], generations=[])
    assert open_ticket(seal(empty, SECRET), SECRET) == empty


@pytest.mark.parametrize("reason", list(Reason))
def test_a_refusal_tells_its_reason(reason):
    assert reason_of(refusal("r1", reason, "why: exactly")) is reason
    assert reason_of(refusal("r1", reason)) is reason


def test_a_foreign_refusal_has_no_reason():
    assert reason_of(TransferRefused("r1", "something else")) is None
