"""FlashInfer's kernels for the models that are measured, and those that pytest's GPU tests need, compiled as `kvrelay
prepare` does.

Those that a wheel brings, or that an earlier run left in FlashInfer's cache, are there already. Ahead of time, where
there is no GPU, for bench.gpu.carry: `python -m bench.gpu.compile FOLDER` writes FOLDER/NAME/NAME.so.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bench.gpu.models import CONFIGS
from bench.gpu.section import Context
from kvrelay.cluster.commands.prepare import compile_gpu_kernels, copy
from kvrelay.cluster.compiling.kernels import Build, needs_of
from kvrelay.config import Settings
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.kernels.cuda.modules import KernelModule, kernel_modules

_LEFT_S = 15.0  # of the section's time, when what is not compiled yet is given up


def modules() -> list[KernelModule]:
    """What a worker only tries out (fa3) is last; pytest's GPU tests have heads of 64, windows and softcaps."""
    needs = [one for config, _ in CONFIGS.values() for one in needs_of(Settings(), ModelSpec.from_config(config))]
    shape = replace(needs[0].shape, head_dim=64)
    variants = ((1.0, None, None), (1.0, None, 50.0), (1.0, 8, 50.0))
    of_tests = kernel_modules(replace(needs[0], shape=shape, variants=variants, rotary_dim=64, activation="gelu_tanh"))
    found = {one.name: one for one in (*(one for one in of_tests if not one.is_late), *kernel_modules(*needs))}
    return sorted(found.values(), key=lambda module: module.is_late)


def run(context: Context) -> None:
    if not context.is_cuda:
        context.add(kernel="all", left_out="compiled for a GPU only")
        return
    is_first = True

    def report(done: int, of: int, what: str) -> None:
        nonlocal is_first
        if is_first or done == of:
            print(what, flush=True)
        is_first = False
        if context.left_s < _LEFT_S:
            raise TimeoutError

    found = modules()
    for is_late in (False, True):
        group, began_s = [module for module in found if module.is_late is is_late], time.monotonic()
        missing = {module.name for module in group if module.files_to_compile()}
        failures: dict[str, str] = {}
        try:
            failures = Build(group, report).run()
        except TimeoutError:
            failures = {module.name: "no time left" for module in group if module.files_to_compile()}
        for module in group:
            why = failures.get(module.name)
            state = "was there" if module.name not in missing else f"compiled in {time.monotonic() - began_s:.0f} s"
            if why is not None and is_late:
                context.add(kernel=module.title, left_out=f"fa2 is used: {why[-300:]}")
            else:
                context.add(kernel=module.title, ok=why is None, note=state if why is None else why[-300:])


if __name__ == "__main__":
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")  # H100, H200
    wanted = modules()
    is_whole = compile_gpu_kernels(wanted, Console(soft_wrap=True))
    copy(wanted, Path(sys.argv[1]))
    sys.exit(not is_whole)
