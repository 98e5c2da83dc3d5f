"""A page in headless Chromium, over Chromium's DevTools protocol: what it draws, and the errors that it reports."""

import asyncio
import base64
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

START_S, WAIT_S, POLL_S = 60.0, 60.0, 0.2
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0")


class Page:
    """errors: messages of the console at level error, and exceptions that nothing caught."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self._socket, self._number = socket, 0

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a method of the protocol. Raises AssertionError: Chromium refuses it."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while (message := await self._socket.receive_json(timeout=WAIT_S)).get("id") != self._number:
            self._keep_error(message)
        assert "error" not in message, message
        return dict(message["result"])

    async def open(self, url: str, width: int, height: int) -> None:
        """Load it in a window of that many CSS pixels."""
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.call("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """What the expression is in the page. Raises AssertionError: it throws."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, condition: str) -> None:
        """Until that expression is true. Raises TimeoutError."""
        async with asyncio.timeout(WAIT_S):
            while not await self.value(condition):
                await asyncio.sleep(POLL_S)

    async def picture(self) -> bytes:
        """Of its window, as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])

    def _keep_error(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(json.dumps(params["args"]))


@contextlib.asynccontextmanager
async def page(profile: Path) -> AsyncIterator[Page]:
    """An empty page of a Chromium of its own, which ends with it. Skips where there is none."""
    if (program := shutil.which("chromium")) is None:
        pytest.skip("chromium is not installed")
    chromium = await asyncio.create_subprocess_exec(
        program, *FLAGS, f"--user-data-dir={profile}", "about:blank", stderr=asyncio.subprocess.PIPE
    )
    try:
        assert chromium.stderr is not None
        async with asyncio.timeout(START_S):
            while (found := re.search(rb"listening on ws://(\S+?)/", line := await chromium.stderr.readline())) is None:
                assert line, "Chromium has ended"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{found[1].decode()}/json/list") as answer:
                (target,) = [one for one in await answer.json() if one["type"] == "page"]
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        with contextlib.suppress(ProcessLookupError):
            chromium.terminate()
        await chromium.wait()
