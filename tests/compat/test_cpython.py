"""Canaries for what `distributor._compat.cpython` uses of Python and no other test would notice."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from multiprocessing.process import current_process
from multiprocessing.util import get_temp_dir
from typing import Any

import pytest
from support.canary import relies_on

from distributor._compat import cpython

pytestmark = pytest.mark.repository


def test_multiprocessing_uses_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    process: Any = current_process()
    what, user = (
        "current_process()._config of multiprocessing",
        "cpython.set_multiprocessing_folder",
    )
    with relies_on("Python", what, user):
        monkeypatch.setattr(process, "_config", dict(process._config))
        cpython.set_multiprocessing_folder("/the/folder")
        assert get_temp_dir() == "/the/folder"


FINALIZERS = """
import weakref
from distributor._compat.cpython import disable_exit_finalizers

class Owner: pass

owners = Owner(), Owner()
weakref.finalize(owners[0], print, "before")
disable_exit_finalizers()
weakref.finalize(owners[1], print, "after")
"""


def test_finalizers_are_disabled() -> None:
    with relies_on("Python", "weakref.finalize._registry", "cpython.disable_exit_finalizers"):
        printed = subprocess.check_output([sys.executable, "-c", FINALIZERS], text=True)
        assert printed == "after\n"


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
