"""``start_timeout`` holds, and nothing is left, while a process that starts ranks hangs."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
from support.driver_process import driver
from support.waiting import assert_gone, marked, until
from support.zygotes import DEADLINE, WriteModule, local

from distributor import StartTimeout
from distributor.node.process.supervisor import is_supported

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [
    pytest.mark.skipif(not is_supported(), reason="only Linux has warm processes"),
    pytest.mark.usefixtures("modules_folder", "without_torch"),
]

SOURCE = """
import os, pathlib, time

folder = pathlib.Path({folder!r})
generation = 0  # of the zygote; 1 of supervisors, 2 of ranks

def begin():
    global generation
    generation += 1

def hang(place):
    if (folder / f"{{place}} {{generation}}").exists():
        (folder / "hung").write_text(str(os.getpid()))
        while True:
            time.sleep(0.05)

os.register_at_fork(
    before=lambda: hang("before"),
    after_in_parent=lambda: hang("parent"),
    after_in_child=lambda: (begin(), hang("child")),
)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("child 1", "has forked a process that hangs"),
        ("child 2", "After start_timeout, still starting: ranks 0 to 1 on "),
        ("before 0", "does not answer: it is still importing, or hangs"),
    ],
)
def test_the_start_of_ranks_that_hangs_in_a_fork_ends_at_start_timeout(
    tmp_path: Path, write_module: WriteModule, place: str, said: str
) -> None:
    name = write_module(SOURCE.format(folder=str(tmp_path)))
    supervisor, rank = local(2, preload=[name]).run(lambda: (os.getppid(), os.getpid()))
    assert supervisor != os.getpid()
    (tmp_path / place).touch()
    began = time.monotonic()
    with pytest.raises(StartTimeout, match="start_timeout") as caught:
        # Long enough for what does not hang: the zygote of a busy machine may take seconds.
        local(2, preload=[name], start_timeout=6).run(os.getpid)
    assert time.monotonic() < began + 15
    assert said in str(caught.value)
    hung = int((tmp_path / "hung").read_text())
    assert hung not in (supervisor, rank)
    if place == "before 0":
        os.kill(hung, signal.SIGKILL)  # the zygote, which other runs may still be waiting for
    assert_gone([hung])


def test_the_start_of_ranks_that_hangs_in_a_fork_can_be_cancelled(
    tmp_path: Path, write_module: WriteModule
) -> None:
    (tmp_path / "before 1").touch()
    hung = tmp_path / "hung"
    run = local(2, preload=[write_module(SOURCE.format(folder=str(tmp_path)))]).submit(os.getpid)
    until(lambda: hung.exists() and hung.read_text(), "it hangs", DEADLINE)
    assert run.cancel()
    assert_gone([int(hung.read_text())])


HANGING_DRIVER = """
    import sys

    from distributor import TorchDistributor

    sys.path.append(sys.argv[1])
    TorchDistributor(2, use_gpu=False, warm=True, preload=["hangs"]).run(int)
"""


@pytest.mark.slow  # supervisors have 20 s to end by themselves
def test_a_supervisor_that_hangs_in_a_fork_ends_with_the_driver(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(SOURCE.format(folder=str(tmp_path)))
    (tmp_path / "child 1").touch()
    with driver(HANGING_DRIVER, tmp_path, str(tmp_path)) as (process, mark):
        until((tmp_path / "hung").exists, "it hangs", DEADLINE)
        process.kill()
        until(lambda: not marked(mark), "the supervisor is left", 40)
