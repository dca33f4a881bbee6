"""Processes: signals to them, their titles, and what Linux reports of them in ``/proc``.

What the kernel supports is found by trial. A sandbox may refuse what Python offers: Linux 5.3 and
later support all system calls that are tried here, but older kernels, gVisor and strict seccomp
filters do not. psutil also reads ``/proc``, but its import would slow down every launch of a rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path

from distributor._compat.cpython import RESOURCE_TRACKER

# The errors by which a kernel or a filter refuses a system call.
REFUSED = {errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL}
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
EXEC_SECONDS = 5.0  # seconds to wait for the command line of a process that is just being executed
_EXEC_POLL_SECONDS = 0.0005
# A resource tracker of multiprocessing is never killed, because the shared memory that it should
# remove would then stay until the machine restarts. After all its clients have ended, it is waited
# for. On a machine that is short of CPU time or memory, its start alone may take longer.
RESOURCE_TRACKER_SECONDS = 5.0
POLL_SECONDS = 0.005
_TITLE_PREFIX = "distributor: "
_MAX_TITLE_BYTES = 256  # the kernel shows at most a page
_MIN_COMMAND_LINE_BYTES = 32  # below, there is no room for a meaningful title
_EXITING = 0x4  # a flag of the kernel's, PF_EXITING
_MAX_COMM_BYTES = 15  # to which the kernel cuts a process's short name


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


class Stat(IntEnum):
    """Fields of ``/proc/<pid>/stat``, numbered as in proc(5)."""

    STATE = 3
    PARENT_PID = 4
    FLAGS = 9
    USER_TIME = 14
    REAPED_SYSTEM_TIME = 17
    START_TIME = 22
    RESIDENT_PAGES = 24
    ARG_START = 48
    ARG_END = 49
    WAIT_STATUS = 52


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def child_pids() -> list[int]:
    """List the children of this process, which must have only one thread."""
    file = Path(f"/proc/self/task/{os.getpid()}/children")
    if file.exists():
        return [int(pid) for pid in file.read_text().split()]
    return [pid for pid in all_pids() if parent_pid(pid) == os.getpid()]


def parent_pid(pid: int) -> int:
    """Return the parent of a process; 0 if the process has ended."""
    try:
        return int(stat_field(pid, Stat.PARENT_PID))
    except OSError:
        return 0


def stat_field(pid: int, field: Stat) -> str:
    return _stat(pid)[field].decode()


def exists(pid: int) -> bool:
    """Return whether there is such a process, also one that has ended and was not waited for."""
    return os.path.exists(f"/proc/{pid}")


def early_exit_code(pid: int) -> int | None:
    """Return the exit code, or minus the signal, of a process that has begun to end, or has ended.

    Until it has ended, the kernel frees its memory, which takes a quarter of a second for 3 GB, and
    closes its connections only then. None if it still works, or if that is unknown.
    """
    with contextlib.suppress(OSError):
        stat = _stat(pid)
        if int(stat[Stat.FLAGS]) & _EXITING:
            return os.waitstatus_to_exitcode(int(stat[Stat.WAIT_STATUS]))
    return None


def cpu_seconds_of_descendants(ancestor: int) -> float:
    """Return the CPU time of all descendants of a process, including children that they reaped."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for pid in all_pids():
        with contextlib.suppress(OSError):  # it has ended
            stat = _stat(pid)
            children.setdefault(int(stat[Stat.PARENT_PID]), []).append(pid)
            ticks[pid] = _cpu_ticks(stat)
    total, unseen = 0, [ancestor]
    while unseen:
        found = children.pop(unseen.pop(), [])
        total += sum(ticks[pid] for pid in found)
        unseen += found
    return total / os.sysconf("SC_CLK_TCK")


def cpu_and_memory(pid: int) -> tuple[float, float]:
    """Return the CPU time of a process and its reaped children, and its resident bytes."""
    stat = _stat(pid)
    pages = int(stat[Stat.RESIDENT_PAGES])
    return _cpu_ticks(stat) / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


def _cpu_ticks(stat: list[bytes]) -> int:
    return sum(map(int, stat[Stat.USER_TIME : Stat.REAPED_SYSTEM_TIME + 1]))


def status_field(pid: int, name: str) -> str:
    """Return one line of ``/proc/<pid>/status``; empty if the system does not report it."""
    for line in _read(pid, "status").decode(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.strip()
    return ""


def is_in_signal_mask(pid: int, mask: str, signum: int) -> bool:
    """Return whether a signal is in one of a process's masks, such as SigIgn or SigCgt."""
    signals = int(status_field(pid, mask) or "0", 16)
    return bool(signals >> (signum - 1) & 1)


def _environment_of(pid: int) -> set[bytes]:
    """Return the variables that a process was started with; none if they cannot be read."""
    try:
        return set(_read(pid, "environ").split(b"\0"))
    except OSError:
        return set()


def _command_line_of(pid: int) -> bytes:
    """Return the command line of a process, which is empty if the process has ended."""
    # It is also empty for a moment while a process is being executed.
    deadline = time.monotonic() + EXEC_SECONDS
    while not (line := _read(pid, "cmdline")):
        if stat_field(pid, Stat.STATE) in ("Z", "X") or time.monotonic() > deadline:
            break
        time.sleep(_EXEC_POLL_SECONDS)
    return line


def _stat(pid: int) -> list[bytes]:
    # The second field, the process's name, is in parentheses and may contain anything.
    before = [b""] * Stat.STATE
    return [*before, *_read(pid, "stat").rpartition(b")")[2].split()]


def _read(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def kill(pid: int) -> None:
    """Kill a process, if it still exists and is this user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def signal_group(leader: int, signum: int) -> None:
    """Send a signal to a process group, if any of its processes is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(leader, signum)
        except ProcessLookupError:
            os.kill(leader, signum)  # just after its fork it may not lead a group yet


def kill_group(leader: int) -> None:
    """Kill a process group except for resource trackers; if this process is in it, kill it last."""
    if sys.platform != "linux":
        os.killpg(leader, signal.SIGKILL)
        return
    members = [pid for pid in all_pids() if process_group_of(pid) == leader]
    doomed = [pid for pid in members if not is_resource_tracker(pid)]
    for pid in sorted(doomed, key=lambda pid: pid == os.getpid()):
        kill(pid)


def kill_by_environment(variables: Mapping[str, str]) -> None:
    """Kill all processes of this user that were started with these variables.

    Resource trackers are waited for instead.
    """
    wanted = {os.fsencode(f"{name}={value}") for name, value in variables.items()}
    assert wanted, "every process would match"
    deadline = time.monotonic() + RESOURCE_TRACKER_SECONDS
    while found := [pid for pid in all_pids() if wanted <= _environment_of(pid)]:
        for pid in found:
            if not is_resource_tracker(pid):
                kill(pid)
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_SECONDS)


def is_resource_tracker(pid: int) -> bool:
    """Return whether a process is multiprocessing's resource tracker.

    It removes shared memory that its clients have left behind, and exits once all of them have.
    """
    try:
        return RESOURCE_TRACKER in _command_line_of(pid)
    except OSError:
        return False


def ignores_signal(pid: int, signum: int) -> bool:
    """Return whether a process ignores a signal; False on systems other than Linux."""
    try:
        return is_in_signal_mask(pid, "SigIgn", signum)
    except OSError:
        return False


def process_group_of(pid: int) -> int:
    """Return the process group of a process; 0 if the process is gone."""
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def set_title(title: str, comm: str) -> None:
    """Set the title, cut to the length of the command line, and the short name of this process.

    Tools such as ``ps``, ``top`` and ``nvidia-smi`` show the title in place of the command line.
    Python's own copies, such as ``sys.orig_argv``, do not change. On other systems than Linux, and
    if anything is not as expected, nothing happens.
    """
    _overwrite(title)
    with contextlib.suppress(OSError):
        # Without spaces, at which Spark splits `/proc/<pid>/stat`.
        Path("/proc/self/comm").write_bytes(_cut(comm.replace(" ", "_"), _MAX_COMM_BYTES))


def set_run_title(role: str, program_name: str, run_id: str) -> None:
    """Set the title and the short name of this process to its role in a run."""
    comm = f"{role.replace(' ', '')}:{program_name}"
    set_title(_run_title(role, program_name, run_id), comm)


@contextlib.contextmanager
def temporary_run_title(role: str, program_name: str, run_id: str) -> Iterator[None]:
    """Set the title of this process to its role in a run, and restore the command line afterwards.

    The short name does not change, because the process belongs to another program: Spark counts
    the memory of its Python workers by that name.
    """
    before = _overwrite(_run_title(role, program_name, run_id))
    try:
        yield
    finally:
        if before is not None:
            _overwrite(before)


def _run_title(role: str, program_name: str, run_id: str) -> str:
    return f"{role} of {program_name} ({run_id})"


def _overwrite(content: str | bytes) -> bytes | None:
    """Overwrite the memory of the command line by a title, or by what it contained.

    Return its content before; None if nothing was written.
    """
    # Linux shows the memory that held the command line when the process was started. The write
    # never goes beyond it, and through a file, which reports an error in cases in which a write
    # through a pointer would crash.
    if sys.platform != "linux":
        return None
    pid = os.getpid()
    with contextlib.suppress(OSError, ValueError):
        start, end = int(stat_field(pid, Stat.ARG_START)), int(stat_field(pid, Stat.ARG_END))
        room, shown = end - start, Path("/proc/self/cmdline").read_bytes()
        if not (start > 0 and room >= _MIN_COMMAND_LINE_BYTES and shown):
            return None
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            before = os.pread(memory.fileno(), room, start)
            after = content if isinstance(content, bytes) else _padded(content, room)
            if before.startswith(shown) and len(before) == len(after) == room:
                os.pwrite(memory.fileno(), after, start)
                return before
    return None


def _padded(title: str, room: int) -> bytes:
    # If the last byte is zero, the kernel shows the whole memory, including the zeros.
    text = _cut(_TITLE_PREFIX + title, min(room - 2, _MAX_TITLE_BYTES))
    return text.ljust(room - 1, b"\0") + b" "


def _cut(text: str, room: int) -> bytes:
    """Encode text as one printable line, and cut it between two characters."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return printable.encode(errors="replace")[:room].decode(errors="ignore").encode()
