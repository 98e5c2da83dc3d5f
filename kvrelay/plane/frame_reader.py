"""The reading end of a framed connection: a stream that can also hand out its frames as they come.

A frame is a 4-byte little-endian length and that many bytes. Imports nothing of ours but errors.
"""

import asyncio
from collections.abc import Callable

from kvrelay.errors import ProtocolError


class FrameReader(asyncio.StreamReader):
    """A stream that can also hand out its frames as they come: no task wakes to ask for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self._most_bytes = 0  # of a frame
        self._num_waiting = 0  # bytes that were fed and not read
        self._take: Callable[[bytes], None] | None = None
        self._partial = bytearray()  # of a frame to be handed out
        self._ended: asyncio.Future[None] | None = None

    async def readexactly(self, n: int) -> bytes:
        data = await super().readexactly(n)
        self._num_waiting -= n
        return data

    async def hand_out(self, take: Callable[[bytes], None], *, most_bytes: int) -> None:
        """Give every frame to `take`, until the stream ends. Raises OSError, ProtocolError (over most_bytes), what `take` raises."""
        self._most_bytes = most_bytes
        self._ended = ended = asyncio.get_running_loop().create_future()
        waiting = await self.readexactly(self._num_waiting)  # it is there: this does not wait
        self._take = take
        self._cut(waiting)
        if self.at_eof():
            self._end(None)
        await ended

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # what transports give is bytes
        if self._take is not None:
            self._cut(data)
            return
        self._num_waiting += len(data)
        super().feed_data(data)

    def feed_eof(self) -> None:
        super().feed_eof()
        self._end(None)

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self._end(exc)

    def _end(self, error: Exception | None) -> None:
        self._take = None
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def _cut(self, data: bytes) -> None:
        if self._partial:
            self._partial += data
        begin, view = 0, self._partial or data
        try:
            while self._take is not None and (end := frame_end(view, begin, self._most_bytes)) is not None:
                self._take(bytes(view[begin + 4 : end]))
                begin = end
        except Exception as error:  # it belongs to whoever asked for the frames
            self._end(error)
        if view is self._partial:
            del self._partial[:begin]
        else:
            self._partial += data[begin:]


def frame_end(data: bytes | bytearray, begin: int, most_bytes: int) -> int | None:
    """Where the frame that begins there ends; None: not all of it is here. Raises ProtocolError: it is huge."""
    if len(data) - begin < 4:
        return None
    size = int.from_bytes(data[begin : begin + 4], "little")
    if size > most_bytes:
        raise ProtocolError(f"a frame of {size} bytes was announced")
    end = begin + 4 + size
    return end if end <= len(data) else None
