"""A page in a real headless browser, by the DevTools protocol over a pipe: what it asks for, what it says, how wide it
is."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PIPE = "--remote-debugging-pipe"
TIMEOUT_SECONDS = 60


def browser_path() -> str | None:
    """The browser of this machine; None where none is installed."""
    return next((path for name in PROGRAMS if (path := shutil.which(name)) is not None), None)


class OpenedPage:
    """A loaded page. `requests` are the addresses that it asked for, `complaints` what its console has of errors."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._rest = to_browser, from_browser, b""
        self._number, self._session = 0, ""
        self._events: list[dict[str, Any]] = []
        os.set_blocking(self._from, False)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def load(self, page: Path | str, width: int, height: int = 800) -> None:
        """Open a file or an address at this size, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 640
        )
        self._events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            assert time.monotonic() < deadline, f"{page} did not load in {TIMEOUT_SECONDS} s"
            self._events.append(self._receive())

    @property
    def requests(self) -> list[str]:
        sent = [event for event in self._events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    @property
    def complaints(self) -> list[str]:
        kinds = {"Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"}
        return [json.dumps(event["params"]) for event in self._events if event["method"] in kinds]

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression; None for undefined."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def screenshot(self, is_whole: bool = False) -> bytes:
        """PNG of the first screen, or of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=is_whole, format="png", **self._clip(is_whole))
        return base64.b64decode(shot["data"])

    def _clip(self, is_whole: bool) -> dict[str, Any]:
        if not is_whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 8000), "scale": 1}}

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Result of one command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "result" in answer, answer
                return answer["result"]
            if "method" in answer:
                self._events.append(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while b"\0" not in self._rest:
            assert time.monotonic() < deadline, f"the browser said nothing for {TIMEOUT_SECONDS} s"
            try:
                read = os.read(self._from, 1 << 20)
                assert read, "the browser has ended"
                self._rest += read
            except BlockingIOError:
                time.sleep(0.01)
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)


@contextmanager
def opened_browser(program: str) -> Iterator[OpenedPage]:
    """A page of a browser of its own, which ends with it."""
    browser_reads, to_browser = os.pipe()
    from_browser, browser_writes = os.pipe()
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        pipes = f"3<&{browser_reads} 4>&{browser_writes}"  # where the protocol expects them
        browser = subprocess.Popen(
            ["bash", "-c", f'exec "$@" {pipes}', "browser", program, *flags, f"--user-data-dir={profile}", PIPE],
            pass_fds=(browser_reads, browser_writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(browser_reads)
        os.close(browser_writes)
        try:
            yield OpenedPage(to_browser, from_browser)
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
            os.close(to_browser)
            os.close(from_browser)
