"""What sealing must do in every store. A test file subclasses `SealedContract` as `Test…` and gives two fixtures:

    open_sealed(codec) -> a started store of NAMESPACE's blocks with this codec, over what earlier ones have left
    payloads -> what lies in the store, for someone who can read and write it: a StoredPayloads

Only whoever has the cluster's secret and the root of the tenant's chains opens a block, as it was and as itself.
"""

import pytest

from kvrelay.kvcache.stores.codecs import LosslessCodec, NoCodec
from kvrelay.kvcache.stores.namespace import Namespace
from kvrelay.kvcache.stores.sealing import SEAL_BYTES, SealedCodec
from tests.kvcache.stores.store_contract import BLOCK_BYTES, assert_right, chain, content, fetch, keep

SECRET = b"the cluster's secret"
NAMESPACE = Namespace.of({"model": "model-a", "dtype": "bfloat16"})
SEALED_BYTES = BLOCK_BYTES + SEAL_BYTES


def sealed(secret=SECRET, codec=None, namespace=NAMESPACE):
    return SealedCodec(codec or NoCodec(), secret, namespace)


class StoredPayloads:
    """Blocks as a store holds them, without its headers: those are no secret, and anyone can make them anew."""

    def everything(self):
        """All bytes that the store keeps."""
        raise NotImplementedError

    def read(self):
        """The payload of each block, by whatever names it."""
        raise NotImplementedError

    def write(self, name, payload):
        """Replace a payload; one that is shorter is where it ended."""
        raise NotImplementedError


def lies_in(stored, hashes):
    """Whether any part of these blocks' bytes is there to be read."""
    return any(bytes(content(digest)[at : at + 16]) in stored for digest in hashes for at in range(0, BLOCK_BYTES, 512))


class SealedContract:
    def test_what_is_sealed_is_loaded_bit_for_bit_also_by_a_later_process(self, open_sealed):
        store, (hashes, metas) = open_sealed(sealed()), chain(12, salt="mine")
        assert keep(store, hashes, metas) == [True] * 12
        assert assert_right(hashes, fetch(store, hashes)) == 12
        store.close()
        assert assert_right(hashes, fetch(open_sealed(sealed()), hashes)) == 12

    def test_compressed_blocks_are_sealed_too(self, open_sealed):
        codec, (hashes, metas) = sealed(codec=LosslessCodec("bfloat16")), chain(4)
        store = open_sealed(codec)
        keep(store, hashes, metas)
        assert assert_right(hashes, fetch(store, hashes)) == 4

    @pytest.mark.parametrize("is_sealed", [True, False])
    def test_no_byte_of_a_block_can_be_read_in_the_store(self, open_sealed, payloads, is_sealed):
        """And where it is not sealed it can, so that the test would see it."""
        store, (hashes, metas) = open_sealed(sealed() if is_sealed else NoCodec()), chain(6)
        keep(store, hashes, metas)
        store.close()
        assert lies_in(payloads.everything(), hashes) is not is_sealed

    def test_neither_a_root_nor_the_secret_is_in_the_store(self, open_sealed, payloads):
        store, (hashes, metas) = open_sealed(sealed()), chain(6, salt="mine")
        keep(store, hashes, metas)
        stored = payloads.everything()
        assert all(payload in stored for payload in payloads.read().values())
        assert metas[0].root[:8] not in stored and SECRET not in stored

    def test_another_tenants_key_opens_nothing(self, open_sealed):
        (hashes, metas), (_, theirs) = chain(3, salt="mine"), chain(3, salt="theirs")
        store = open_sealed(sealed())
        keep(store, hashes, metas)
        assert fetch(store, hashes, theirs) == [None] * 3
        assert store.stats().corrupt_blocks == 3

    def test_another_clusters_secret_finds_nothing_and_harms_nothing(self, open_sealed):
        store, (hashes, metas) = open_sealed(sealed()), chain(3)
        keep(store, hashes, metas)
        store.close()
        other = open_sealed(sealed(b"another"))
        assert other.contains(hashes) == [False] * 3
        assert fetch(other, hashes) == [None] * 3
        assert other.stats().corrupt_blocks == 0
        other.close()
        assert assert_right(hashes, fetch(open_sealed(sealed()), hashes)) == 3

    @pytest.mark.parametrize("codecs", [(sealed(), NoCodec()), (NoCodec(), sealed())], ids=["sealed", "plain"])
    def test_sealed_and_plain_blocks_do_not_mix(self, open_sealed, codecs):
        store, (hashes, metas) = open_sealed(codecs[0]), chain(3)
        keep(store, hashes, metas)
        store.close()
        other = open_sealed(codecs[1])
        assert other.contains(hashes) == [False] * 3
        assert fetch(other, hashes) == [None] * 3

    @pytest.mark.parametrize("at", [0, 12, BLOCK_BYTES // 2, SEALED_BYTES - 1])
    def test_a_flipped_bit_in_nonce_block_or_tag_is_a_miss(self, open_sealed, payloads, at):
        store, (hashes, metas) = open_sealed(sealed()), chain(3)
        keep(store, hashes, metas)
        name, payload = sorted(payloads.read().items())[1]
        payloads.write(name, payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :])
        blocks = fetch(store, hashes)
        assert (assert_right(hashes, blocks), store.stats().corrupt_blocks) == (2, 1)
        assert store.contains(hashes) == [block is not None for block in blocks]
        assert keep(store, hashes, metas) == [True] * 3
        assert assert_right(hashes, fetch(store, hashes)) == 3

    def test_blocks_of_one_tenant_that_changed_places_are_misses(self, open_sealed, payloads):
        store, (hashes, metas) = open_sealed(sealed()), chain(3)
        keep(store, hashes, metas)
        (first, one), (second, other), _ = sorted(payloads.read().items())
        payloads.write(first, other)
        payloads.write(second, one)
        assert (assert_right(hashes, fetch(store, hashes)), store.stats().corrupt_blocks) == (1, 2)

    @pytest.mark.parametrize("size", [0, 11, 27, SEALED_BYTES // 2, SEALED_BYTES - 1])
    def test_what_was_cut_off_is_a_miss(self, open_sealed, payloads, size):
        store, (hashes, metas) = open_sealed(sealed()), chain(3)
        keep(store, hashes, metas)
        name, payload = sorted(payloads.read().items())[0]
        payloads.write(name, payload[:size])
        assert (assert_right(hashes, fetch(store, hashes)), store.stats().corrupt_blocks) == (2, 1)
