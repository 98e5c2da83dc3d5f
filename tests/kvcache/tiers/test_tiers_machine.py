"""Pool, host tier, stores and the controller between them in any order of events: nothing lost, leaked or confused."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvrelay.kvcache.index.victims import VictimQueues
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.tiers import fetches, host_tier
from kvrelay.kvcache.tiers.controller import TierController
from kvrelay.kvcache.tiers.host_tier import HostTier
from kvrelay.kvcache.tiers.offload import Offload
from tests.kvcache.pool import machine_steps
from tests.kvcache.tiers.tiers_life import Life

pytestmark = pytest.mark.pure


class TiersMachine(RuleBasedStateMachine):
    """Each pair of bytes is a step: what happens, and to whom."""

    is_checked = True

    @initialize(
        write=st.sampled_from(["write-through", "selective", "write-back"]),
        prefetch=st.sampled_from(["wait", "timeout", "best-effort", "off"]),
        quota=st.sampled_from([None, 3]),
    )
    def begin(self, write, prefetch, quota):
        self.life = Life(write, prefetch, quota, is_checked=self.is_checked)

    @rule(numbers=st.binary(min_size=100, max_size=600))
    def go_on(self, numbers):
        for number, argument in zip(numbers[::2], numbers[1::2], strict=False):
            self.life.step(number, argument)
        machine_steps.taken["tiers"] += len(numbers) // 2

    @rule(how=st.integers(0, 1))
    def end(self, how):
        """And another one begins."""
        life = self.life
        life.end(how)
        self.life = Life(life.rules.write, life.rules.prefetch, None, is_checked=self.is_checked)


@pytest.mark.slow
def test_any_order_of_events():
    machine_steps.live("tiers", TiersMachine, examples=60, rules_each=8)


def test_the_lives_of_the_kv_cache_take_enough_steps_together():
    assert sum(machine_steps.STEPS[name] for name in ("pool", "index", "tiers")) >= machine_steps.LEAST


def broken(monkeypatch, what):
    """Each is a line of the code gone wrong."""
    if what == "a saved block is given back at once":
        real = TierController._save_batch

        def save(self, batch):
            before = set(self._saving)
            real(self, batch)
            self._pool.release([block for digest, block in self._saving.items() if digest not in before])

        def saved(self, batch, rows, result, real=TierController._saved):
            self._pool.acquire([entry.block for entry in batch if self._pool.num_holders(entry.block)])
            real(self, batch, rows, result)

        monkeypatch.setattr(TierController, "_save_batch", save)
        monkeypatch.setattr(TierController, "_saved", saved)
    elif what == "a generation is skipped":
        monkeypatch.setattr(BlockPool, "generation", lambda self, block: self._ledger.generations[block] // 2 * 2)
    elif what == "holds are ignored in eviction":
        init = VictimQueues.__init__

        def careless(self, entries, policy, *, is_kept, has_quota):
            pins = is_kept.__self__._pins
            init(self, entries, policy, is_kept=lambda digest, entry: digest in pins, has_quota=has_quota)

        monkeypatch.setattr(VictimQueues, "__init__", careless)
    elif what == "a fetch keeps its rows":
        monkeypatch.setattr(fetches.Fetches, "end", lambda self, request_id: self._fetches.pop(request_id, None))
    elif what == "a hold is forgotten":
        real_batch = Offload._batch

        def unheld(self, store, hashes):
            batch = real_batch(self, store, hashes)
            self._host.unhold(batch.rows)
            return batch

        monkeypatch.setattr(Offload, "_batch", unheld)
    elif what == "a request waits for all for ever":
        monkeypatch.setattr(host_tier, "WAIT_LIMIT_S", float("inf"))
    elif what == "what failed is found again":
        monkeypatch.setattr(TierController, "discard_load", lambda self, load: None)
    elif what == "a checksum is kept when its row changes hands":
        put = HostTier.put_block

        def stale(self, digest, row, checksum, meta):
            put(self, digest, row, self._checksums[row] or checksum, meta)

        monkeypatch.setattr(HostTier, "put_block", stale)
    else:
        monkeypatch.setattr(TiersMachine, "is_checked", False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        "a saved block is given back at once",
        "a generation is skipped",
        "holds are ignored in eviction",
        "a fetch keeps its rows",
        "a hold is forgotten",
        "a request waits for all for ever",
        "what failed is found again",
        "a checksum is kept when its row changes hands",
        "nothing is checked",
    ],
)
def test_the_machine_finds(what, monkeypatch):
    """Negative controls."""
    broken(monkeypatch, what)
    most = machine_steps.taken["tiers"] + 60_000
    with pytest.raises((AssertionError, KeyError)):
        machine_steps.run_until(
            lambda: machine_steps.taken["tiers"] > most, TiersMachine, examples=60, rules_each=8, is_shrunk=False
        )
