"""A link with latency: forwards the frames of two network devices to each other, each after a delay.

`python slow_link.py DEVICE DEVICE SECONDS`, until it is killed. For kernels without netem.
"""

import collections
import contextlib
import selectors
import socket
import sys
import time

_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_FRAME_BYTES = 1 << 17  # a frame that the sender's kernel has not segmented yet, with its header
_BUFFER_BYTES = 8 << 20


def open_device(name: str) -> socket.socket:
    """Receives and sends whole frames of the device, checksum and segmentation left to the kernel as they came."""
    device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    device.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    device.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    device.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    device.bind((name, 3))  # ETH_P_ALL
    device.setblocking(False)
    return device


def forward(first: str, second: str, delay_s: float) -> None:
    """Forward for ever. A frame that the other device has no room for is lost, as on any link."""
    devices = [open_device(first), open_device(second)]
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()  # one delay: in order
    with selectors.DefaultSelector() as selector:
        for device, other in (devices, devices[::-1]):
            selector.register(device, selectors.EVENT_READ, other)
        while True:
            left_s = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
            for key, _ in selector.select(left_s):
                with contextlib.suppress(BlockingIOError):
                    while frame := key.fileobj.recv(_FRAME_BYTES):  # type: ignore[union-attr]
                        waiting.append((time.monotonic() + delay_s, key.data, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, device, frame = waiting.popleft()
                with contextlib.suppress(OSError):
                    device.send(frame)


if __name__ == "__main__":
    forward(sys.argv[1], sys.argv[2], float(sys.argv[3]))
