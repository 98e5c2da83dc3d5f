"""How long whoever failed is left alone: twice as long each time. Pure."""

FIRST_REST_S, LAST_REST_S = 1.0, 30.0


class Rests:
    """The rests of one store or node. Times are the caller's clock, in seconds."""

    def __init__(self) -> None:
        self.num_failures = 0  # in a row
        self._until_s = 0.0

    def is_resting(self, now_s: float) -> bool:
        """Whether it is not to be asked yet."""
        return now_s < self._until_s

    def failed(self, now_s: float) -> float:
        """It did not answer as it should; for how long it rests from now on."""
        rest_s: float = min(FIRST_REST_S * 2**self.num_failures, LAST_REST_S)
        self.num_failures = min(self.num_failures + 1, 16)
        self._until_s = now_s + rest_s
        return rest_s

    def worked(self) -> None:
        """The next rest is a short one again."""
        self.num_failures = 0
