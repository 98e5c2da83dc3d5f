"""CUDA IPC: on one host the target maps the source's pool and copies each read with one kernel on a stream of its own.

The source gives out a handle of its allocation, once; what opens it is a process of this host that sees a GPU with
access to the source's. Where it cannot be opened (no peer access, MIG, another container) the next path is taken. The
map keeps the memory after its owner has died; that no commit follows is the protocol's matter.

torch's own sharing is not used: it opens a handle on the device number of the sender, which Ray hides from the other
worker, leaves a file in /dev/shm when its process is killed, and makes closing wait for the current stream.
"""

import asyncio
import contextlib
import ctypes
import functools
import hashlib
import hmac
import importlib.util
import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from kvrelay.errors import BackendUnavailable, TransportError
from kvrelay.kvtransfer.mover.copy_plan import LARGE_TURN_BYTES, CopyList
from kvrelay.kvtransfer.transports.base import NAMESPACES, Landed, Transport, host_id
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)

_LABEL = b"kvrelay-cuda-ipc-v1\0"
_MAC_BYTES = hashlib.sha256().digest_size
_CLOSE_WAIT_S = 0.5
_NEEDS = (
    "CUDA IPC needs GPUs with peer access, no MIG, and workers in one container or in the host's IPC and PID namespaces"
)


# ---- the few calls of the driver that torch does not have


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


_IS_IPC_CAPABLE, _RANGE_BEGIN, _RANGE_BYTES = 10, 11, 12  # CU_POINTER_ATTRIBUTE_...
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_POINTER = ctypes.c_uint64  # CUdeviceptr
_FUNCTIONS: dict[str, list[Any]] = {
    "cuPointerGetAttribute": [ctypes.c_void_p, ctypes.c_int, _POINTER],
    "cuIpcGetMemHandle": [ctypes.POINTER(_Handle), _POINTER],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(_POINTER), _Handle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [_POINTER],
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}


@functools.cache
def _driver() -> Any:
    """Raises OSError where there is no driver."""
    library = ctypes.CDLL("libcuda.so.1")
    for name, types in _FUNCTIONS.items():
        getattr(library, name).argtypes = types
    return library


def _call(function: str, *arguments: Any) -> None:
    """Raises OSError."""
    code = getattr(_driver(), function)(*arguments)
    if code:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        raise OSError(f"{function}: {(name.value or b'').decode() or code}")


def _attribute(which: int, address: int) -> int:
    """Of the memory at `address`. Raises OSError."""
    value = ctypes.c_uint64(0)
    _call("cuPointerGetAttribute", ctypes.byref(value), which, address)
    return value.value


@contextlib.contextmanager
def _on(device: str) -> Iterator[Any]:
    """The torch device, current on this thread, and so its context."""
    import torch

    with torch.cuda.device(device):
        torch.cuda.mem_get_info()  # torch leaves a device that is current already, and may have no context then
        yield torch.device(device)


# ---- the source


class _Descriptor(msgspec.Struct, frozen=True):
    host: str  # host_id(...) of its namespaces
    handle: bytes  # of the allocation that the pool lies in
    offset: int  # of the pool in it
    num_bytes: int  # of the pool


def _mac(secret: bytes, body: bytes) -> bytes:
    return hmac.digest(secret, _LABEL + body, hashlib.sha256)


class CudaIpcExporter:
    """Gives out the pool's handle, sealed with the cluster's secret, over the authenticated connection of both ends."""

    def __init__(self, memory: KvMemory, secret: bytes, host: str) -> None:
        self._memory, self._secret = memory, secret
        self._description = b""

    async def start(self) -> None:
        try:
            self._description = await asyncio.to_thread(self._export)
        except (OSError, RuntimeError) as error:  # the driver's, torch's
            raise BackendUnavailable("cuda_ipc", str(error)) from error

    def _export(self) -> bytes:
        memory, handle = self._memory, _Handle()
        with _on(memory.device):
            if not _attribute(_IS_IPC_CAPABLE, memory.address):
                raise OSError(
                    "CUDA cannot share the pool's memory, as with expandable_segments:True or backend:cudaMallocAsync "
                    "in PYTORCH_CUDA_ALLOC_CONF: unset it to have KV copied within the host"
                )
            base = _attribute(_RANGE_BEGIN, memory.address)
            _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        pool = _Descriptor(
            host_id(*NAMESPACES["cuda_ipc"]), bytes(handle), memory.address - base, memory.layout.num_bytes
        )
        body = msgspec.msgpack.encode(pool)
        return _mac(self._secret, body) + body

    def describe(self) -> bytes:
        return self._description

    def set_busy(self, num_open: int) -> None:
        """Needs no progress."""

    async def aclose(self) -> None:
        """A handle holds nothing."""


# ---- the target


@dataclass(slots=True, eq=False)
class _Read:
    copies: CopyList
    landed: Landed | None
    event: Any = None  # behind its kernel
    error: Exception | None = None  # of its launch: nothing of it runs
    is_abandoned: bool = False


class CudaIpcReader:
    """Maps the source's pool. Its thread launches every read that waits, and then waits for the oldest one's event, so
    that one read is verified while the next ones are copied; neither the loop nor the interpreter's lock is held.
    """

    max_in_flight = 4

    def __init__(self, memory: KvMemory, secret: bytes, host: str) -> None:
        self._memory, self._secret = memory, secret
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-cuda-ipc")
        self._base = self._source = 0  # the mapped allocation, the source's pool in it
        self._source_bytes = 0
        self._waiting: deque[_Read] = deque()  # not launched
        self._reads: dict[asyncio.Future[None], _Read] = {}  # not over
        self._is_closed = False

    async def connect(self, descriptor: bytes) -> None:
        mac, body = descriptor[:_MAC_BYTES], descriptor[_MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(self._secret, body)):
            raise TransportError("the source does not know this cluster's secret")
        try:
            wanted = msgspec.msgpack.decode(body, type=_Descriptor)
        except msgspec.DecodeError as error:
            raise TransportError(f"malformed descriptor: {error}") from error
        if not wanted.host or wanted.host != host_id(*NAMESPACES["cuda_ipc"]):
            raise TransportError("the source is on another host")
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._open, wanted)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise TransportError(f"cannot map the source's pool: {error}; {_NEEDS}") from error

    def _open(self, wanted: _Descriptor) -> None:
        from kvrelay.kvtransfer.transports import cuda_ipc_triton

        base, handle = _POINTER(0), _Handle.from_buffer_copy(wanted.handle)
        with _on(self._memory.device) as device:
            if why := cuda_ipc_triton.problem(device):
                raise OSError(why)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, _LAZY_PEER_ACCESS)
            self._base = base.value
            if not 0 <= wanted.offset <= _attribute(_RANGE_BYTES, self._base) - wanted.num_bytes:
                raise OSError("the source handed over something else")
        self._source, self._source_bytes = self._base + wanted.offset, wanted.num_bytes

    def read(self, copies: CopyList, landed: Landed | None = None) -> "asyncio.Future[None]":
        if self._is_closed:
            raise TransportError("the path is closed")
        read = _Read(copies, landed)
        self._waiting.append(read)
        done = asyncio.get_running_loop().run_in_executor(self._thread, self._carry_out, read)
        self._reads[done] = read
        done.add_done_callback(lambda _: self._reads.pop(done, None))
        return done

    def _carry_out(self, read: _Read) -> None:
        """Launch it and all that wait behind it; wait for this one, and verify it."""
        while self._waiting:
            self._launch(self._waiting.popleft())
        try:
            if read.event is not None:
                read.event.synchronize()
            if read.error is not None:
                raise read.error
            if read.is_abandoned:
                raise TransportError("abandoned")
            if read.landed is not None:
                read.landed(read.copies.total_bytes)
        except TransportError:
            raise
        except Exception as error:  # of torch, the compiler or the driver; a fault of the device ends all its kernels
            raise TransportError(str(error) or type(error).__name__) from error

    def _launch(self, read: _Read) -> None:
        import torch

        from kvrelay.kvtransfer.transports import cuda_ipc_triton

        if read.is_abandoned:
            return
        try:
            read.copies.check_bounds(self._source_bytes, self._memory.layout.num_bytes)
            device = torch.device(self._memory.device)  # current on this thread since `_open`
            read.event = cuda_ipc_triton.launch(read.copies, self._source, self._memory.address, device)
        except Exception as error:  # raised to the waiter of this read
            read.error = error

    def abandon(self, read: "asyncio.Future[None]") -> None:
        """What was launched ends by itself, within milliseconds."""
        if read in self._reads:
            self._reads[read].is_abandoned = True

    async def aclose(self) -> None:
        """Unmap the source's pool behind the last read; where one never ends, so does the map."""
        if self._is_closed:
            return
        self._is_closed = True
        for read in self._reads.values():
            read.is_abandoned = True
        closing = asyncio.wrap_future(self._thread.submit(self._close))
        self._thread.shutdown(wait=False)
        await asyncio.wait({closing}, timeout=_CLOSE_WAIT_S)
        if not closing.done():
            logger.warning("%d CUDA IPC reads have not ended; the source's pool stays mapped", len(self._reads))

    def _close(self) -> None:
        base, self._base = self._base, 0
        if base:
            try:
                with _on(self._memory.device):
                    _call("cuIpcCloseMemHandle", base)
            except (OSError, RuntimeError) as error:  # after a fault nothing can be closed
                logger.warning("the source's pool stays mapped: %s", error)


def _why_not(memory: KvMemory) -> str | None:
    if not memory.device.startswith("cuda"):
        return "the pool is not in CUDA memory"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        _driver()
    except (OSError, AttributeError) as error:
        return str(error)
    return None


CUDA_IPC = Transport("cuda_ipc", CudaIpcExporter, CudaIpcReader, _why_not, LARGE_TURN_BYTES)
