"""`kvrelay serve` on the device, over HTTP and Ray: a Llama-8B of random weights, disaggregated and aggregated, under
`kvrelay bench`. Both workers of a pair share the device, so that a figure of one pair is not what two devices give.
"""

import importlib.util
import json
import subprocess
import sys

from bench.gpu.models import folder_of
from bench.gpu.section import Context, LeftOut
from bench.served import running_serve

_SETUPS = {"1 prefill + 1 decode": ("1", "1", 0.5), "1 worker": ("0", "1", 1.0)}  # prefill, decode, share of the device
_LOADS = ((1, 512, 128, 6), (16, 2048, 128, 48), (64, 1024, 128, 192))  # clients, tokens in and out, requests
_LEAST_S = 20.0  # for one load
_STOP_S = 10.0


def run(context: Context) -> None:
    if importlib.util.find_spec("ray") is None:
        raise LeftOut("Ray is not installed")
    folder, out = folder_of(context, "llama-8b"), context.scratch / "load.json"
    for name, (prefill, decode, share) in _SETUPS.items():
        flags = ["--model", str(folder), "--prefill", prefill, "--decode", decode]
        flags += ["--max-model-len", "1024" if context.tiny else "8192"]
        if context.is_cuda:
            kv_memory = "1GiB" if context.rehearse else "20GiB"
            flags += ["--kv-memory", kv_memory, "--set", f"cluster.num_gpus_per_worker={share}", "--backend", "cuda"]
        if context.left_s < 2 * _LEAST_S:
            context.add(setup=name, left_out="no time left")
            continue
        with running_serve(context.scratch, *flags, limit_s=context.left_s - _STOP_S) as served:
            for clients, tokens_in, tokens_out, requests in _LOADS[:1] if context.tiny else _LOADS:
                load = ["--concurrency", clients, "--input-tokens", tokens_in, "--output-tokens", tokens_out]
                load += ["--requests", requests, "--url", served.url, "--extra-body", '{"ignore_eos": true}']
                load += ["--token-range", "3:300" if context.tiny else "1000:30000", "--json", out]
                command = [sys.executable, "-m", "kvrelay.cluster.commands.cli", "bench", *map(str, load)]
                subprocess.run(command, check=True, timeout=max(1.0, context.left_s - _STOP_S))
                found = json.loads(out.read_text())["summary"]
                times = {
                    f"{what}_{at}_ms": 1e3 * found[f"{what}_s"][at] for what in ("ttft", "itl") for at in ("p50", "p99")
                }
                shape = {"setup": name, "clients": clients, "in": tokens_in, "out": tokens_out}
                context.add(**shape, **times, tokens_per_s=found["output_tokens_per_s"], ok=found["num_ok"] == requests)
