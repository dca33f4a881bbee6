"""Screenshots of the built documentation by a headless Chromium, wide and as on a phone.

Run as ``python docs/screenshots.py FOLDER [PAGE ...]`` after ``make docs``. A page is a name, such
as ``how-to/hangs``, or an address. Debian has the browser in chromium-headless-shell.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

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
