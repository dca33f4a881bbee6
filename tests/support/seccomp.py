"""Source that has the kernel refuse system calls, as an old kernel or a sandbox does."""

from __future__ import annotations

PIDFD, MEMFD = ("pidfd_open", "pidfd_send_signal"), ("memfd_create",)

REFUSING = """
def refuse(names, error):
    import ctypes, errno, platform, struct

    numbers = {{
        "x86_64": {{"pidfd_open": 434, "pidfd_send_signal": 424, "memfd_create": 319}},
        "aarch64": {{"pidfd_open": 434, "pidfd_send_signal": 424, "memfd_create": 279}},
    }}[platform.machine()]
    load, equal, give_back, allow, fail = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
    steps = [(load, 0, 0, 0)]
    for name in names:
        steps += [(equal, 0, 1, numbers[name]), (give_back, 0, 0, fail | getattr(errno, error))]
    steps.append((give_back, 0, 0, allow))
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    # struct sock_fprog: the number of steps, and their address
    filtered = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(program)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    if prctl(no_new_privileges, 1, 0, 0, 0) or prctl(set_seccomp, mode_filter, filtered, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")

refuse({names!r}, {error!r})
"""
"""Source of a program that begins so."""


def refusing(names: tuple[str, ...], error: str) -> str:
    """Return source after which system calls of these names fail with an error, such as ENOSYS."""
    return REFUSING.format(names=names, error=error)
