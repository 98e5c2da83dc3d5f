"""How long the long random tests run: a tenth of their steps on every push, all of them with `make test-all`.

KVRELAY_TEST_SCALE is the share of the steps (1: all of them; 10: ten times as many, for a night).
"""

import os

SCALE = float(os.environ.get("KVRELAY_TEST_SCALE", "0.1"))


def scaled(num_steps: int) -> int:
    """The steps or examples of a long random test that take place in this run, at least one."""
    return max(1, round(num_steps * SCALE))
