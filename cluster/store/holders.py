"""Which workers announced that they hold which blocks: hints for other workers, on one node of the store. Pure."""

from collections import OrderedDict
from collections.abc import Sequence

_MAX_KEYS = 500_000


class HolderDirectory:
    """The last announcement of each block. Bounded: the oldest keys are forgotten."""

    def __init__(self) -> None:
        self._holders: OrderedDict[bytes, tuple[object, str]] = OrderedDict()  # key -> (client, "host:port")
        self._keys_of: dict[object, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def announced(self, client: object, address: str, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """This client's worker, at "host:port", has the added blocks, and no longer the removed ones."""
        own = self._keys_of.setdefault(client, set())
        for key in added:
            self._holders[key] = client, address
            own.add(key)
        for key in removed:
            own.discard(key)
            if self._holders.get(key, (None, ""))[0] is client:
                del self._holders[key]
        while len(self._holders) > _MAX_KEYS:
            key, (holder, _) = self._holders.popitem(last=False)
            self._keys_of[holder].discard(key)

    def disconnected(self, client: object) -> None:
        """Forget this client's announcements."""
        for key in self._keys_of.pop(client, ()):
            if self._holders.get(key, (None, ""))[0] is client:
                del self._holders[key]

    def find(self, keys: Sequence[bytes]) -> list[str]:
        """For each key the "host:port" of a worker that announced it, or ""."""
        return [self._holders.get(key, (None, ""))[1] for key in keys]
