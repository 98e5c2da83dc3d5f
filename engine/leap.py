"""Several decode steps at once, for whoever wants to know only what they lead to: the simulator. Pure.

A stretch of steps in which every running sequence just gets a token is the same work over and over. `leap` leaves the
scheduler and its sequences as those steps would, one by one (tests/spec/test_leap.py).
"""

from collections import defaultdict

from kvrelay.engine.scheduler import Scheduler


def quiet_steps(scheduler: Scheduler) -> int:
    """So many of the next steps give each running sequence a token and do nothing else; 0: look at the next one by itself.

    Nothing else: nobody joins, ends, fills a block or needs one. Who has a last token coming must have said so by its
    `plain_until`.
    """
    running = scheduler.running
    if not running or len(running) > scheduler.limits.token_budget:
        return 0
    if scheduler.waiting or scheduler.reserving or scheduler.swapped or scheduler.groups.by_id:
        return 0
    count = 1 << 30
    for seq in running:
        computed, num_tokens = seq.num_computed, len(seq.token_ids)
        if num_tokens - computed != 1 or computed != seq.num_charged or computed < seq.num_given or not seq.is_pinned:
            return 0
        count = min(count, seq.own_until - 1 - computed, seq.plain_until - num_tokens)
        if count <= 0:
            return 0
    return count


def leap(scheduler: Scheduler, count: int, token: int) -> None:
    """As `count` steps, at most `quiet_steps`, that bring this token to every running sequence each."""
    scheduler.copied()
    outputs: defaultdict[str, int] = defaultdict(int)
    tokens = [token] * count
    for seq in scheduler.running:
        seq.token_ids += tokens
        seq.num_computed += count
        seq.num_charged += count
        outputs[seq.request.tenant] += count
    scheduler.shares.serve(outputs)
