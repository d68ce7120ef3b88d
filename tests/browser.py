"""A real browser for tests of pages: Chromium without a window, driven through DevTools.

with Browser() as browser:
    browser.open(tmp_path / "page.html")
    browser.press("y")
    assert browser.evaluate("document.title") == "Labels"
    assert browser.outside() == [] and browser.errors == []
"""

from __future__ import annotations

import base64
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
# It reads commands from descriptor 3 and writes to 4, parted by zero bytes.
START = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
KEY_CODES = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
    "Backspace": 8,
    "Home": 36,
    "End": 35,
    " ": 32,
}
TEXT = {"Enter": "\r"}
MODIFIERS = {"Alt": 1, "Control": 2, "Meta": 4, "Shift": 8}


class Browser:
    """One page in a browser of its own, with an empty profile that is deleted in the end.

    Attributes:
        requests: addresses that were asked for, in order.
        errors: uncaught exceptions, and what the browser itself complains of, such as violations of
            the content security policy.
        downloads: the folder that files saved by the page go to.
    """

    def __init__(self, width: int = 1280, height: int = 800, timeout: float = 60.0) -> None:
        if CHROMIUM is None:
            raise RuntimeError("no chromium on the PATH")
        self.timeout = timeout
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        self.downloads = Path(self._folder.name, "downloads")
        self.downloads.mkdir()
        pipes = os.pipe() + os.pipe()
        # Numbers from 10 on, so that becoming 3 and 4 overwrites none of them.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in pipes]
        for end in pipes:
            os.close(end)
        theirs_in, self._to, self._from, theirs_out = ends
        profile = f"--user-data-dir={self._folder.name}/profile"
        descriptors = [str(theirs_in), str(theirs_out)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, *descriptors, CHROMIUM, *FLAGS, profile],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
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
            self.set_size(width, height)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and delete its profile."""
        for end in (self._to, self._from):  # it leaves when its pipe is closed
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
        """Send a DevTools command; its result.

        Raises:
            RuntimeError: the browser refuses it.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        end = time.monotonic() + self.timeout
        while True:
            answer = self._read(end)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def wait_for(self, event: str, seconds: float | None = None) -> dict[str, Any]:
        """The parameters of the next DevTools event of that name, or of one that came already."""
        end = time.monotonic() + (seconds or self.timeout)
        while True:
            for place, message in enumerate(self._events):
                if message["method"] == event:
                    del self._events[: place + 1]
                    return message.get("params", {})
            self._read(end)

    def _read(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._from], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._from, 1 << 16)
            if not data:
                raise RuntimeError("the browser has ended")
            self._unread += data
        one, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(one)
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
        """Addresses asked for that are neither files nor data inside the page."""
        here = ("file:", "data:", "blob:", "about:")
        return [url for url in self.requests if not url.startswith(here)]

    def open(self, page: str | os.PathLike[str]) -> None:
        """Load a file or an address and wait until it is there.

        Raises:
            RuntimeError: there is none.
        """
        url = str(page)
        if "://" not in url and not url.startswith(("data:", "about:")):
            url = Path(page).resolve().as_uri()
        self._events.clear()
        if error := self.command("Page.navigate", url=url).get("errorText"):
            raise RuntimeError(f"{url}: {error}")
        self.wait_for("Page.loadEventFired")

    def reload(self) -> None:
        """Load the page anew."""
        self._events.clear()
        self.command("Page.reload")
        self.wait_for("Page.loadEventFired")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise.

        Raises:
            RuntimeError: it throws.
        """
        answer = self.command(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 10.0) -> Any:
        """Evaluate until the value is true; the value."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {script}")
            time.sleep(0.02)
        return value

    def press(self, key: str, *modifiers: str) -> None:
        """Press and release a key, such as "y", "ArrowLeft", or ("z", "Control")."""
        held = sum(MODIFIERS[name] for name in modifiers)
        code = KEY_CODES.get(key) or ord(key.upper())
        text = key if len(key) == 1 else TEXT.get(key, "")
        event = {"key": key, "windowsVirtualKeyCode": code, "modifiers": held}
        if len(key) == 1 and key.isalpha():
            event["code"] = f"Key{key.upper()}"
        if text and not held & ~MODIFIERS["Shift"]:
            self.command("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        else:
            self.command("Input.dispatchKeyEvent", type="rawKeyDown", **event)
        self.command("Input.dispatchKeyEvent", type="keyUp", **event)

    def click(self, selector: str) -> None:
        """Click the middle of the first element that a CSS selector finds."""
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        event = {"x": x, "y": y, "button": "left", "clickCount": 1}
        self.command("Input.dispatchMouseEvent", type="mousePressed", **event)
        self.command("Input.dispatchMouseEvent", type="mouseReleased", **event)

    def choose_file(self, selector: str, path: str | os.PathLike[str]) -> None:
        """Put a file into an ``<input type=file>``."""
        found = self.command(
            "Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})"
        )
        self.command(
            "DOM.setFileInputFiles",
            files=[str(Path(path).resolve())],
            objectId=found["result"]["objectId"],
        )

    def downloaded(self, seconds: float = 10.0) -> Path:
        """The newest file that the page saved, once it is whole."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            files = [p for p in self.downloads.iterdir() if p.suffix != ".crdownload"]
            whole = [p for p in files if p.stat().st_size and not p.name.startswith(".")]
            if whole and len(files) == len(list(self.downloads.iterdir())):
                return max(whole, key=lambda p: p.stat().st_mtime_ns)
            time.sleep(0.02)
        raise TimeoutError("nothing was saved")

    def set_size(self, width: int, height: int, phone: bool = False) -> None:
        """Size of the view in CSS pixels; ``phone``: a touch screen, with a phone's layout."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        self.command("Emulation.setTouchEmulationEnabled", enabled=phone)

    def prefer(self, **features: str) -> None:
        """Media features, as ``prefers_color_scheme="dark"``."""
        given = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.command("Emulation.setEmulatedMedia", features=given)

    def screenshot(
        self, path: str | os.PathLike[str], width: int | None = None, height: int | None = None
    ) -> Path:
        """Write a PNG of the view; with a size, of a view of that size."""
        if width and height:
            self.set_size(width, height)
        data = self.command("Page.captureScreenshot", format="png")["data"]
        Path(path).write_bytes(base64.b64decode(data))
        return Path(path)
