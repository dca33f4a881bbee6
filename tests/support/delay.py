"""A program that passes frames from one network device to another, each after a delay.

Netem would do this, but the kernels of small machines lack it. Both devices are taps, and frames
are directed to one and from the other by rules of the kernel.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
LARGEST = 2**16


def open_tap(name: str) -> int:
    """Open a device of this process's network namespace; create it if it does not exist."""
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def pass_on(source: int, target: int, seconds: float) -> None:
    """Pass frames on until the process ends."""
    frames: collections.deque[tuple[float, bytes]] = collections.deque()
    while True:
        left = max(0.0, frames[0][0] - time.monotonic()) if frames else None
        if select.select([source], [], [], left)[0]:
            frames.append((time.monotonic() + seconds, os.read(source, LARGEST)))
        while frames and frames[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # the device is down
                os.write(target, frames.popleft()[1])


if __name__ == "__main__":
    pass_on(int(sys.argv[1]), open_tap(sys.argv[2]), float(sys.argv[3]))
