"""Fetch KV from elsewhere or compute it again? Pure; speeds are what was measured."""

_FORGET_S = 30.0


class StoreSpeed:
    """How fast a store has been of late. Told by several threads; a torn update costs one estimate."""

    def __init__(self) -> None:
        self._bytes_per_s = self._measured_s = 0.0

    def observe(self, num_bytes: int, seconds: float, now_s: float) -> None:
        """One call that brought so much."""
        if num_bytes and seconds > 0:
            speed, old = num_bytes / seconds, self.bytes_per_s(now_s)
            self._bytes_per_s = old + 0.3 * (speed - old) if old else speed
            self._measured_s = now_s

    def bytes_per_s(self, now_s: float) -> float:
        """0: not measured, or not lately. A store that was too slow once is tried again."""
        return self._bytes_per_s if now_s - self._measured_s < _FORGET_S else 0.0


def fetch_seconds(num_bytes: int, bandwidth: float, latency_s: float, queued_s: float = 0.0) -> float:
    """Predicted time until so many bytes have come; infinite while the path has not been measured (`bandwidth` 0).

    Args:
        bandwidth: bytes per second of the path.
        latency_s: until the first byte comes, whatever the amount.
        queued_s: until what waits before them has come.
    """
    return queued_s + latency_s + num_bytes / bandwidth if bandwidth > 0 else float("inf")


def worth_fetching(
    num_blocks: int,
    block_bytes: int,
    block_tokens: int,
    bandwidth: float,
    latency_s: float,
    prefill_tokens_per_s: float,
    queued_s: float = 0.0,
    compute_queued_s: float = 0.0,
) -> int:
    """How many of these blocks to fetch rather than to compute: all or none.

    What follows them is computed either way. Both costs grow with the number and only fetching has a cost to begin
    with, so part of them is never better than both all and none. A path that has not been measured is tried, so that it
    will be; while the prefill has not, fetching is taken for the faster.

    Args:
        block_bytes: of one block as it travels, compressed or not.
        block_tokens: of one block.
        bandwidth, latency_s, queued_s: as for `fetch_seconds`.
        prefill_tokens_per_s: this worker's, on prompts as long as this one.
        compute_queued_s: until this worker would begin to compute them.
    """
    if num_blocks <= 0:
        return 0
    if bandwidth <= 0 or prefill_tokens_per_s <= 0:
        return num_blocks
    compute_s = compute_queued_s + num_blocks * block_tokens / prefill_tokens_per_s
    return num_blocks if fetch_seconds(num_blocks * block_bytes, bandwidth, latency_s, queued_s) < compute_s else 0
