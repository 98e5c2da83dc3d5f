"""Fetch KV from a store, or compute it again? Pure; speeds are measured."""

_FORGET_S = 30.0


class StoreSpeed:
    """A store's recent read bandwidth. Several threads report; a lost update costs one estimate."""

    def __init__(self) -> None:
        self._bytes_per_s = self._measured_s = 0.0

    def observe(self, num_bytes: int, seconds: float, now_s: float) -> None:
        """One call that read `num_bytes` in `seconds`."""
        if num_bytes and seconds > 0:
            speed, old = num_bytes / seconds, self.bytes_per_s(now_s)
            self._bytes_per_s = old + 0.3 * (speed - old) if old else speed
            self._measured_s = now_s

    def bytes_per_s(self, now_s: float) -> float:
        """0: not measured recently, so that a store that was slow once is tried again."""
        return self._bytes_per_s if now_s - self._measured_s < _FORGET_S else 0.0


def worth_fetching(
    num_blocks: int, block_bytes: int, block_tokens: int, bandwidth: float, prefill_tokens_per_s: float
) -> int:
    """How many of these blocks to fetch rather than compute: all or none.

    Both costs are proportional to the number of blocks. A path without a measurement is tried, to get one; without a
    measured prefill speed, fetching counts as faster.

    Args:
        block_bytes: of one block in transit, compressed or not.
        block_tokens: of one block.
        bandwidth: bytes per second of the path; 0: not measured.
        prefill_tokens_per_s: of this worker; 0: not measured.
    """
    if num_blocks <= 0:
        return 0
    if bandwidth <= 0 or prefill_tokens_per_s <= 0:
        return num_blocks
    return num_blocks if block_bytes / bandwidth < block_tokens / prefill_tokens_per_s else 0
