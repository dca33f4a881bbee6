"""Authenticated peers that come and go at random, while others stay connected."""

from __future__ import annotations

import collections
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from support.hubs import RESET, SECRET, SOON, frames, greeted, link, read_until_closed, wait_until

from distributor.wire import hub as hub_module
from distributor.wire import protocol
from distributor.wire.hub import LOST, Hub

VISITORS = 150
RESIDENTS = 4


class Plan(NamedTuple):
    """A visitor's messages, how many bytes of its stream it sends, and whether it then resets."""

    messages: list[object]
    bytes_sent: int
    resets: bool

    def is_authenticated(self) -> bool:
        return self.bytes_sent >= protocol.HELLO.size

    def complete_messages(self) -> list[object]:
        """Return the messages that are sent completely."""
        left = self.bytes_sent - protocol.HELLO.size
        complete = []
        for message in self.messages:
            left -= frame_size(message)
            if left >= 0:
                complete.append(message)
        return complete


def frame_size(message: object) -> int:
    return sum(map(len, protocol.encode(message))) + protocol.TAG_SIZE


def random_plan(chance: random.Random) -> Plan:
    messages = random_messages(chance, chance.randrange(20))
    size = protocol.HELLO.size + sum(map(frame_size, messages))
    # One in four leaves before it is authenticated.
    limit = chance.choice([protocol.HELLO.size - 1, size, size, size])
    return Plan(messages, chance.randint(0, limit), chance.random() < 0.5)


def random_messages(chance: random.Random, number: int) -> list[object]:
    return [(n, chance.randbytes(chance.choice([0, 10, 1000, 20_000]))) for n in range(number)]


def visit(hub: Hub, node: int, plan: Plan, chance: random.Random) -> Iterator[None]:
    """Send a plan's bytes in chunks of random sizes, and leave; each ``yield`` ends a turn.

    A visitor reads its welcome before a reset; otherwise the hub might never see its hello.
    """
    sock, greeting = greeted(hub.port)
    with sock:
        nonce = chance.randbytes(protocol.NONCE_SIZE)
        hello = protocol.hello(SECRET, greeting, nonce, node)
        left = (hello + b"".join(frames(greeting, plan.messages, nonce)))[: plan.bytes_sent]
        while left:
            yield
            size = chance.choice([1, 10, 100, 10_000, 100_000])
            sock.sendall(left[:size])
            left = left[size:]
        if plan.resets:
            if plan.is_authenticated():
                sock.recv(protocol.WELCOME.size, socket.MSG_WAITALL)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        else:
            sock.shutdown(socket.SHUT_WR)
            yield
            read_until_closed(sock)


def reside(hub: Hub, node: int, sent: list[object], received: list[object]) -> Iterator[None]:
    """Keep a link open for longer than the visitors: it takes one turn per message."""
    with link(hub.port, node, received.append) as resident:
        for message in sent:
            yield
            resident.send(message)


def interleave(hub: Hub, turns: list[Iterator[None]], chance: random.Random) -> None:
    """Let them take turns at random; the hub broadcasts the number of each turn."""
    number = 0
    while turns:
        turn = chance.choice(turns)
        try:
            next(turn)
        except StopIteration:
            turns.remove(turn)
        hub.broadcast(number)
        number += 1


def collect(hub: Hub, nodes: set[int]) -> dict[int, list[object]]:
    """Return the messages of each node, once all of these nodes are lost."""
    received: dict[int, list[object]] = collections.defaultdict(list)
    while nodes:
        event = hub.get(SOON)
        assert event, f"no message from {nodes}"
        node, message = event
        received[node].append(message)
        if message is LOST:
            nodes = nodes - {node}
    return received


def assert_as_planned(plans: dict[int, Plan], received: dict[int, list[object]]) -> None:
    """Check that the planned messages and one `LOST` arrived; a reset may lose the last ones."""
    for node, plan in plans.items():
        if not plan.is_authenticated():
            assert node not in received
            continue
        *arrived, last = received[node]
        assert last is LOST
        expected = plan.complete_messages()
        assert arrived == (expected[: len(arrived)] if plan.resets else expected)


@pytest.mark.parametrize("seed", range(8))
def test_visitors_do_not_affect_residents(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_WAITING", 8 * 2**10)  # constant backpressure
    chance = random.Random(seed)
    plans = {node: random_plan(chance) for node in range(RESIDENTS, RESIDENTS + VISITORS)}
    resident_messages = [random_messages(chance, 300) for _ in range(RESIDENTS)]
    broadcasts: list[list[object]] = [[] for _ in range(RESIDENTS)]
    with Hub("127.0.0.1", SECRET) as hub, ThreadPoolExecutor(1) as pool:
        authenticated = {node for node, plan in plans.items() if plan.is_authenticated()}
        collected = pool.submit(collect, hub, authenticated | {*range(RESIDENTS)})
        visits = [visit(hub, node, plan, chance) for node, plan in plans.items()]
        stays = [
            reside(hub, node, resident_messages[node], broadcasts[node])
            for node in range(RESIDENTS)
        ]
        interleave(hub, [*visits, *stays], chance)
        received = collected.result(SOON)
        wait_until(lambda: not hub.nodes())
        assert hub.get(0) is None
    assert received.keys() <= {*range(RESIDENTS), *plans}
    assert_as_planned(plans, received)
    for node in range(RESIDENTS):
        assert received[node] == [*resident_messages[node], LOST]
        numbers = [number for number in broadcasts[node] if isinstance(number, int)]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
