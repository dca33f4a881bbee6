"""Which system calls this kernel supports, by trial: a sandbox may refuse what Python offers.

Linux 5.3 and later support them all. Older kernels, gVisor and strict seccomp filters do not.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from collections.abc import Callable

REFUSED = {errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL}
"""The errors by which a kernel or a filter refuses a system call."""
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


@functools.cache
def lacking_for_memory_files() -> tuple[str, ...]:
    """Return the system call that files in memory need, and its error, if it is refused."""
    return _refused("memfd_create", lambda: os.close(os.memfd_create("distributor")))


@functools.cache
def lacking_for_supervision() -> tuple[str, ...]:
    """Return the system calls that supervising ranks needs, and their errors, that are refused."""
    if sys.platform != "linux":
        return ("Linux",)
    return (
        *_refused("pidfd_open", lambda: os.close(os.pidfd_open(os.getpid()))),
        *_refused("prctl(PR_SET_CHILD_SUBREAPER)", _try_subreaper),
    )


def set_subreaper(wanted: bool = True) -> None:
    """Become, or cease to be, the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(wanted))


def _try_subreaper() -> None:
    now = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(now))
    set_subreaper(bool(now.value))  # unchanged


def _prctl(option: int, argument: object) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _refused(name: str, call: Callable[[], object]) -> tuple[str, ...]:
    try:
        call()
    except AttributeError:  # Python was built without it
        return (f"{name} (unknown to this Python)",)
    except OSError as error:
        if error.errno in REFUSED:
            return (f"{name} ({error.strerror})",)
    return ()
