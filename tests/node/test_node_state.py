"""A node: its states, its deadline, what it cannot start, and ranks that do not end."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from distributor.errors import DistributorError, StartTimeout
from distributor.node.agent import agent
from distributor.node.agent.worker_handle import start_worker
from distributor.node.node import Node, NodeEvent, NodeState
from distributor.node.process.specs import NodeShare
from distributor.node.process.supervisor import Interpreter, StartLimit, start_supervisor
from distributor.run_spec import Settings
from distributor.settings import rank_settings

SUCCESS = (
    NodeEvent.CONNECTED,
    NodeEvent.ENVIRONMENT_READY,
    NodeEvent.RENDEZVOUS_KNOWN,
    NodeEvent.WORK_DONE,
    NodeEvent.RANKS_ENDED,
    NodeEvent.VALUES_DELIVERED,
)
STATES = (
    NodeState.STARTING,
    NodeState.PREPARING,
    NodeState.RENDEZVOUS,
    NodeState.RUNNING,
    NodeState.SERVING,
    NodeState.DELIVERING,
    NodeState.DONE,
)
SETTINGS = rank_settings(Settings(warm=False))
SHARE = NodeShare(run_id="run", host="here", ranks_per_node=1, secret=bytes(32), settings=SETTINGS)


def after(num_events: int) -> Node:
    """Return a node after so many events of a successful run."""
    node = Node(SHARE)
    node.link = Mock(lost=False)
    for event in SUCCESS[:num_events]:
        assert node.fire(event)
    return node


def test_a_successful_node_passes_through_all_states() -> None:
    assert tuple(after(count).state for count in range(len(STATES))) == STATES


@pytest.mark.parametrize(
    ("event", "state"),
    [
        (NodeEvent.STOP_RECEIVED, NodeState.STOPPED),
        (NodeEvent.DRIVER_LOST, NodeState.LOST_DRIVER),
    ],
)
def test_the_driver_ends_a_node_until_its_ranks_have_ended(
    event: NodeEvent, state: NodeState
) -> None:
    for num_events, before in enumerate(STATES):
        node = after(num_events)
        has_ended = num_events >= STATES.index(NodeState.DELIVERING)
        assert node.fire(event) == (not has_ended)
        assert node.is_stopped == (not has_ended)
        assert node.state is (before if has_ended else state)


def test_an_exception_fails_a_node_that_is_not_done() -> None:
    for num_events, before in enumerate(STATES):
        node = after(num_events)
        node.fire(NodeEvent.ERROR_RAISED)
        is_done = before is NodeState.DONE
        assert node.state is (NodeState.DONE if is_done else NodeState.FAILED)


@pytest.mark.parametrize("event", [NodeEvent.RANK_FAILED, NodeEvent.STOP_RECEIVED])
def test_a_node_whose_run_has_failed_delivers_nothing(event: NodeEvent) -> None:
    node = after(STATES.index(NodeState.RUNNING))
    assert node.fire(event)
    for late_event in (NodeEvent.WORK_DONE, NodeEvent.RANKS_ENDED, NodeEvent.VALUES_DELIVERED):
        assert not node.fire(late_event)
    assert node.state in (NodeState.FAILED, NodeState.STOPPED)


def test_what_a_node_prepares_is_part_of_start_timeout() -> None:
    node = Node(replace(SHARE, settings=rank_settings(Settings(start_timeout=2.0))))
    prepared = SimpleNamespace(software={}, warnings=())
    time.sleep(1.9)
    began = time.monotonic()
    with pytest.raises(StartTimeout, match="did not come up within start_timeout"):
        node.join(prepared, None)  # type: ignore[arg-type]
    assert time.monotonic() < began + 1.0


def test_a_rank_that_cannot_be_started_leaves_no_descriptor() -> None:
    spawner = Mock(start=Mock(side_effect=OSError("no further process")))
    with tempfile.TemporaryFile() as program:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match="no further process") as error:
            start_worker(SHARE, 0, program, spawner, on_exit=lambda: None)
        assert os.listdir("/proc/self/fd") == before, "although the error is kept"
        assert error.traceback


def test_a_supervisor_that_cannot_be_started_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(DistributorError, match="could not be started as the supervisor") as error:
        start_supervisor(Interpreter(executable="/bin/true", path=()), StartLimit())
    assert os.listdir("/proc/self/fd") == before, "although the error is kept"
    assert error.traceback


def test_the_stacks_of_lingering_ranks_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take seconds, in which the agent does nothing else."""
    dump = Mock(return_value=dict.fromkeys(range(3), ""))
    monkeypatch.setattr(agent, "dump_stacks", dump)
    late = {"running": True, "has_lingering_warning": False, "released_at": time.monotonic() - 60}
    workers: list[Any] = [Mock(origin=Mock(rank=rank), **late) for rank in range(3)]
    agent.limit_lingering(workers, Mock())
    [call] = dump.call_args_list
    assert [*call.args[0]] == [0, 1, 2]
