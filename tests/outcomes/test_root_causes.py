"""The root cause of a failed run is raised and shown with its source, over both launchers."""

from __future__ import annotations

import linecache
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from conftest import cluster_is_slow
from support.ranks import (
    Distribute,
    failures_of,
    my_rank,
    wait_until,
)

from distributor import (
    WorkerDied,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@cluster_is_slow
def test_functions_of_a_notebook_show_their_source(
    distribute: Distribute, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = {
        "<ipython-input-1>": "def scale(by):\n    return 1 / (by - by)  # deep in the notebook\n",
        "/tmp/ipykernel_0/1.py": textwrap.dedent(
            """
            import inspect
            def train(by):
                try:
                    return scale(by)  # in the cell
                except ZeroDivisionError as error:
                    raise ValueError(inspect.getsource(train), inspect.getsource(scale)) from error
            """
        ),
    }
    names: dict[str, Any] = {"__name__": "__main__"}
    for filename, source in cells.items():
        entry = (len(source), None, source.splitlines(keepends=True), filename)
        monkeypatch.setitem(linecache.cache, filename, entry)
        exec(compile(source, filename, "exec"), names)

    with pytest.raises(ValueError, match="def train") as caught:
        distribute(1).run(names["train"], 3)

    first, second = cells.values()
    assert caught.value.args == (second.partition("import inspect\n")[2], first)
    shown = str(caught.value.__cause__)
    for line in ("1 / (by - by)  # deep in the notebook", "return scale(by)  # in the cell"):
        assert line in shown
    for filename in cells:
        assert f'File "{filename}", line ' in shown


@pytest.mark.parametrize(
    ("distribute", "blocked_in", "how", "culprit"),
    [
        ("local", "all_reduce", "raise", 1),
        ("local", "rendezvous", "raise", 0),
        pytest.param("cluster", "barrier", "kill", 1, marks=pytest.mark.spark),
    ],
    indirect=["distribute"],
)
def test_root_cause_is_raised_and_not_the_error_of_a_blocked_peer(
    distribute: Distribute, tmp_path: Path, blocked_in: str, how: str, culprit: int
) -> None:
    def program() -> None:
        import torch
        import torch.distributed as dist

        if blocked_in != "rendezvous":
            dist.init_process_group("gloo")
            dist.all_reduce(torch.ones(1))  # all ranks are connected
        if my_rank() == culprit:
            wait_until((tmp_path / "blocked").exists, "the peer waits for this rank")
            if how == "raise":
                raise LookupError("the cause")
            os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / "blocked").touch()
        if blocked_in == "rendezvous":
            dist.init_process_group("gloo")
        elif blocked_in == "barrier":
            dist.barrier()
        else:
            dist.all_reduce(torch.ones(1))
        raise AssertionError("a collective ended without its peer")

    with pytest.raises(LookupError if how == "raise" else WorkerDied) as caught:
        distribute(2).run(program)

    failures = failures_of(caught.value)
    assert next(iter(failures)) == culprit
    assert {rank: failure.collateral for rank, failure in failures.items()} in (
        {culprit: False},
        {culprit: False, 1 - culprit: True},
    )
    assert all("AssertionError" not in failure.text for failure in failures.values())
