"""Tasks of an ordinary job that exchange texts through the driver."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support.ports import free_port
from support.waiting import until

from distributor.diagnosis.exchange import Exchange
from distributor.diagnosis.network import ProbeServer
from distributor.diagnosis.peers import DriverPeers

TOKEN = b"0123456789abcdef"
SECONDS = 20.0


@pytest.fixture
def exchange() -> Exchange:
    return Exchange(3)


@pytest.fixture
def server(exchange: Exchange) -> Iterator[ProbeServer]:
    with ProbeServer("127.0.0.1", TOKEN, exchange=exchange) as server:
        yield server


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def peers(
    server: ProbeServer, task: int, executor: str, seconds: float = SECONDS, token: bytes = TOKEN
) -> DriverPeers:
    return DriverPeers(server.address, token, task, executor, seconds)


def results(futures: list[Future[DriverPeers]]) -> list[DriverPeers]:
    return [future.result(SECONDS) for future in futures]


def test_all_tasks_come(server: ProbeServer, pool: ThreadPoolExecutor) -> None:
    hosts = ["one:0", "two:1", "one:0"]
    found = results([pool.submit(peers, server, *each) for each in enumerate(hosts)])

    assert [each.placement.executors for each in found] == [hosts] * 3
    assert [each.placement.own for each in found] == [0, 1, 2]
    assert found[2].placement.tasks_of_executor == 2
    gathered = [pool.submit(each.gather, text) for each, text in zip(found, "abc", strict=True)]
    assert [each.result(SECONDS) for each in gathered] == [["a", "b", "c"]] * 3


def test_a_task_that_comes_too_late(server: ProbeServer, pool: ThreadPoolExecutor) -> None:
    others = results([pool.submit(peers, server, task, "one:0", 0.5) for task in (0, 2)])

    assert [each.placement.executors for each in others] == [["one:0", "one:0"]] * 2
    assert [each.placement.own for each in others] == [0, 1]
    with pytest.raises(LookupError, match="task 1"):
        peers(server, 1, "two:1")
    gathered = [pool.submit(each.gather, "text") for each in others]
    assert [each.result(SECONDS) for each in gathered] == [["text", "text"]] * 2


def test_a_task_that_runs_twice(
    exchange: Exchange, server: ProbeServer, pool: ThreadPoolExecutor
) -> None:
    def has_come(executor: str) -> bool:
        return 0 in exchange._rounds and exchange._rounds[0].texts.get(1) == executor

    lost = pool.submit(peers, server, 1, "lost:1")
    until(lambda: has_come("lost:1"), "the task has come", SECONDS)
    second = pool.submit(peers, server, 1, "host:1")
    until(lambda: has_come("host:1"), "it has come again, before the others", SECONDS)
    found = results([second, *(pool.submit(peers, server, n, f"host:{n}") for n in (0, 2))])
    again = peers(server, 1, "third:9")

    for each in (*found, lost.result(SECONDS), again):
        assert each.placement.executors == ["host:0", "host:1", "host:2"]


@pytest.mark.parametrize("token", [TOKEN, b"another-token-16"])
def test_a_driver_that_does_not_answer(server: ProbeServer, token: bytes) -> None:
    address = ("127.0.0.1", free_port()) if token == TOKEN else server.address
    found = DriverPeers(address, token, 1, "host:7", SECONDS)

    assert found.error
    assert found.placement.executors == ["host:7"]
    assert found.gather("text") == [""], "nothing is waited for"
