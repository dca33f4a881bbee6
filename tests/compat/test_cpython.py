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


PROGRAMS = {
    ("weakref.finalize._registry", "disable_exit_finalizers"): (
        "import weakref\n"
        "from distributor._compat.cpython import disable_exit_finalizers\n"
        "class Owner: pass\n"
        "owners = Owner(), Owner()\n"
        "weakref.finalize(owners[0], print, 'before')\n"
        "disable_exit_finalizers()\n"
        "weakref.finalize(owners[1], print, 'after')\n",
        "after\n",
    ),
    ("threading._register_atexit", "before_thread_pools_end"): (
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
        "print('end of the script')\n",
        "end of the script\nfrom a pool\nfrom a thread\n",
    ),
    ("current_process()._config of multiprocessing", "set_multiprocessing_folder"): (
        "from multiprocessing.util import get_temp_dir\n"
        "from distributor._compat.cpython import set_multiprocessing_folder\n"
        "set_multiprocessing_folder('/the/folder')\n"
        "print(get_temp_dir())\n",
        "/the/folder\n",
    ),
    ("the command line of multiprocessing's resource tracker", "RESOURCE_TRACKER"): (
        "from distributor._compat.cpython import RESOURCE_TRACKER\n"
        "from multiprocessing import resource_tracker as module\n"
        "module.ensure_running()\n"
        "path = f'/proc/{module._resource_tracker._pid}/cmdline'\n"
        "while not (line := open(path, 'rb').read()):  # it is being executed\n"
        "    pass\n"
        "print(RESOURCE_TRACKER in line)\n",
        "True\n",
    ),
}
if sys.version_info < (3, 14):  # whose exit handlers exist until all have run
    PROGRAMS["atexit._clear", "forget_exit_handlers"] = (
        "import atexit, os\n"
        "from distributor._compat.cpython import forget_exit_handlers\n"
        "class Owner:\n"
        "    def __del__(self): print('released', flush=True)\n"
        "def leave():\n"
        "    forget_exit_handlers()\n"
        "    os._exit(0)\n"
        "atexit.register(leave)\n"
        "atexit.register(lambda owner: print('called'), Owner())\n",
        "called\nreleased\n",
    )


@needs_late_threads
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
@pytest.mark.parametrize(("what", "user"), PROGRAMS)
def test_a_program_prints_what_is_expected(what: str, user: str) -> None:
    program, expected = PROGRAMS[what, user]
    with relies_on("Python", what, f"cpython.{user}"):
        assert printed_by(program) == expected


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
    ready, done = threading.Event(), threading.Event()

    def wait_in_a_thread() -> None:
        ready.set()
        done.wait(60)

    thread = threading.Thread(target=wait_in_a_thread)
    thread.start()
    ready.wait()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        dump = file.read()
    done.set()
    thread.join()
    with relies_on("Python", "what faulthandler writes", "cpython.split_stacks"):
        stacks = cpython.split_stacks(dump)
        assert len(stacks) >= 2
        assert sum("in wait_in_a_thread" in stack for stack in stacks) == 1
        assert all(stack.startswith(("Thread", "Current thread")) for stack in stacks)
        assert not any("0x" in stack for stack in stacks)


def test_a_warning_is_ignored_on_one_thread() -> None:
    before = list(warnings.filters)
    with relies_on("Python", "warnings.filters", "cpython.future_warning_ignored"):
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            with cpython.future_warning_ignored("a change"):
                arguments = "a change there", FutureWarning
                thread = threading.Thread(target=warnings.warn, args=arguments)
                thread.start()
                thread.join()
                warnings.warn("a change here", FutureWarning, stacklevel=1)
            warnings.warn("a change afterwards", FutureWarning, stacklevel=1)
        assert [str(each.message) for each in shown] == ["a change there", "a change afterwards"]
        assert list(warnings.filters) == before
