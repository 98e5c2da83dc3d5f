"""vmread: the target reads the source's pool where it lies, in the source's own memory (process_vm_readv).

For pools in host memory that are no shared mapping, or whose descriptor cannot be passed on. Nothing of the source
runs during a read. A pid alone proves nothing (it is given out again): with every piece comes the source's nonce.

Who may read whom is the kernel's to say: the same user, or CAP_SYS_PTRACE. Where Yama asks for the source's consent
as well (ptrace_scope 1, the default of Ubuntu and others), the source gives it once a target has proved the cluster's
secret, and only then: Yama remembers one name for a process and the targets are many, so the consent is to every process
of that user, as if this one process lived on a system without Yama. It ends with the exporter. Neither happens
while shm works, which is tried first.
"""

import ctypes
import errno
import logging
import os
import secrets
import socket
from functools import partial
from pathlib import Path

import msgspec

from kvrelay.errors import BackendUnavailable
from kvrelay.kvtransfer.mover import process_memory
from kvrelay.kvtransfer.mover.process_memory import NONCE_BYTES, Place, copy_from_process, set_ptracer
from kvrelay.kvtransfer.transports.base import Transport, TransportError, host_id, open_off_loop
from kvrelay.kvtransfer.transports.sockets.authenticated_socket import Door, knock
from kvrelay.kvtransfer.transports.threaded import FetchingReader
from kvrelay.types import KvMemory

logger = logging.getLogger(__name__)

_LABEL = b"kvrelay-vmread-v1"
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_CONSENT_HELPS = 1  # Yama's scope: 0 asks for none, from 2 on only for capabilities


class _Descriptor(msgspec.Struct, frozen=True):
    host: str  # host_id()
    pid_namespace: int  # 0: unknown
    pid: int
    address: int
    num_bytes: int
    nonce_address: int
    nonce: bytes
    door: bytes


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _yama_scope() -> int:
    """0 where there is no Yama."""
    try:
        return int(_YAMA.read_text())
    except (OSError, ValueError):
        return 0


class VmReadExporter:
    """Tells readers where the pool is, and consents to being read by those that prove the cluster's secret."""

    def __init__(self, memory: KvMemory, secret: bytes, host: str) -> None:
        self._memory = memory
        self._nonce = ctypes.create_string_buffer(NONCE_BYTES)
        self._door = Door(secret, _LABEL, self._consent)
        self._has_consented = False

    async def start(self) -> None:
        self._nonce.raw = secrets.token_bytes(NONCE_BYTES)
        try:
            await self._door.start()
        except OSError as error:
            await self.aclose()
            raise BackendUnavailable("vmread", str(error)) from error

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(
            _Descriptor(
                host=host_id(), pid_namespace=_pid_namespace(), pid=os.getpid(), address=self._memory.address,
                num_bytes=self._memory.layout.num_bytes, nonce_address=ctypes.addressof(self._nonce),
                nonce=self._nonce.raw, door=self._door.name,
            )
        )  # fmt: skip

    def _consent(self, peer: socket.socket) -> None:
        if _yama_scope() == _CONSENT_HELPS and not self._has_consented:
            set_ptracer(is_anyone=True)
            self._has_consented = True
        peer.sendall(b"k")

    def set_busy(self, num_open: int) -> None:
        """Needs no progress."""

    async def aclose(self) -> None:
        """From here on every reader is refused: its nonce is gone."""
        await self._door.aclose()
        self._nonce.raw = bytes(NONCE_BYTES)
        if self._has_consented:
            set_ptracer(is_anyone=False)
            self._has_consented = False


class VmReadReader(FetchingReader):
    """Reads on a thread of its own, a few hundred KiB in each system call."""

    def __init__(self, memory: KvMemory, secret: bytes, host: str) -> None:
        super().__init__("kv-vmread", memory)
        self._secret = secret

    async def connect(self, descriptor: bytes) -> None:
        try:
            wanted = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except msgspec.DecodeError as error:
            raise TransportError(f"malformed descriptor: {error}") from error
        if not wanted.host or wanted.host != host_id():
            raise TransportError("the source is on another host")
        if wanted.pid < 1 or wanted.pid_namespace != _pid_namespace():
            raise TransportError("the source is in another PID namespace")
        source = Place(wanted.address, wanted.num_bytes, wanted.pid, wanted.nonce_address, wanted.nonce)
        await open_off_loop(partial(self._try, source, wanted.door), lambda _: None)
        self._source = source

    def _try(self, source: Place, door: bytes) -> None:
        """Whether the source can be read, if need be after asking for its consent. Blocking. Raises TransportError."""
        try:
            _read_nonce(source)
        except PermissionError as refused:
            try:
                _ask_for_consent(door, self._secret)
                _read_nonce(source)
            except OSError as error:
                raise TransportError(
                    _explained(source, refused if isinstance(error, PermissionError) else error)
                ) from error
        except OSError as error:
            raise TransportError(_explained(source, error)) from error

    def _explained(self, error: OSError) -> str:
        assert self._source is not None
        return _explained(self._source, error)


def _read_nonce(source: Place) -> None:
    """Raises OSError when the kernel refuses, NotTheSource."""
    buffer = ctypes.create_string_buffer(NONCE_BYTES)
    copy_from_process(source, [(source.nonce_address, ctypes.addressof(buffer), NONCE_BYTES)])


def _ask_for_consent(door: bytes, secret: bytes) -> None:
    """Blocking. Raises OSError."""
    with knock(door, secret, _LABEL) as peer:
        if not peer.recv(1):
            raise ConnectionError("the source did not consent to being read")


def _explained(source: Place, error: OSError) -> str:
    if error.errno == errno.ESRCH:
        return f"the source, process {source.pid}, is gone"
    text = f"cannot read the memory of process {source.pid}: {error.strerror or error}"
    if error.errno == errno.EPERM:
        text += f" (another user, or no CAP_SYS_PTRACE in this container; Yama's ptrace_scope is {_yama_scope()})"
    return text


def _why_not(memory: KvMemory) -> str | None:
    if memory.view is None:
        return "the pool is not in host memory"
    return process_memory.why_not()


VMREAD = Transport("vmread", VmReadExporter, VmReadReader, _why_not)
