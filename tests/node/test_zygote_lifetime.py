"""A zygote serves all runs of its owner, and ends with it; runs go on without it."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from conftest import facts_in
from support.driver_process import driver, read_pids
from support.waiting import alive, assert_gone, marked, until
from support.zygotes import (
    DEADLINE,
    grandparent,
    held_run,
    kill_zygotes,
    local,
    waiting_source,
    zygote_of,
    zygotes,
)

from distributor import TorchDistributor, warm_up
from distributor.launchers.local import cool_down
from distributor.node.process.supervisor import is_supported

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [
    pytest.mark.skipif(not is_supported(), reason="only Linux has warm processes"),
    pytest.mark.usefixtures("modules_folder", "without_torch"),
]


def test_all_runs_of_a_driver_share_a_zygote() -> None:
    one, other = local(2), local(3, env={"OF_THIS_RUN": "1"})
    found = {*one.run_all(grandparent), *other.run_all(grandparent), *one.run_all(grandparent)}
    assert found == {zygote_of()}


def test_runs_at_the_same_time_share_a_zygote(tmp_path: Path) -> None:
    with held_run(tmp_path / "one", 2) as one, held_run(tmp_path / "other", 2) as other:
        assert one.zygote == other.zygote
        assert len(set(one.family + other.family)) == 8
        assert other.release() == one.release() == ["undisturbed"] * 2


def test_each_driver_has_a_zygote_that_ends_with_it(run_driver: Any) -> None:
    done = run_driver("""
        import json, os
        from distributor import TorchDistributor

        distributor = TorchDistributor(2, local_mode=True, use_gpu=False, warm=True)

        def grandparent():
            with open(f"/proc/{os.getppid()}/stat") as stat:
                return int(stat.read().rpartition(")")[2].split()[1])

        zygotes = distributor.run_all(grandparent) + distributor.run_all(grandparent)
        print("FACTS " + json.dumps({"driver": os.getpid(), "zygotes": zygotes}))
    """)
    facts = facts_in(done)
    (zygote,) = set(facts["zygotes"])
    assert zygote not in (facts["driver"], zygote_of())
    assert_gone([zygote])


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


def test_a_zygote_starts_with_the_first_run_or_by_warm_up(run_driver: Any) -> None:
    done = run_driver("""
        import distributor, json, os, time
        from distributor.node.process import zygote

        ranks = distributor.TorchDistributor(2, use_gpu=False)
        time.sleep(0.5)
        made = zygote.is_warm(os.getpid())
        distributor.warm_up(ranks)
        warmed = zygote.is_warm(os.getpid())
        parents = set(ranks.run_all(lambda: os.getppid()))
        print("FACTS " + json.dumps({"made": made, "warmed": warmed, "supervisors": len(parents)}))
    """)
    assert facts_in(done) == {"made": False, "warmed": True, "supervisors": 1}


def test_warm_up_needs_runs_that_are_forked_here() -> None:
    with pytest.raises(ValueError, match="warm is False"):
        warm_up(TorchDistributor(2, use_gpu=False, warm=False))


def test_runs_continue_if_the_zygote_is_killed_and_the_next_run_works(tmp_path: Path) -> None:
    with held_run(tmp_path / "run", 2) as run:
        os.kill(run.zygote, signal.SIGKILL)
        assert_gone([run.zygote])
        assert zygote_of(2) != run.zygote
        assert run.release() == ["undisturbed"] * 2


def test_a_killed_supervisor_ends_only_its_own_ranks(tmp_path: Path) -> None:
    with held_run(tmp_path / "one", 2) as one, held_run(tmp_path / "other") as other:
        os.kill(one.supervisor, signal.SIGKILL)
        assert one.wait_for_death().signal == signal.SIGKILL
        assert_gone(one.family)
        assert other.release() == ["undisturbed"]
        assert zygote_of() == one.zygote


HOLDING_DRIVER = """
    import os

    from distributor import TorchDistributor


    def hang():
        import os, signal

        child = os.fork()
        if child == 0:
            signal.pause()
        print(f"pid {os.getppid()}\\npid {os.getpid()}\\npid {child}")
        signal.pause()


    TorchDistributor(2, local_mode=True, use_gpu=False, warm=True).run(hang)
"""


def test_the_drivers_death_ends_the_zygote_and_its_descendants(tmp_path: Path) -> None:
    with driver(HOLDING_DRIVER, tmp_path) as (process, mark):
        pids = Counter(read_pids(process, 6))
        assert sorted(pids.values()) == [1, 1, 1, 1, 2], "both ranks have the same supervisor"
        assert alive(pids) == list(pids)
        process.kill()
        assert_gone(pids)
        until(lambda: not marked(mark), "processes of the driver are left")


LOADING_DRIVER = """
    import signal, sys

    from distributor import TorchDistributor, warm_up

    sys.path.append(sys.argv[1])
    warm_up(TorchDistributor(local_mode=True, use_gpu=False, preload=["loads_for_ever"]))
    signal.pause()
"""


def test_the_drivers_death_ends_a_zygote_that_is_loading(tmp_path: Path) -> None:
    begun, never = tmp_path / "begun", tmp_path / "never"
    (tmp_path / "loads_for_ever.py").write_text(waiting_source(begun, never))
    with driver(LOADING_DRIVER, tmp_path, str(tmp_path)) as (process, mark):
        until(lambda: begun.exists() and begun.read_text(), "it loads", DEADLINE)
        assert {found.pid for found in marked(mark)} == {process.pid, int(begun.read_text())}
        process.kill()
        until(lambda: not marked(mark), "it is still loading")


def test_ranks_start_fresh_if_the_system_lacks_pidfds(run_driver: Any) -> None:
    done = run_driver("""
        import json, os
        from distributor import TorchDistributor

        del os.pidfd_open
        distributor = TorchDistributor(local_mode=True, use_gpu=False, warm=True)
        parent = distributor.run(os.getppid)
        print("FACTS " + json.dumps({"driver": os.getpid(), "parent": parent}))
    """)
    facts = facts_in(done)
    assert facts["parent"] == facts["driver"]
    assert "lacks pidfd_open (unknown to this Python)" in done.stderr
    assert "no warm process" not in done.stderr, "none was started"


@pytest.mark.parametrize("choice", [None, "0"])
def test_a_variable_applies_if_the_program_does_not_choose(
    monkeypatch: pytest.MonkeyPatch, choice: str | None
) -> None:
    monkeypatch.delenv("DISTRIBUTOR_WARM", raising=False)
    if choice is not None:
        monkeypatch.setenv("DISTRIBUTOR_WARM", choice)
        kill_zygotes()
    whose = TorchDistributor(local_mode=True, use_gpu=False, timeout=120).run(grandparent)
    assert zygotes() == ([] if choice == "0" else [whose])
    assert (whose == os.getpid()) == (choice == "0")
