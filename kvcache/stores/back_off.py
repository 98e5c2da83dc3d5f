"""How long to stop calling a store or node after a failure: twice as long each time. Pure."""

FIRST_BACK_OFF_S, LAST_BACK_OFF_S = 1.0, 30.0


class BackOff:
    """Exponential back-off for one store or node. Times are the caller's clock, in seconds."""

    def __init__(self) -> None:
        self.num_failures = 0  # in a row
        self._until_s = 0.0

    def is_backing_off(self, now_s: float) -> bool:
        """Whether it should not be called yet."""
        return now_s < self._until_s

    def failed(self, now_s: float) -> float:
        """A call failed; returns the seconds to wait before the next one."""
        back_off_s: float = min(FIRST_BACK_OFF_S * 2**self.num_failures, LAST_BACK_OFF_S)
        self.num_failures = min(self.num_failures + 1, 16)
        self._until_s = now_s + back_off_s
        return back_off_s

    def succeeded(self) -> None:
        """A call succeeded: the next back-off is the shortest again."""
        self.num_failures = 0
