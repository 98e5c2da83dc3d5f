"""First on PYTHONPATH while the GPU bench is rehearsed (`--rehearse`), in every process it starts: what depends on
numbers that no kernel computes. A drawn token would be whatever lies in the memory, and no token of the model.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder

TOKEN = 7


def _tokens(module):
    wait = module.PinnedTokens.wait
    module.PinnedTokens.wait = lambda self: [TOKEN] * len(wait(self))


def _drawing(module):
    module._try_out = lambda draw, device: None  # else Triton's kernels count as broken


def _copying(module):
    module.problem = lambda device: None  # else CUDA IPC is not taken


PATCHES = {
    "kvrelay.kernels.cuda.staging": _tokens,
    "kvrelay.kernels.cuda.backend": _drawing,
    "kvrelay.kvtransfer.transports.cuda_ipc_triton": _copying,
}


class Patching(MetaPathFinder):
    """Finds a module as the others do, and changes it once it has run."""

    def __init__(self):
        self._busy = False

    def find_spec(self, name, path=None, target=None):
        if self._busy or name not in PATCHES:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        run = spec.loader.exec_module

        def run_and_patch(module):
            run(module)
            PATCHES[name](module)

        spec.loader.exec_module = run_and_patch
        return spec


sys.meta_path.insert(0, Patching())
