"""Sealed blocks: encrypted and authenticated for disk and remote stores, under keys that are in workers' memory alone.

AES-256-GCM. HKDF-SHA256 derives a tenant's key from the cluster's secret and the root of the block's chain, and from
that one a key for the block's hash. The root follows from the tenant's namespace and the request's salt; no store gets
it. Nonces are random, so 2**32 seals are safe under one key (NIST SP 800-38D, 8.3): a bound on how often the same
block is written, which no cluster reaches, and none on how many blocks a tenant has.
"""

import os
import struct
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvrelay.errors import ConfigError
from kvrelay.kvcache.stores.codecs import BlockCoder, Codec, CodecError
from kvrelay.kvcache.stores.namespace import Namespace
from kvrelay.types import BlockMeta

_LABEL = b"kvrelay sealed kv 1: "
_KEY_BYTES, _NONCE_BYTES, _TAG_BYTES = 32, 12, 16
SEAL_BYTES = _NONCE_BYTES + _TAG_BYTES
_POSITION = struct.Struct("<Q")


class SealedCodec:
    """Another codec's blocks, sealed.

    Its name, and so a store's namespace, contains an identifier of the secret: what another secret has sealed, or what
    is not sealed, is another namespace's.
    """

    is_sealed = True

    def __init__(self, codec: Codec, secret: bytes, namespace: Namespace) -> None:
        """`secret`: the cluster's. `namespace`: model, dtypes and layout of the blocks. Raises ConfigError."""
        if not secret:
            raise ConfigError("cache.sealed: blocks are sealed with the cluster's secret, and there is none")
        self._codec, self._secret = codec, secret
        self._format = namespace.with_fields(codec=codec.name).digest
        self.name = f"{codec.name}+aes-256-gcm:{self._derive(b'', b'identifier')[:8].hex()}"
        self.is_fixed, self.keeps_bytes = codec.is_fixed, codec.keeps_bytes

    def most_bytes(self, block_bytes: int) -> int:
        return self._codec.most_bytes(block_bytes) + SEAL_BYTES

    def of(self, digest: bytes, meta: BlockMeta) -> "BlockSeal":
        assert meta.root is not None, "a block whose tenant is not known"
        key = self._derive(meta.root, b"block" + digest)
        context = self._format + _POSITION.pack(meta.end_tokens) + digest
        return BlockSeal(self._codec.of(digest, meta), key, context, self.keeps_bytes)

    def _derive(self, root: bytes, purpose: bytes) -> bytes:
        return HKDF(SHA256(), _KEY_BYTES, salt=root, info=_LABEL + purpose).derive(self._secret)


@dataclass(frozen=True, slots=True)
class BlockSeal:
    """Seals and opens one block: nonce, ciphertext, tag.

    Not `AESGCM`, which returns new bytes each time: making and copying those takes longer than the encryption.
    """

    coder: BlockCoder
    key: bytes
    context: bytes  # what must be as it was besides, and is not stored
    is_plain: bool  # what is sealed is the block as it is

    def encode(self, block: memoryview) -> memoryview:
        data, nonce = self.coder.encode(block), os.urandom(_NONCE_BYTES)
        sealed = memoryview(bytearray(data.nbytes + SEAL_BYTES))
        encryptor = Cipher(AES256(self.key), GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(self.context)
        sealed[:_NONCE_BYTES] = nonce
        encryptor.update_into(data, sealed[_NONCE_BYTES:])
        encryptor.finalize()
        sealed[-_TAG_BYTES:] = encryptor.tag
        return sealed

    def decode(self, data: memoryview, into: memoryview) -> None:
        num_bytes = data.nbytes - SEAL_BYTES
        if num_bytes < 0:
            raise CodecError(f"{data.nbytes} bytes are no sealed block")
        opened = into if self.is_plain and num_bytes == into.nbytes else memoryview(bytearray(num_bytes))
        nonce, tag = bytes(data[:_NONCE_BYTES]), bytes(data[-_TAG_BYTES:])
        decryptor = Cipher(AES256(self.key), GCM(nonce, tag)).decryptor()
        decryptor.authenticate_additional_data(self.context)
        decryptor.update_into(data[_NONCE_BYTES:-_TAG_BYTES], opened)
        try:
            decryptor.finalize()
        except InvalidTag:
            raise CodecError("its seal is broken, or another block's, tenant's or cluster's") from None
        if opened is not into:
            self.coder.decode(opened, into)
