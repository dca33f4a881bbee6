"""Which system calls this kernel offers: tried, since a sandbox may refuse what Python has.

Linux 5.3 and later offer all of it. Older kernels, gVisor and strict seccomp filters do not.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from collections.abc import Callable

REFUSED = {errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL}
"""How a kernel, or a filter before it, says that it does not have a system call."""
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
    """Become, or cease to be, the parent of every descendant whose own parent ends.

    Raises
    ------
    OSError
        If the kernel refuses it.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(wanted))


def _try_subreaper() -> None:
    now = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(now))
    set_subreaper(bool(now.value))  # as it is already


def _prctl(option: int, argument: object) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _refused(name: str, call: Callable[[], object]) -> tuple[str, ...]:
    try:
        call()
    except AttributeError:  # Python was built where there was none
        return (f"{name} (unknown to this Python)",)
    except OSError as error:
        if error.errno in REFUSED:
            return (f"{name} ({error.strerror})",)
    return ()
