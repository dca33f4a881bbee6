"""Canaries for what `distributor._compat.cpython` uses of Python."""

from __future__ import annotations

import faulthandler
import linecache
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings

import pytest
from conftest import needs_late_threads
from support.canary import relies_on

from distributor._compat import cpython

pytestmark = pytest.mark.repository


def printed_by(program: str) -> str:
    """Run a program in an interpreter of its own, and return what it prints."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def test_the_calls_of_another_thread_can_be_read() -> None:
    with relies_on("Python", "sys._current_frames", "cpython.stack_of"):
        done = threading.Event()
        thread = threading.Thread(target=lambda: done.wait(60))
        thread.start()
        assert "done.wait(60)" in cpython.stack_of(thread)
        done.set()
        thread.join()


def test_finalizers_can_be_disabled() -> None:
    with relies_on("Python", "weakref.finalize._registry", "cpython.disable_exit_finalizers"):
        printed = printed_by(
            "import weakref\n"
            "from distributor._compat.cpython import disable_exit_finalizers\n"
            "class Owner: pass\n"
            "owners = Owner(), Owner()\n"
            "weakref.finalize(owners[0], print, 'before')\n"
            "disable_exit_finalizers()\n"
            "weakref.finalize(owners[1], print, 'after')\n"
        )
        assert printed == "after\n"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="exit handlers exist until all have run")
def test_the_last_exit_handler_releases_the_others() -> None:
    with relies_on("Python", "atexit._clear", "cpython.forget_exit_handlers"):
        printed = printed_by(
            "import atexit, os\n"
            "from distributor._compat.cpython import forget_exit_handlers\n"
            "class Owner:\n"
            "    def __del__(self): print('released', flush=True)\n"
            "def leave():\n"
            "    forget_exit_handlers()\n"
            "    os._exit(0)\n"
            "atexit.register(leave)\n"
            "atexit.register(lambda owner: print('called'), Owner())\n"
        )
        assert printed == "called\nreleased\n"


@needs_late_threads
def test_a_function_is_called_before_thread_pools_end() -> None:
    with relies_on("Python", "threading._register_atexit", "cpython.before_thread_pools_end"):
        printed = printed_by(
            "import threading\n"
            "from distributor._compat.cpython import before_thread_pools_end\n"
            "def work():\n"
            "    print(pool.submit(str, 'from a pool').result())\n"
            "    thread = threading.Thread(target=print, args=['from a thread'])\n"
            "    thread.start()\n"
            "    thread.join()\n"
            "before_thread_pools_end(work)\n"
            "from concurrent.futures import ThreadPoolExecutor\n"
            "pool = ThreadPoolExecutor(1)\n"
            "print('end of the script')\n"
        )
        assert printed == "end of the script\nfrom a pool\nfrom a thread\n"


def test_multiprocessing_takes_a_folder() -> None:
    with relies_on(
        "Python",
        "multiprocessing's current_process()._config",
        "cpython.set_multiprocessing_folder",
    ):
        printed = printed_by(
            "from multiprocessing.util import get_temp_dir\n"
            "from distributor._compat.cpython import set_multiprocessing_folder\n"
            "set_multiprocessing_folder('/the/folder')\n"
            "print(get_temp_dir())\n"
        )
        assert printed == "/the/folder\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_the_resource_tracker_is_known_by_its_command_line() -> None:
    what = "the command line of multiprocessing's resource tracker"
    with relies_on("Python", what, "cpython.RESOURCE_TRACKER"):
        printed = printed_by(
            "from multiprocessing import resource_tracker as module\n"
            "module.ensure_running()\n"
            "path = f'/proc/{module._resource_tracker._pid}/cmdline'\n"
            "while not (line := open(path).read()):  # it is being executed\n"
            "    pass\n"
            "print(line)\n"
        )
        assert cpython.RESOURCE_TRACKER.decode() in printed


def test_source_lines_of_a_cell_are_shown() -> None:
    filename, lines = "<a notebook's cell>", ["def fail():\n", "    raise ValueError(1)  # here\n"]
    names: dict[str, object] = {}
    exec(compile("".join(lines), filename, "exec"), names)
    fail = names["fail"]
    assert callable(fail)
    with relies_on("Python", "the entries of linecache.cache", "cpython.add_source_lines"):
        cpython.add_source_lines(filename, lines)
        linecache.checkcache()
        try:
            fail()
        except ValueError:
            assert "raise ValueError(1)  # here" in traceback.format_exc()


def test_stacks_are_split_by_thread() -> None:
    ready, ended = threading.Event(), threading.Event()

    def wait_in_a_thread() -> None:
        ready.set()
        ended.wait()

    thread = threading.Thread(target=wait_in_a_thread)
    thread.start()
    ready.wait()
    try:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            dump = file.read()
    finally:
        ended.set()
        thread.join()
    with relies_on("Python", "what faulthandler writes", "cpython.split_stacks"):
        stacks = cpython.split_stacks(dump)
        assert len(stacks) >= 2
        assert sum("in wait_in_a_thread" in stack for stack in stacks) == 1
        assert all(stack.startswith(("Thread", "Current thread")) for stack in stacks)
        assert not any("0x" in stack for stack in stacks)


def warned_in_a_thread() -> list[str]:
    """Issue a warning in another thread, and return those that were shown there and here."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with cpython.future_warning_ignored("a change"):
            thread = threading.Thread(target=warnings.warn, args=("a change there", FutureWarning))
            thread.start()
            thread.join()
            warnings.warn("a change here", FutureWarning, stacklevel=1)
            warnings.warn("another here", FutureWarning, stacklevel=1)
        warnings.warn("a change afterwards", FutureWarning, stacklevel=1)
    return [str(each.message) for each in shown]


def test_a_warning_is_ignored_on_one_thread() -> None:
    before = list(warnings.filters)
    with relies_on("Python", "warnings.filters", "cpython.future_warning_ignored"):
        assert warned_in_a_thread() == ["a change there", "another here", "a change afterwards"]
        assert list(warnings.filters) == before
