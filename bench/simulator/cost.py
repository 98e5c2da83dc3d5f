"""What a simulated request costs, and where the time goes: python -m bench.simulator.cost [--trace TRACE]

    small   8 + 8 workers, TRACE (Mooncake's conversation trace) played at 8 requests per second, the pools of
    bench/router/policies.py;
            without --trace it is the made-up load `chat` at the same rate
    large   500 + 500 workers, `chat` at 1,500 requests per second, steps of up to 8,192 tokens, loads reported every
    0.5 s

CPU time of this one process, the making of the cluster and of the load apart from the run: so much for each request, of
the whole run and between the arrivals of the later ones, and for each event of the clock. The figures of a case do not
depend on the machine; their digest is printed, so that two versions can be held against each other.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.cluster.profiles.profile import published_profile
from kvrelay.cluster.simulator.scenario import scenario_from
from kvrelay.cluster.simulator.simulation import Simulation
from kvrelay.cluster.workloads.choose import make_workload
from kvrelay.cluster.workloads.trace import TraceEntry

PROFILE = "llama-3.1-70b-h100x8-bf16"
RAMP_SHARE = 0.6  # of the requests: by then the batches are as large as they get


@dataclass(frozen=True, slots=True)
class Case:
    """A cluster and its load."""

    name: str
    source: str
    rate_per_s: float
    requests: int
    token_budget: int | None
    scenario: dict[str, Any]

    def load(self) -> list[TraceEntry]:
        return make_workload(self.source, rate_per_s=self.rate_per_s, limit=self.requests)

    def simulation(self, entries: list[TraceEntry]) -> Simulation:
        """Made, not run."""
        profile = published_profile(PROFILE)
        if self.token_budget is not None:
            profile = profile.model_copy(update={"token_budget": self.token_budget})
        return Simulation(
            scenario_from(self.scenario),
            profile.with_block_size(entries[0].block_tokens or profile.block_size),
            entries,
        )


def cases(trace: str | None, small: int, large: int) -> Iterator[Case]:
    pools = {"prefill_pool_tokens": 500_000, "decode_pool_tokens": 1_500_000}
    limits = {"router": {"max_inflight": 1_000_000}}
    if small:
        yield Case("small", trace or "chat", 8.0, small, None, {"prefill": 8, "decode": 8, "settings": limits} | pools)
    if large:
        scenario = {"prefill": 500, "decode": 500, "report_s": 0.5, "settings": limits}
        yield Case("large", "chat", 1500.0, large, 8192, scenario)


def timed(case: Case) -> dict[str, Any]:
    """Runs it once."""
    began_s = time.process_time()
    entries = case.load()
    loaded_s = time.process_time()
    simulation = case.simulation(entries)
    first = int(RAMP_SHARE * len(entries))
    marks_s: list[float] = []
    for entry in (entries[first], entries[-1]):
        simulation.clock.at(entry.arrival_s, lambda: marks_s.append(time.process_time()))
    made_s = time.process_time()
    simulation.run()
    run_s = time.process_time() - made_s
    summary = simulation.summary()
    return {
        "case": case.name,
        "requests": summary["requests"],
        "ms_per_request": 1e3 * run_s / summary["requests"],
        "steady_ms_per_request": 1e3 * (marks_s[1] - marks_s[0]) / (len(entries) - 1 - first),
        "us_per_event": 1e6 * run_s / summary["events"],
        "events_per_request": summary["events"] / summary["requests"],
        "run_s": run_s,
        "load_s": loaded_s - began_s,
        "making_s": made_s - loaded_s,
        "virtual_s": summary["ended_s"],
        "kept_share": summary["kept_share"],
        "digest": digest(summary),
    }


def digest(summary: dict[str, Any]) -> str:
    """Of all figures but the number of events, which says how they were come by."""
    figures = {name: value for name, value in summary.items() if name not in ("events", "scenario", "profile")}
    return hashlib.blake2b(json.dumps(figures, sort_keys=True).encode(), digest_size=6).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="of the small case")
    parser.add_argument("--small", type=int, default=3000, metavar="REQUESTS", help="0: not this case")
    parser.add_argument("--large", type=int, default=12_000, metavar="REQUESTS", help="0: not this case")
    parser.add_argument("--rounds", type=int, default=1, help="the best of so many counts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for case in cases(options.trace, options.small, options.large):
        row = min((timed(case) for _ in range(options.rounds)), key=lambda one: one["ms_per_request"])
        print(
            f"{case.name}: {row['ms_per_request']:.3f} ms a request ({row['requests']} of them), "
            f"{row['steady_ms_per_request']:.3f} while the cluster is full, "
            f"{row['us_per_event']:.1f} us an event, {row['events_per_request']:.1f} events a request; "
            f"load {row['load_s']:.1f} s, making the cluster {row['making_s']:.1f} s; figures {row['digest']}",
            flush=True,
        )
        rows.append(row)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
