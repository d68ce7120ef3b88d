"""Drive a real browser in tests of HTML pages: headless Chromium, controlled through DevTools.

with Browser() as browser:
    browser.open(tmp_path / "page.html")
    browser.press("y")
    assert browser.evaluate("document.title") == "Labels"
    assert browser.outside() == [] and browser.errors == []
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=f"needs one of {', '.join(NAMES)}")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --mute-audio "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage --remote-debugging-pipe"
).split()
# Chromium reads commands from descriptor 3 and writes to 4; messages end with a zero byte.
LAUNCHER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page in its own browser process, with an empty profile that is deleted on exit.

    Attributes:
        requests: requested addresses, in order.
        errors: uncaught exceptions and errors that the browser logs, such as violations of the
        content security policy.
        downloads: the folder for files that the page saves.
    """

    def __init__(self) -> None:
        if CHROMIUM is None:
            raise RuntimeError("no chromium on the PATH")
        self.timeout = 60.0
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        self.downloads = Path(self._folder.name, "downloads")
        self.downloads.mkdir()
        pipes = os.pipe() + os.pipe()
        # Duplicate to numbers from 10 on, so that the launcher's dup2 to 3 and 4 overwrites none of
        # them.
        duplicates = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in pipes]
        for end in pipes:
            os.close(end)
        browser_in, self._to, self._from, browser_out = duplicates
        profile = f"--user-data-dir={self._folder.name}/profile"
        descriptor_args = [str(browser_in), str(browser_out)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *descriptor_args, CHROMIUM, *FLAGS, profile],
            pass_fds=(browser_in, browser_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(browser_in)
        os.close(browser_out)
        self._unread = b""
        self._events: list[dict[str, Any]] = []
        self._number = 0
        self._session: str | None = None
        try:
            self.command(
                "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads)
            )
            target = self.command("Target.createTarget", url="about:blank")["targetId"]
            attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.command(f"{domain}.enable")
            self.set_size(1280, 800)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the browser and delete its profile."""
        for end in (self._to, self._from):  # the browser exits when its pipe is closed
            try:
                os.close(end)
            except OSError:
                pass
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a DevTools command and return its result.

        Raises:
            RuntimeError: the browser reports an error.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        deadline = time.monotonic() + self.timeout
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def wait_for(self, event: str) -> dict[str, Any]:
        """Return the parameters of the next DevTools event of that name, including one already
        received.
        """
        deadline = time.monotonic() + self.timeout
        while True:
            for position, message in enumerate(self._events):
                if message["method"] == event:
                    del self._events[: position + 1]
                    return message.get("params", {})
            self._read(deadline)

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([self._from], [], [], remaining)[0]:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self._from, 1 << 16)
            if not chunk:
                raise RuntimeError("the browser has ended")
            self._unread += chunk
        answer, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(answer)
        if "id" not in message:
            self._events.append(message)
            self._note(message["method"], message.get("params", {}))
        return message

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def outside(self) -> list[str]:
        """Return the requested addresses that are neither files nor data inside the page."""
        here = ("file:", "data:", "blob:", "about:")
        return [url for url in self.requests if not url.startswith(here)]

    def open(self, page: str | os.PathLike[str]) -> None:
        """Load a file or an address and wait until it is loaded.

        Raises:
            RuntimeError: the address cannot be loaded.
        """
        url = str(page)
        if "://" not in url and not url.startswith(("data:", "about:")):
            url = Path(page).resolve().as_uri()
        self._events.clear()
        if error := self.command("Page.navigate", url=url).get("errorText"):
            raise RuntimeError(f"{url}: {error}")
        self.wait_for("Page.loadEventFired")

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression, awaited if it is a promise.

        Raises:
            RuntimeError: the expression throws.
        """
        answer = self.command(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def press(self, key: str, control: bool = False) -> None:
        """Press and release a letter, also with Control held, or Backspace."""
        letter = len(key) == 1
        event: dict[str, Any] = {"key": key, "modifiers": 2 * control}
        event["windowsVirtualKeyCode"] = ord(key.upper()) if letter else 8
        event |= {"code": f"Key{key.upper()}"} if letter else {}
        down = (
            {"type": "keyDown", "text": key} if letter and not control else {"type": "rawKeyDown"}
        )
        self.command("Input.dispatchKeyEvent", **down, **event)
        self.command("Input.dispatchKeyEvent", type="keyUp", **event)

    def click(self, selector: str) -> None:
        """Click the middle of the first element that matches a CSS selector."""
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        event = {"x": x, "y": y, "button": "left", "clickCount": 1}
        self.command("Input.dispatchMouseEvent", type="mousePressed", **event)
        self.command("Input.dispatchMouseEvent", type="mouseReleased", **event)

    def downloaded(self, seconds: float = 10.0) -> Path:
        """Return the newest file that the page saved, once it is complete."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            files = [p for p in self.downloads.iterdir() if p.suffix != ".crdownload"]
            complete = [p for p in files if p.stat().st_size and not p.name.startswith(".")]
            if complete and len(files) == len(list(self.downloads.iterdir())):
                return max(complete, key=lambda p: p.stat().st_mtime_ns)
            time.sleep(0.02)
        raise TimeoutError("nothing was saved")

    def set_size(self, width: int, height: int, phone: bool = False) -> None:
        """Set the size of the view in CSS pixels; ``phone``: a touch screen with mobile layout."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        self.command("Emulation.setTouchEmulationEnabled", enabled=phone)
