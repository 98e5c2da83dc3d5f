"""`kvrelay verify`'s rows about who is next in line: requests of several classes at a worker pair with one seat to decode in.

All of them are in line before the first is served. The order in which they are is what the ingress was told by the
workers (its request log), and must be that of docs/scheduling.md. Control: without any class, the order of arrival.
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvrelay.cluster.verify.held_back import held_back, in_line
from kvrelay.cluster.verify.rows import Verifier
from kvrelay.config import Settings
from kvrelay.errors import KvrelayError
from kvrelay.plane.messages import SequenceRequest

if TYPE_CHECKING:
    from pathlib import Path

    from kvrelay.cluster.launch.local import LocalCluster

_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: which of verify's cases, and its standing."""

    case: str
    priority: int = 0
    tenant: str = "greedy"
    deadline_s: float | None = None


LOAD = (
    Asked("1 token", priority=3),
    Asked("block - 1"),
    Asked("one block"),
    Asked("block + 1"),
    Asked("Chinese", tenant="modest"),
    Asked("Russian", tenant="hurried", deadline_s=2 * _TIMEOUT_S),
    Asked("Arabic", tenant="hurried", deadline_s=_TIMEOUT_S),
    Asked("several chunks", priority=-4),
)
"""In order of arrival."""
EXPECTED = ("several chunks", "Arabic", "Russian", "Chinese", "block - 1", "one block", "block + 1", "1 token")
"""Priority; deadlines; the tenant that was served the least; arrival; and who may wait, last."""
ARRIVAL = tuple(one.case for one in LOAD)
_WAYS = (("remote", "over the hop", "reserved"), ("local", "on one worker", "first token"))


def with_one_seat(plain: Settings, credit_tokens: float) -> Settings:
    """One sequence at a time on the decode worker, and nobody in line gives up."""
    changed = {
        "decode": plain.decode.model_copy(update={"max_running": 1}),
        "scheduler": plain.scheduler.model_copy(update={"credit_tokens": credit_tokens}),
        "router": plain.router.model_copy(update={"reserve_timeout_s": plain.serve.request_timeout_s}),
    }
    return plain.model_copy(update=changed)


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a load: the tokens of each case, and the cases in the order in which they were served."""

    tokens: dict[str, list[int]]
    order: tuple[str, ...]


class LineRows:
    """Runs the rows with a decode worker in this process."""

    def __init__(self, verifier: Verifier, model_dir: "Path", transport: str, num_output: int) -> None:
        self._verifier, self._model_dir, self._transport = verifier, model_dir, transport
        self._cases = {case.name: (index, case) for index, case in enumerate(verifier.cases)}
        # a tenant that was served "several chunks" has lost its turn, one that was served any other prompt keeps its deadlines
        self._credit_tokens = 4.0 * (len(self._cases["several chunks"][1].token_ids) + num_output)

    async def run(self) -> None:
        from kvrelay.cluster.launch.local import local_cluster

        self._verifier.tell("priorities, deadlines and tenants")
        settings = with_one_seat(self._verifier.settings_over(self._transport, "full"), self._credit_tokens)
        async with local_cluster(settings, self._model_dir) as cluster:
            for force, where, stage in _WAYS:
                name = f"priorities, deadlines, tenants {where}"
                await self._row(cluster, name, force, stage, is_ranked=True)
                await self._row(cluster, f"{name}: without them, arrival", force, stage, is_ranked=False)
            leaks = await cluster.pool_leaks()
            self._verifier.add_row("every block of those in line given back").claim(
                holds=not leaks, note=leaks[0] if leaks else "free + cached = total"
            )

    async def _row(self, cluster: "LocalCluster", name: str, force: Any, stage: str, *, is_ranked: bool) -> None:
        row = self._verifier.add_row(name)
        try:
            served = await self._serve(cluster, force, stage, is_ranked=is_ranked)
        except (KvrelayError, TimeoutError) as error:
            row.claim(holds=False, note=f"{type(error).__name__}: {error}")
            return
        for case, tokens in served.tokens.items():
            row.count(case, self._verifier.expected(self._cases[case][0]), tokens)
        row.claim(holds=served.order == (EXPECTED if is_ranked else ARRIVAL), note=f"served: {', '.join(served.order)}")

    async def _serve(self, cluster: "LocalCluster", force: Any, stage: str, *, is_ranked: bool) -> Served:
        for member in cluster.members:
            await cluster.dispatcher.reset_cache(member.worker_id)
        requests = {one.case: self._request(one, force, is_ranked=is_ranked) for one in LOAD}
        async with asyncio.timeout(_TIMEOUT_S):
            with held_back(cluster.inside[0], in_line(len(LOAD)), grants=False):
                tokens = await asyncio.gather(*(_tokens(cluster, one, force) for one in requests.values()))
        at_s = {case: _told_s(cluster, request.request_id, stage) for case, request in requests.items()}
        return Served(dict(zip(requests, tokens, strict=True)), tuple(sorted(requests, key=lambda case: at_s[case])))

    def _request(self, asked: Asked, force: Any, *, is_ranked: bool) -> SequenceRequest:
        request = self._verifier.request_of(self._cases[asked.case][1])
        if not is_ranked:
            return request
        tenant = f"{asked.tenant} {force}"  # counters last as long as the worker
        return msgspec.structs.replace(request, priority=asked.priority, tenant=tenant, deadline_s=asked.deadline_s)


async def _tokens(cluster: "LocalCluster", request: SequenceRequest, force: Any) -> list[int]:
    tokens: list[int] = []
    async for output in cluster.dispatcher.generate(request, force=force):
        tokens += output.token_ids
    return tokens


def _told_s(cluster: "LocalCluster", request_id: str, stage: str) -> float:
    """When the ingress heard that a request had come so far."""
    (record,) = cluster.dispatcher.requests.find(request_id)
    return record.started_s + next(one.at_s for one in record.stages if one.name == stage)
