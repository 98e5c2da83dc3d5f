"""Small clusters and loads for the simulator's tests."""

from kvrelay.cluster.profiles.profile import SimulatorProfile
from kvrelay.cluster.simulator.scenario import scenario_from
from kvrelay.cluster.simulator.simulation import Simulation
from kvrelay.cluster.workloads.trace import TraceEntry
from kvrelay.router.planning.types import SpeedCurve

BLOCK = 16
PREFILL = SpeedCurve(overhead_s=0.001, weights_s=0.004, token_s=1e-4, pair_s=1e-8, context_s=0.0)
DECODE = SpeedCurve(overhead_s=0.001, weights_s=0.009, token_s=1e-4, pair_s=1e-8, context_s=1e-7, sequence_s=2e-4)
SETTINGS = {"router": {"local_prefill_tokens": 0, "max_inflight": 10_000}}


def profile(**fields):
    given = {
        "name": "tiny",
        "prefill": PREFILL,
        "decode": DECODE,
        "block_size": BLOCK,
        "num_blocks": 512,
        "token_budget": 128,
        "max_running": 32,
        "max_model_len": 8192,
        "kv_bytes_per_token": 1000,
        "link_bytes_per_s": 1e7,
        "local_bytes_per_s": 1e8,
    }
    return SimulatorProfile(**(given | fields))


def simulation(entries, *, workers=None, **fields):
    """Not run yet."""
    given = {"prefill": 2, "decode": 2, "max_tokens": 512, "settings": SETTINGS}
    return Simulation(scenario_from(given | fields), workers or profile(), entries)


def simulate(entries, **fields):
    return simulation(entries, **fields).run()


def entry(at_s, num_tokens=100, output=20, ids=()):
    return TraceEntry(at_s, num_tokens, output, tuple(ids), BLOCK)


def chats(count, *, every_s=0.05, turns=5, user=60, output=40):
    """Conversations whose prompts grow, side by side: hash ids name prefixes."""
    entries = []
    for index in range(count):
        session, turn = index % max(1, count // turns), index // max(1, count // turns)
        num_tokens = 200 + turn * user
        ids = [session * 10_000 + place for place in range(num_tokens // BLOCK)]
        entries.append(entry(index * every_s, num_tokens, output + index % 7, ids))
    return entries


def everything_is_given_back(sim):
    """No request is counted anywhere, no worker holds a block, nothing travels."""
    for ingress in sim.ingresses:
        assert not ingress.drivers and not ingress.attempts
        assert not any(view.assigned_requests or view.assigned_tokens for view in ingress.router.workers())
    sim.clock.run(sim.clock.now_s + 1.0)  # the last aborts arrive
    for worker in sim.workers:
        worker.engine.check()
        if worker.is_alive:
            assert worker.engine.pool.counts().used == 0, worker.worker_id
            assert not worker.attempts
    assert not any(link.flows for link in sim.network._links.values())
