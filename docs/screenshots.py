"""Screenshots of the built documentation by a headless Chromium, wide and as on a phone.

Run as ``python docs/screenshots.py FOLDER [PAGE ...]`` after ``make docs``. A page is a name, such
as ``how-to/hangs``, or an address. Debian has the browser in chromium-headless-shell.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from tornado.websocket import websocket_connect

BUILT = Path(__file__).resolve().parent / "_build" / "html"
BROWSERS = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "google-chrome")
PAGES = (
    "index",
    "install",
    "quick-start",
    "how-to/hangs",
    "troubleshooting",
    "reference/api/train",
    "explanation/performance",
)
SIZES = {"wide": (1280, 1400), "phone": (390, 1400)}
WAIT_MS = 5000
"""How long a page may run its scripts."""
DEADLINE = 60.0
"""Seconds in which a page must show what it is to show."""
LISTENING = re.compile(r"ws://[^:]*:(\d+)/")


def browser() -> str:
    """Return the path of the first browser that is installed."""
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    raise SystemExit(f"None of these is installed: {', '.join(BROWSERS)}")


def address(page: str) -> str:
    """Return the address of a page of the documentation; others are addresses already."""
    return page if "://" in page else f"{BUILT.as_uri()}/{page}.html"


def take(address: str, file: Path, width: int, height: int) -> None:
    """Write a screenshot of a page."""
    command = [browser(), "--headless", "--no-sandbox", "--hide-scrollbars"]
    # Virtual time would not pass on a page that asks its server again and again.
    wait = "timeout" if address.startswith("http") else "virtual-time-budget"
    command += [f"--window-size={width},{height}", f"--{wait}={WAIT_MS}"]
    subprocess.run(
        [*command, f"--screenshot={file}", address], check=True, stderr=subprocess.DEVNULL
    )


def take_with(text: str, address: str, file: Path, width: int, height: int) -> None:
    """Write a screenshot of a page once it shows a text, for which its scripts ask a server."""
    command = [browser(), "--headless", "--no-sandbox", "--hide-scrollbars"]
    with tempfile.TemporaryDirectory() as profile:
        options = ["--remote-debugging-port=0", f"--user-data-dir={profile}"]
        size = f"--window-size={width},{height}"
        with subprocess.Popen(
            [*command, *options, size, address], stderr=subprocess.PIPE, start_new_session=True
        ) as process:
            try:
                assert process.stderr is not None
                lines = (line.decode() for line in process.stderr)
                port = next(found[1] for line in lines if (found := LISTENING.search(line)))
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                    [page] = [each for each in json.load(answer) if each["type"] == "page"]
                file.write_bytes(asyncio.run(_captured(page["webSocketDebuggerUrl"], text)))
            finally:
                os.killpg(process.pid, signal.SIGKILL)  # it has processes of its own


async def _captured(address: str, text: str) -> bytes:
    """Ask a page by the DevTools protocol for its text until it has `text`, then for its image."""
    page = await websocket_connect(address, max_message_size=2**27)

    async def ask(method: str, **parameters: Any) -> Any:
        await page.write_message(json.dumps({"id": 1, "method": method, "params": parameters}))
        while True:
            message = json.loads(await page.read_message() or "{}")
            if message.get("id") == 1:
                return message["result"]

    deadline = time.monotonic() + DEADLINE
    while text not in (
        await ask("Runtime.evaluate", expression="document.body.innerText", returnByValue=True)
    )["result"].get("value", ""):
        if time.monotonic() > deadline:
            raise SystemExit(f"{address} does not show {text!r}")
        await asyncio.sleep(0.2)
    await asyncio.sleep(1)  # what it draws
    return base64.b64decode((await ask("Page.captureScreenshot"))["data"])


def main() -> None:
    """Write a screenshot of each page in each size."""
    parser = argparse.ArgumentParser(description="Make screenshots of the built documentation.")
    parser.add_argument("folder", type=Path, help="folder for the screenshots")
    parser.add_argument("pages", nargs="*", default=PAGES, help="names of pages, or addresses")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for page in options.pages:
        for size, (width, height) in SIZES.items():
            name = page.rpartition("://")[2].strip("/").replace("/", "-")
            take(address(page), options.folder / f"{name}-{size}.png", width, height)


if __name__ == "__main__":
    main()
