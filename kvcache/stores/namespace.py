"""Which blocks a store may reuse: everything that must be equal before a stored block may be used again. Pure."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from kvrelay.types import Fingerprint, KvLayout


@dataclass(frozen=True, slots=True)
class Namespace:
    """Ordered (field, value) pairs, identified by `digest`."""

    fields: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> "Namespace":
        return cls(tuple((name, str(value)) for name, value in fields.items()))

    @property
    def digest(self) -> bytes:
        """[16] bytes, the same in every process and for any order of the fields."""
        text = json.dumps(sorted(self.fields), ensure_ascii=True)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def with_fields(self, **more: object) -> "Namespace":
        """With more fields, such as a store's format and codec."""
        return Namespace.of({**dict(self.fields), **more})

    def difference(self, theirs: Mapping[str, str]) -> str | None:
        """The first field in which `theirs` differs, with both values, or None."""
        ours = dict(self.fields)
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            mine, other = ours.get(name, "absent"), theirs.get(name, "absent")
            if mine != other:
                return f"{name} is {other!r} there, {mine!r} here"
        return None


def namespace_of(fingerprint: Fingerprint, layout: KvLayout) -> Namespace:
    """The namespace of one worker's blocks: its fingerprint, and its pool's layout."""
    return Namespace.of(
        {
            "model": fingerprint.model,
            "dtype": layout.dtype,
            "compute_dtype": fingerprint.compute_dtype,
            "quantization": fingerprint.quantization,
            "block_size": layout.block_size,
            "order": layout.order,
            "heads": layout.num_kv_heads,
            "head_dim": layout.head_dim,
            "layers": layout.num_layers,
            "parts": layout.num_parts,
            "hash_seed": fingerprint.hash_seed,
            "versions": fingerprint.versions,
        }
    )
