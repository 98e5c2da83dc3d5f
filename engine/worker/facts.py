"""What a worker states of itself: its identity and sizes for ingresses, and everything that `kvrelay status` shows."""

from typing import Any

import msgspec

from kvrelay.engine.speculation.draft_model import DraftModel
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.build import WorkerOptions
from kvrelay.engine.worker.sizing import EngineSizes, context_notice
from kvrelay.plane.reports import LoadReport, PairReport, WorkerInfo


def worker_info(
    options: WorkerOptions, epoch: str, role: str, engine: Engine, *, port: int, kv_port: int, transports: list[str]
) -> WorkerInfo:
    """A worker's identity and capacity."""
    layout = engine.cache.memory.layout
    return WorkerInfo(
        worker_id=options.worker_id,
        role=role,
        epoch=epoch,
        host=options.host,
        port=port,
        node_id=options.node_id,
        model=options.model_name,
        fingerprint=engine.cache.fingerprint,
        block_size=layout.block_size,
        num_blocks=layout.num_blocks,
        max_model_len=engine.max_model_len,
        max_running=engine.config.max_running,
        kv_bytes_per_token=layout.block_bytes // layout.block_size,
        device=str(engine.backend.device),
        transports=transports,
        kv_port=kv_port,
    )


def plain_load(load: LoadReport) -> dict[str, Any]:
    """As plain data, zeros included."""
    fields = msgspec.structs.asdict(load)
    return fields | {name: [msgspec.structs.asdict(one) for one in fields[name]] for name in ("kv_paths", "tiers")}


def plain_pair(pair: PairReport) -> dict[str, Any]:
    """As plain data, zeros and empty fields included."""
    return msgspec.structs.asdict(pair) | {"paths": [msgspec.structs.asdict(path) for path in pair.paths]}


def size_facts(engine: Engine, sizes: EngineSizes, wanted_len: int | None) -> list[str]:
    """What was chosen for the engine and why, then what to note of it. `wanted_len`: `model.max_model_len`."""
    wanted = min(engine.model.spec.max_position, wanted_len or 1 << 62)
    line = sizes.describe(engine.cache.memory.layout.num_bytes)
    return [line, *filter(None, [context_notice(engine.max_model_len, wanted)])]


def backend_facts(engine: Engine) -> dict[str, Any]:
    """The backend, the draft model, and how far quantised weights are off."""
    describe = getattr(engine.backend, "describe", None)
    facts = dict(describe()) if describe else {}
    if isinstance(draft := engine.drafts.model, DraftModel):
        facts["draft model"] = draft.describe()
    if (error := engine.model.weight_error) is not None:
        weights = engine.config.quantization or engine.model.spec.quantization
        facts["weights"] = f"{weights}, relative RMS error {error.relative:.2%}"
    return facts
