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
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
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
        return BlockSeal(
            self._codec.of(digest, meta), AESGCM(key), self._format + _POSITION.pack(meta.end_tokens) + digest
        )

    def _derive(self, root: bytes, purpose: bytes) -> bytes:
        return HKDF(SHA256(), _KEY_BYTES, salt=root, info=_LABEL + purpose).derive(self._secret)


@dataclass(frozen=True, slots=True)
class BlockSeal:
    """Seals and opens one block: nonce, ciphertext, tag. `context`: what else must be as it was, and is not stored."""

    coder: BlockCoder
    cipher: AESGCM
    context: bytes

    def encode(self, block: memoryview) -> memoryview:
        nonce = os.urandom(_NONCE_BYTES)
        return memoryview(nonce + self.cipher.encrypt(nonce, self.coder.encode(block), self.context))

    def decode(self, data: memoryview, into: memoryview) -> None:
        try:
            opened = self.cipher.decrypt(bytes(data[:_NONCE_BYTES]), data[_NONCE_BYTES:], self.context)
        except (InvalidTag, ValueError):  # ValueError: there are not even a nonce's bytes
            raise CodecError("its seal is broken, or another block's, tenant's or cluster's") from None
        self.coder.decode(memoryview(opened), into)
