"""A zygote serves all runs of its owner, and ends with it; runs go on without it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from conftest import facts_in
from support.waiting import SOON, alive, assert_gone
from support.zygotes import (
    grandparent,
    held_run,
    kill_zygotes,
    zygote_of,
    zygotes,
)

from distributor import TorchDistributor, WorkerDied
from distributor.launchers.local import cool_down
from distributor.node.process.supervisor import is_supported

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [
    pytest.mark.skipif(not is_supported(), reason="only Linux has warm processes"),
    pytest.mark.usefixtures("modules_folder", "without_torch"),
]


def test_each_driver_has_a_zygote_that_ends_with_it(run_driver: Any) -> None:
    done = run_driver("""
        import json, os
        from distributor import TorchDistributor, warm_up
        from distributor.node.process import zygote

        def grandparent():
            with open(f"/proc/{os.getppid()}/stat") as stat:
                return int(stat.read().rpartition(")")[2].split()[1])

        ranks = TorchDistributor(2, local_mode=True, use_gpu=False, warm=True)
        found = {"driver": os.getpid(), "warm": [zygote.is_warm(os.getpid())]}
        warm_up(ranks)
        found["warm"].append(zygote.is_warm(os.getpid()))
        found["zygotes"] = ranks.run_all(grandparent) + ranks.run_all(grandparent)
        print("FACTS " + json.dumps(found))
    """)
    facts = facts_in(done)
    (zygote,) = set(facts["zygotes"])
    assert zygote not in (facts["driver"], zygote_of())
    assert_gone([zygote])
    assert facts["warm"] == [False, True], "it starts with warm_up or the first run"


def test_cool_down_ends_the_zygote_but_not_its_runs(tmp_path: Path) -> None:
    with held_run(tmp_path / "run", 2) as run:
        cool_down()
        assert_gone([run.zygote])
        second = zygote_of()
        assert alive([run.supervisor, *run.family]) == [run.supervisor, *run.family]
        assert run.release() == ["undisturbed"] * 2
    assert_gone([run.supervisor])
    assert alive([second]) == [second]
    cool_down()
    assert_gone([second])


def test_runs_continue_if_the_zygote_is_killed_and_the_next_run_works(tmp_path: Path) -> None:
    with held_run(tmp_path / "run", 2) as run:
        os.kill(run.zygote, signal.SIGKILL)
        assert_gone([run.zygote])
        assert zygote_of(2) != run.zygote
        assert run.release() == ["undisturbed"] * 2


def test_a_killed_supervisor_ends_only_its_own_ranks(tmp_path: Path) -> None:
    with held_run(tmp_path / "one", 2) as one, held_run(tmp_path / "other") as other:
        os.kill(one.supervisor, signal.SIGKILL)
        died = one.values.exception(SOON)
        assert isinstance(died, WorkerDied)
        assert died.signal == signal.SIGKILL
        assert_gone(one.family)
        assert other.release() == ["undisturbed"]
        assert zygote_of() == one.zygote


def test_the_variable_for_fresh_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRIBUTOR_WARM", "0")
    kill_zygotes()
    ranks = TorchDistributor(local_mode=True, use_gpu=False, timeout=120)
    assert ranks.run(grandparent) == os.getpid()
    assert zygotes() == []
