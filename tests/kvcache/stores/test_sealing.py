"""Sealed blocks: what opens them and what does not, their nonces and keys; and sealed blocks in the disk tier."""

import dataclasses

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvrelay.errors import ConfigError
from kvrelay.hashing import root_hash
from kvrelay.kvcache.stores.codecs import CodecError, NoCodec
from kvrelay.kvcache.stores.disk.format import PAGE_BYTES, pages, smallest_limit
from kvrelay.kvcache.stores.disk.tier import DiskOptions, DiskStore
from kvrelay.kvcache.stores.sealing import SEAL_BYTES
from tests.kvcache.stores.sealed_contract import NAMESPACE, SEALED_BYTES, SealedContract, StoredPayloads, sealed
from tests.kvcache.stores.store_contract import BLOCK_BYTES, StoreContract, chain, content, started

RECORD_BYTES = PAGE_BYTES + pages(SEALED_BYTES)
[DIGEST], [META] = chain(1, salt="tenant\0salt")
BLOCK = content(DIGEST)


def opened(codec, data, digest=DIGEST, meta=META):
    into = memoryview(bytearray(BLOCK_BYTES))
    codec.of(digest, meta).decode(memoryview(bytes(data)), into)
    return into


def test_what_is_sealed_opens_as_it_was():
    data = sealed().of(DIGEST, META).encode(BLOCK)
    assert data.nbytes == sealed().most_bytes(BLOCK_BYTES) == BLOCK_BYTES + SEAL_BYTES
    assert bytes(BLOCK[:16]) not in bytes(data)
    assert opened(sealed(), data) == BLOCK


@pytest.mark.parametrize(
    "codec, digest, changes",
    [
        (sealed(b"another cluster"), DIGEST, {}),
        (sealed(namespace=NAMESPACE.with_fields(layers=7)), DIGEST, {}),
        (sealed(), b"x" * 16, {}),
        (sealed(), DIGEST, {"root": root_hash("another tenant\0salt")}),
        (sealed(), DIGEST, {"root": root_hash("tenant\0another salt")}),
        (sealed(), DIGEST, {"end_tokens": META.end_tokens + 16}),
    ],
    ids=["secret", "layout", "hash", "tenant", "salt", "position"],
)
def test_another_secret_layout_block_tenant_or_position_does_not_open_it(codec, digest, changes):
    data = sealed().of(DIGEST, META).encode(BLOCK)
    with pytest.raises(CodecError, match="seal is broken"):
        opened(codec, data, digest, dataclasses.replace(META, **changes))


def test_the_same_block_is_never_sealed_with_the_same_nonce():
    coder = sealed().of(DIGEST, META)
    found = [bytes(coder.encode(BLOCK)) for _ in range(1000)]
    assert len({data[:12] for data in found}) == len({data[12:] for data in found}) == 1000


def test_each_block_has_a_key_of_its_own():
    """So the number of blocks that a tenant may have is not bounded by the number of nonces of one key."""
    hashes, metas = chain(2)
    assert metas[0].root == metas[1].root
    assert sealed().of(hashes[0], metas[0]).key != sealed().of(hashes[1], metas[1]).key


def test_anyone_with_the_key_opens_it_with_the_usual_aes_gcm():
    """The negative control of all that is refused here: it is this cipher, with this key, nonce and context."""
    seal = sealed().of(DIGEST, META)
    data = bytes(seal.encode(BLOCK))
    assert AESGCM(seal.key).decrypt(data[:12], data[12:], seal.context) == BLOCK


def test_the_name_tells_secrets_apart_without_telling_them():
    assert sealed().name == sealed().name != sealed(b"another").name
    assert sealed().name.startswith("none+aes-256-gcm:") and b"secret" not in sealed().name.encode()


def test_without_a_secret_nothing_is_sealed():
    with pytest.raises(ConfigError, match="secret"):
        sealed(b"")


# ---- in the disk tier


class DiskPayloads(StoredPayloads):
    def __init__(self, folder):
        self._folder = folder

    def everything(self):
        return b"".join(path.read_bytes() for path in self._folder.rglob("*") if path.is_file())

    def _segment(self):
        (path,) = self._folder.glob("worker-0/segment-*.kv")
        return path

    def read(self):
        data = self._segment().read_bytes()
        begins = [at for at in range(0, len(data), RECORD_BYTES) if data[at : at + 8] == b"KVRBLOCK"]
        return {at: data[at + PAGE_BYTES : at + PAGE_BYTES + SEALED_BYTES] for at in begins}

    def write(self, name, payload):
        with self._segment().open("r+b") as file:
            file.seek(name + PAGE_BYTES)
            file.write(payload.ljust(SEALED_BYTES, b"\0"))


@pytest.fixture
def open_disk(tmp_path):
    with started() as start:

        def open_disk(codec, num_blocks=16, namespace=NAMESPACE):
            limit = smallest_limit(0) + num_blocks * (PAGE_BYTES + pages(codec.most_bytes(BLOCK_BYTES)))
            options = DiskOptions(is_admission_on=False, segment_bytes=16 * RECORD_BYTES)
            store = DiskStore(tmp_path / "kv", limit, BLOCK_BYTES, namespace, codec=codec, options=options)
            return start(store)

        yield open_disk


class TestSealedDiskStore(SealedContract):
    @pytest.fixture
    def open_sealed(self, open_disk):
        return open_disk

    @pytest.fixture
    def payloads(self, tmp_path):
        return DiskPayloads(tmp_path / "kv")


class TestSealedDiskStoreAsAnyOther(StoreContract):
    @pytest.fixture
    def open_store(self, open_disk):
        return lambda num_blocks, namespace="model-a": open_disk(
            sealed(), num_blocks, NAMESPACE.with_fields(model=namespace)
        )


def test_a_segment_that_was_cut_off_while_no_worker_ran_is_as_many_misses(open_disk, tmp_path):
    store, (hashes, metas) = open_disk(sealed()), chain(6)
    store.store(hashes, [content(digest) for digest in hashes], metas)
    store.close()
    (segment,) = (tmp_path / "kv" / "worker-0").glob("segment-*.kv")
    with segment.open("r+b") as file:
        file.truncate(3 * RECORD_BYTES + PAGE_BYTES + 100)  # the fourth record has a header, and no block
    again, into = open_disk(sealed()), [memoryview(bytearray(BLOCK_BYTES)) for _ in hashes]
    loaded = again.load(hashes, into, metas)
    assert sum(loaded) == 3
    assert all(view == content(digest) for digest, view, good in zip(hashes, into, loaded, strict=True) if good)
    assert again.stats().corrupt_blocks == 1


def test_no_checksum_of_a_plain_block_is_stored(open_disk, tmp_path):
    """It would tell whoever guesses a block that the guess is right."""
    store, checksum = open_disk(sealed()), 0x1122334455667788
    store.store([DIGEST], [BLOCK], [dataclasses.replace(META, checksum=checksum)])
    store.close()
    assert checksum.to_bytes(8, "little") not in DiskPayloads(tmp_path / "kv").everything()


def test_of_an_unsealed_block_it_is(open_disk, tmp_path):
    """The test above can fail."""
    store, checksum = open_disk(NoCodec()), 0x1122334455667788
    store.store([DIGEST], [BLOCK], [dataclasses.replace(META, checksum=checksum)])
    store.close()
    assert checksum.to_bytes(8, "little") in DiskPayloads(tmp_path / "kv").everything()
