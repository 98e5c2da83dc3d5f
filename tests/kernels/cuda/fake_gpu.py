"""A fake GPU with a fake FlashInfer, on the CPU, strict where CUDA is: while a graph is captured no kernel may touch
host memory, nothing may wait for the device, and a replay runs the very calls of the capture over the same buffers.
"""

import contextlib
import functools
import sys
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from kvrelay.kernels.backend import AttentionBatch
from kvrelay.kernels.cuda.graph_pieces import CapturingCudaBackend
from kvrelay.kernels.oracle.reference import ReferenceBackend, attend, causal_mask

HALF = [torch.float16, torch.bfloat16]


class OnHost(Tensor):
    """A tensor in host memory, for the fake GPU: `.to(device)` copies it, and a capture may not touch it.

    num_waits: copies to the device from memory that is not pinned.
    """

    is_forbidden = False
    num_waits = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if OnHost.is_forbidden:
            raise RuntimeError(f"{func.__name__} touches host memory in a capture")
        out = super().__torch_function__(func, types, args, kwargs or {})
        goes_to = [*args[1:], *(kwargs or {}).values()]
        leaves = func is Tensor.to and any(isinstance(value, torch.device) for value in goes_to)
        is_filled = func is Tensor.copy_ and not isinstance(args[0], OnHost)
        if (leaves and not isinstance(args[0], Pinned)) or (is_filled and not isinstance(args[1], Pinned)):
            OnHost.num_waits += 1
        return out.as_subclass(Tensor).clone() if leaves else out.as_subclass(Tensor) if is_filled else out


class Pinned(OnHost):
    """Host memory from which the device copies by itself."""


class Capture(TorchDispatchMode):
    """Writes torch's operators down, to run them again."""

    def __init__(self, calls: list[Callable[[], object]]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), "waits for the device in a capture"
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not (func.is_view and shares_memory(out, args)):  # contiguous() and reshape() may copy
            self._calls.append(lambda: self._again(func, args, kwargs, out))
        return out

    @staticmethod
    def _again(func, args, kwargs, out):
        found = func(*args, **kwargs)
        if not func._schema.is_mutable:
            for old, new in zip(tree_flatten(out)[0], tree_flatten(found)[0], strict=True):
                old.copy_(new)


def shares_memory(out, args) -> bool:
    """Whether all of out lies in the memory of some of args."""
    tensors = [[x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)] for tree in (out, args)]
    new, old = ({x.untyped_storage().data_ptr() for x in group} for group in tensors)
    return new <= old


class FakeGpu:
    """Stands in for torch.cuda and the flashinfer module (its functions are the upper half's names)."""

    def __init__(self) -> None:
        self.plain = ReferenceBackend("cpu")
        self.calls: list[Callable[[], object]] | None = None  # of the capture under way
        self.num_captures = self.num_replays = 0
        self.kernels = {"fa2", "fa3"}  # of attention, which it can build
        self.appended: list[str] = []  # the layouts of append's caches
        self.BatchDecodeWithPagedKVCacheWrapper = functools.partial(FakeDecode, self)
        self.BatchPrefillWithPagedKVCacheWrapper = functools.partial(FakePrefill, self)
        # of fa3's module: whether it is compiled; of others nothing is asked here
        self.hopper_spec = types.SimpleNamespace(name="fa3", is_aot=True)
        self.jit = types.SimpleNamespace(
            gen_batch_prefill_module=lambda *args: self.hopper_spec,
            core=types.SimpleNamespace(
                current_compilation_context=types.SimpleNamespace(TARGET_CUDA_ARCHS={(9, "0a")})
            ),
        )
        self.latent_plans = self.not_causal_plans = 0
        self.mla = types.SimpleNamespace(
            BatchMLAPagedAttentionWrapper=functools.partial(FakeMla, self),
            MLAPlanMetadata=types.SimpleNamespace(csr=mla_metadata),
        )

    def rmsnorm(self, x, weight, eps, out=None):
        out = torch.empty_like(x) if out is None else out
        self.kernel(lambda: out.copy_(self.plain.rms_norm(x, weight, eps)))
        return out

    def merge_state_in_place(self, v, s, v_other, s_other, mask=None):
        """As in FlashInfer 0.7.2's cascade.py."""
        assert mask is None and s.dtype == s_other.dtype == torch.float32

        def run():
            total = torch.logaddexp2(s, s_other)
            shares = (torch.exp2(s - total).unsqueeze(-1), torch.exp2(s_other - total).unsqueeze(-1))
            copy_all((v, s), ((v * shares[0] + v_other * shares[1]).to(v.dtype), total))

        self.kernel(run)

    def fused_add_rmsnorm(self, x, residual, weight, eps):
        self.kernel(lambda: copy_all((x, residual), self.plain.add_rms_norm(x, residual, weight, eps)))

    def apply_rope_with_cos_sin_cache_inplace(self, positions, q, k, head_size, cos_sin, is_neox=True):
        assert is_neox and head_size == q.shape[-1]
        self.kernel(lambda: copy_all((q, k), self.plain.rope(q, k, cos_sin, positions)))

    def silu_and_mul(self, x, kind="silu"):
        out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype)
        self.kernel(lambda: out.copy_(self.plain.gated_activation(x, kind)))
        return out

    def gelu_tanh_and_mul(self, x):
        return self.silu_and_mul(x, "gelu_tanh")

    def append_paged_kv_cache(self, k, v, batch_indices, positions, cache, indices, indptr, last_page_len, kv_layout):
        """As AppendPagedKVCacheKernel in FlashInfer 0.7.2's page.cuh."""
        assert k.dtype == v.dtype == cache.dtype in HALF
        self.appended.append(kv_layout)
        cache = tokens_then_heads(cache, kv_layout)
        assert all(t.dtype == torch.int32 for t in (batch_indices, positions, indices, indptr, last_page_len))
        assert len(last_page_len) == len(indptr) - 1

        def run():
            size = cache.shape[2]
            at = indptr[batch_indices] * size + positions
            pages, entries = indices[at // size], at % size
            cache[pages, 0, entries], cache[pages, 1, entries] = k, v

        self.kernel(run)

    def append_paged_mla_kv_cache(
        self, ckv, kpe, batch_indices, positions, ckv_cache, kpe_cache, indices, indptr, last_page_len
    ):
        """As AppendPagedKVMlaCacheKernel in FlashInfer 0.7.2's page.cuh, which knows these sizes only."""
        assert ckv.shape[1] == ckv_cache.shape[2] == 512 and kpe.shape[1] == kpe_cache.shape[2] == 64
        assert ckv.dtype == kpe.dtype == ckv_cache.dtype in HALF and len(last_page_len) == len(indptr) - 1
        self.appended.append("latent")

        def run():
            size = ckv_cache.shape[1]
            at = indptr[batch_indices] * size + positions
            pages, entries = indices[at // size], at % size
            ckv_cache[pages, entries], kpe_cache[pages, entries] = ckv, kpe

        self.kernel(run)

    def kernel(self, run: Callable[[], object]) -> None:
        """One opaque kernel: it reads its buffers when it runs."""
        with _disable_current_modes():
            run()
        if self.calls is not None:
            self.calls.append(run)

    @contextlib.contextmanager
    def capture(self, graph, pool="pool", stream=None, capture_error_mode="thread_local"):
        assert pool == "pool" and self.calls is None, "captures may not be nested"
        self.calls, OnHost.is_forbidden = graph.calls, True
        try:
            with Capture(graph.calls):
                yield
        finally:
            self.calls, OnHost.is_forbidden = None, False
        self.num_captures += 1


def tokens_then_heads(cache, kv_layout):
    """The cache [blocks, 2, block_size, heads, head_dim], for either layout that FlashInfer was given."""
    assert cache[0].is_contiguous() and kv_layout in ("NHD", "HND")
    return cache if kv_layout == "NHD" else cache.transpose(2, 3)


def copy_all(targets, sources):
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


class FakeDecode:
    """BatchDecodeWithPagedKVCacheWrapper; one for graphs keeps its three buffers."""

    def __init__(self, gpu, workspace, kv_layout, *, backend, use_tensor_cores=False, use_cuda_graph=False, **buffers):
        assert not workspace.any() and backend in gpu.kernels
        self._kv_layout, self.backend = kv_layout, backend
        names = ("indptr", "indices", "last_page_len")
        self._fixed = [buffers[f"paged_kv_{name}_buffer"] for name in names] if use_cuda_graph else None
        self._gpu, self._starts = gpu, None

    def plan(self, indptr, indices, last, num_heads, num_kv_heads, head_dim, page_size, *, seq_lens, **options):
        assert self._gpu.calls is None, "plans may not happen in a capture"
        assert torch.equal(seq_lens, (indptr.diff() - 1) * page_size + last) and seq_lens.dtype == torch.int32
        index = (indptr, indices, last)
        assert all(t.dtype == torch.int32 for t in index)
        if self._fixed is None:
            self._index = [t.clone() for t in index]
        else:
            self._index = self._fixed
            assert len(last) == len(self._fixed[2]) and len(indices) <= len(self._fixed[1])
            copy_all([own[: len(new)] for own, new in zip(self._fixed, index, strict=True)], index)
        self._size, self._options = page_size, options

    def run(self, q, cache, out):
        cache = tokens_then_heads(cache, self._kv_layout)
        self._gpu.kernel(lambda: self._run(q, cache, out))
        return out

    def _run(self, q, cache, out):
        indptr, indices, last = (t.tolist() for t in self._index)
        starts = self._starts or range(len(last) + 1)
        left, cap, scale = (self._options[name] for name in ("window_left", "logits_soft_cap", "sm_scale"))
        for s in range(len(last)):
            pages = indices[indptr[s] : indptr[s + 1]]
            context = (len(pages) - 1) * self._size + last[s]
            k, v = (cache[pages, i].flatten(0, 1)[:context] for i in (0, 1))
            rows = slice(starts[s], starts[s + 1])
            mask = causal_mask(starts[s + 1] - starts[s], context, None if left < 0 else left + 1, q.device)
            out[rows] = attend(q[rows], k, v, mask, scale=scale, softcap=cap).to(q.dtype)


class FakePrefill(FakeDecode):
    """BatchPrefillWithPagedKVCacheWrapper. Without `causal` it attends to the whole sequence, and has no window."""

    def plan(self, qo_indptr, *index_and_shape, causal, **options):
        assert qo_indptr.dtype == torch.int32 and (causal or options["window_left"] == -1)
        super().plan(*index_and_shape, **options)
        self._starts, self._is_causal = qo_indptr.tolist(), causal
        self._gpu.not_causal_plans += not causal

    def run(self, q, cache, out=None, return_lse=False):
        if self._is_causal:
            assert not return_lse
            return super().run(q, cache, out)
        assert len(q) == self._starts[-1]
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        cache = tokens_then_heads(cache, self._kv_layout)
        self._gpu.kernel(lambda: self._run_all(q, cache, out, lse))
        return (out, lse) if return_lse else out

    def _run_all(self, q, cache, out, lse):
        indptr, indices, last = (t.tolist() for t in self._index)
        cap, scale = (self._options[name] for name in ("logits_soft_cap", "sm_scale"))
        for s in range(len(last)):
            pages, rows = indices[indptr[s] : indptr[s + 1]], slice(self._starts[s], self._starts[s + 1])
            context = (len(pages) - 1) * self._size + last[s]
            k, v = (cache[pages, i].flatten(0, 1)[:context].float() for i in (0, 1))
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
            scores = torch.einsum("qhd,chd->qhc", q[rows].float(), k) * scale
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            out[rows] = torch.einsum("qhc,chd->qhd", scores.softmax(-1), v).to(q.dtype)
            lse[rows] = scores.logsumexp(-1) / torch.tensor(2.0).log()  # FlashInfer's are to the base of 2


class FakeMla:
    """BatchMLAPagedAttentionWrapper with split queries and packed caches, as FlashInfer 0.7.2's fa2 kernel takes them;
    one for graphs keeps its four buffers.
    """

    def __init__(self, gpu, workspace, *, backend, use_cuda_graph=False, **buffers):
        assert backend == "fa2" and not workspace.any()
        self._gpu, self._fixed = gpu, buffers if use_cuda_graph else None
        assert list(buffers) == (["qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"] if use_cuda_graph else [])

    def plan(self, *, metadata, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, **options):
        assert causal and self._gpu.calls is None and options.pop("query_layout") == "split"
        assert set(options.values()) <= set(HALF) and all(t.dtype == torch.int32 for t in metadata.values())
        assert head_dim_ckv % 128 == head_dim_kpe % 64 == 0 and 128 % num_heads == 0
        if self._fixed is None:
            self._index = {name: t.clone() for name, t in metadata.items()}
        else:
            self._index = self._fixed
            for name, own in self._fixed.items():
                assert len(own) == len(metadata[name]) or (name == "kv_indices" and len(own) > len(metadata[name]))
                own[: len(metadata[name])].copy_(metadata[name])
        self._sizes, self._scale = (num_heads, head_dim_ckv, head_dim_kpe, page_size), sm_scale
        self._gpu.latent_plans += 1

    def run(self, *, query, kv_cache, out):
        heads, ckv, kpe, size = self._sizes
        assert [x.shape[1:] for x in query] == [(heads, ckv), (heads, kpe)] and out.shape == (len(query[0]), heads, ckv)
        assert kv_cache.shape[1:] == (size, ckv + kpe) and all(x.stride(-1) == 1 for x in (*query, kv_cache))
        self._gpu.kernel(lambda: self._run(torch.cat(query, dim=-1), kv_cache, out))

    def _run(self, query, kv_cache, out):
        ckv = self._sizes[1]
        starts, indptr, pages, lengths = (t.tolist() for t in self._index.values())
        for s, context in enumerate(lengths):
            rows = slice(starts[s], starts[s + 1])
            entries = kv_cache[pages[indptr[s] : indptr[s + 1]]].flatten(0, 1)[:context].unsqueeze(1)
            mask = causal_mask(starts[s + 1] - starts[s], context, None, query.device)
            out[rows] = attend(query[rows], entries, entries[..., :ckv], mask, scale=self._scale, softcap=None).to(out)


def mla_metadata(qo_indptr, kv_indptr, kv_indices, kv_len_arr):
    return {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}


class FakeEvent:
    """Of a device that lags behind as far as it can."""

    is_due = False
    num_waits = 0

    def record(self) -> None:
        self.is_due = True

    def query(self) -> bool:
        return not self.is_due

    def synchronize(self) -> None:
        assert self.is_due
        FakeEvent.num_waits, self.is_due = FakeEvent.num_waits + 1, False


class FakeGraph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, gpu) -> None:
        self.calls: list[Callable[[], object]] = []
        self._gpu, self._capture = gpu, contextlib.ExitStack()

    def capture_begin(self, pool, capture_error_mode):
        assert pool == "pool" and capture_error_mode == "thread_local"
        self._capture.enter_context(self._gpu.capture(self))

    def capture_end(self):
        self._capture.close()

    def replay(self) -> None:
        self._gpu.num_replays += 1
        for call in self.calls:
            call()


@pytest.fixture
def fake_gpu(monkeypatch):
    """A CudaBackend over the fake; `fake_gpu.gpu` counts captures."""
    gpu = FakeGpu()
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setitem(sys.modules, "flashinfer", gpu)
    for name, value in {
        "is_available": lambda: True,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "Stream": lambda device=None: stream,
        "current_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "CUDAGraph": functools.partial(FakeGraph, gpu),
        "graph_pool_handle": lambda: "pool",
        "mem_get_info": lambda device=None: (1 << 30, 2 << 30),
        "get_device_capability": lambda device=None: (9, 0),
        "graph": gpu.capture,
        "Event": FakeEvent,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self.clone().as_subclass(Pinned))
    from_numpy = torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda array: from_numpy(array).as_subclass(OnHost))
    monkeypatch.setattr(OnHost, "num_waits", 0)
    monkeypatch.setattr(FakeEvent, "num_waits", 0)
    monkeypatch.setattr("kvrelay.kernels.cuda.paged_attention.WORKSPACE_BYTES", 1 << 10)
    backend = CapturingCudaBackend("cpu:0")
    backend.gpu = gpu
    return backend


def on_host(batch: AttentionBatch) -> AttentionBatch:
    tensors = {name: getattr(batch, name) for name in batch.__slots__}
    return AttentionBatch(**{n: t.as_subclass(OnHost) if isinstance(t, Tensor) else t for n, t in tensors.items()})
