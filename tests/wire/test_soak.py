"""The hub besieged: recordings played back, ten thousand strangers, peers that come and go."""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import random
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import psutil
import pytest
from test_hub import MIB, SECRET, SOON, Call, link, until

from distributor.wire import hub as hub_module
from distributor.wire import listener, protocol
from distributor.wire.hub import LOST, Hub
from distributor.wire.messages import Heartbeat

STRANGERS = 10_000
RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER that makes close() cut the connection


def stranger(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), SOON)


def greeted(port: int) -> tuple[socket.socket, bytes]:
    sock = stranger(port)
    return sock, sock.recv(protocol.GREETING.size, socket.MSG_WAITALL)


def hung_up(sock: socket.socket) -> bytes:
    """Return what the hub says until it hangs up; it has to do so soon."""
    said, deadline = bytearray(), time.monotonic() + SOON
    with sock, contextlib.suppress(ConnectionError):
        while data := sock.recv(65536):
            said += data
            assert time.monotonic() < deadline
    return bytes(said)


BOMB: Final = b"cos\nmkdir\n(Vunpickled\ntR."
"""Leaves a mark in the working directory of who unpickles it; short enough for a hello."""
BOMBS: Final = (protocol.HEADER.pack(len(BOMB)) + BOMB) * 100


# Recordings.


class Recording(NamedTuple):
    """What the two sides of one connection said."""

    link: bytearray
    hub: bytearray


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub("127.0.0.1", SECRET) as hub:
        yield hub


def copy(source: socket.socket, sink: socket.socket, record: bytearray) -> None:
    source.settimeout(SOON)
    while data := source.recv(65536):
        record += data
        sink.sendall(data)
    sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def tapped(port: int) -> Iterator[tuple[int, Recording]]:
    """Give the port of a proxy before the hub, for one link, and what is recorded there."""
    tape = Recording(bytearray(), bytearray())

    def relay() -> None:
        with listener.accept()[0] as near, stranger(port) as far:
            answers = pool.submit(copy, far, near, tape.hub)
            copy(near, far, tape.link)
            answers.result(SOON)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as pool:
        listener.settimeout(SOON)
        relaying = pool.submit(relay)
        yield listener.getsockname()[1], tape
        relaying.result(SOON)


def record(hub: Hub, node: int, said: list[object], heard: list[object]) -> Recording:
    """Record a link from its first byte to its last; the hub hears ``heard``."""
    with tapped(hub.port) as (port, tape), link(port, node) as genuine:
        for message in said:
            genuine.send(message)
        assert [hub.get(SOON) for _ in heard] == [(node, message) for message in heard]
    assert hub.get(SOON) == (node, LOST)
    return tape


def assert_refused(hub: Hub, replay: bytes | bytearray) -> None:
    sock, greeting = greeted(hub.port)
    assert greeting.startswith(protocol.MAGIC)
    sock.sendall(replay)
    assert hung_up(sock) == b""
    assert hub.get(0) is None  # what it could have said would be there before the hub hangs up
    assert hub.nodes() == set()


def test_what_was_recorded_of_a_link_opens_no_other(hub: Hub, tmp_path: pathlib.Path) -> None:
    mark = tmp_path / "mark"
    said = ["first", Call(os.mkdir, str(mark)), "x" * 1000]
    tape = record(hub, 5, said, ["first", None, "x" * 1000])
    hello, first_frames = tape.link[: protocol.HELLO.size], tape.link[protocol.HELLO.size :]
    assert first_frames == b"".join(map(protocol.encode, said))
    mark.rmdir()  # that it was made shows that what follows could make it again

    for replay in (tape.link, hello, first_frames, tape.hub, hello + hello + first_frames):
        assert_refused(hub, replay)

    assert not mark.exists()
    assert record(hub, 5, ["mine"], ["mine"]).link[: protocol.HELLO.size] != hello


def test_what_was_recorded_of_a_hub_deceives_no_link(hub: Hub) -> None:
    tape = record(hub, 5, ["first"], ["first"])
    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as pool:
        impostor.settimeout(SOON)
        deceived = pool.submit(link, impostor.getsockname()[1], 5)
        with impostor.accept()[0] as sock:
            sock.sendall(tape.hub)
            with pytest.raises(protocol.HandshakeRefused, match="does not hold"):
                deceived.result(SOON)


# Strangers. Their hub has a process of its own, so that its memory and descriptors are its alone.

DRIVER = f"""
import logging, os, resource, sys
from distributor.wire import hub as hub_module, peer, protocol
from distributor.wire.messages import Heartbeat

logging.basicConfig(level=logging.INFO)  # whatever is logged is printed
peer.HANDSHAKE_SECONDS = float(sys.argv[1])
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), hard))
genuine_decode, unpickled = protocol.decode, 0

def decode(payload):
    global unpickled
    message = genuine_decode(payload)
    unpickled += not isinstance(message, Heartbeat)
    return message

protocol.decode = decode
with hub_module.Hub("127.0.0.1", {SECRET!r}) as hub:
    with open(int(sys.argv[3]), "w") as pipe:
        pipe.write(str(hub.port))
    while (event := hub.get(60)) and event != (0, hub_module.LOST):
        open(os.devnull).close()  # for a driver has other things to do
        hub.send(event[0], (unpickled, event[1]))
"""


class Driver(NamedTuple):
    """The process of a hub, and how many threads and descriptors it has while nobody is linked."""

    port: int
    process: psutil.Process
    threads: int
    files: int

    def memory(self) -> int:
        size: int = self.process.memory_info().rss
        return size

    def connections(self) -> int:
        number: int = self.process.num_fds()
        return number - self.files

    def assert_serves_none_but(self, links: int) -> None:
        """See what strangers took given back; the driver itself opens a file now and then."""
        until(lambda: self.connections() == links)
        assert self.process.num_threads() == self.threads


@contextlib.contextmanager
def driver(folder: pathlib.Path, *, handshake: float, descriptors: int) -> Iterator[Driver]:
    """Run a hub that answers node 0 until that goes; it must do so without printing anything."""
    reading, writing = os.pipe()
    settings = [str(handshake), str(descriptors), str(writing)]
    with (folder / "printed").open("w+") as printed, open(reading) as pipe:
        process = subprocess.Popen(
            [sys.executable, "-W", "always::ResourceWarning", "-c", DRIVER, *settings],
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd=folder,
            pass_fds=[writing],
        )
        os.close(writing)
        with process:
            try:
                port, seen = int(pipe.read()), psutil.Process(process.pid)
                yield Driver(port, seen, seen.num_threads(), seen.num_fds())
                assert process.wait(SOON) == 0
            finally:
                process.kill()
                printed.seek(0)
                print(said := printed.read(2000))  # which pytest shows where the test fails
    assert said == ""


@contextlib.contextmanager
def descriptors(wanted: int) -> Iterator[None]:
    """Let this process have so many descriptors, or skip the test where the system does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"{wanted} descriptors are needed, and `ulimit -Hn` is {hard}")
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Exchange:
    """A genuine link that sends a message for each answer, and checks that answer.

    It tells how many messages the hub's process has unpickled by then: one more each time, unless
    messages come in another order, or that process has unpickled what a stranger sent.
    """

    AT_ONCE = 8

    def __init__(self, port: int) -> None:
        self.said = self.heard = 0
        self._wrong: list[object] = []
        self._enough = False
        self._lock = threading.Lock()
        self._link = link(port, on_message=self._hear)
        with self._lock:
            for _ in range(self.AT_ONCE):
                self._say()

    def goes_on(self) -> None:
        """Wait until what is said from now on has been answered."""
        before = self.heard
        until(lambda: self.heard > before + self.AT_ONCE or self._link.lost)
        assert not self._link.lost

    def end(self) -> None:
        """Wait for the last answers, all of which must have been right."""
        self._enough = True
        until(lambda: self.heard == self.said or self._link.lost)
        assert not self._link.lost
        assert self._wrong == []

    def close(self) -> None:
        self._link.close()

    def _say(self) -> None:
        self._link.send(self._message(self.said))
        self.said += 1

    def _hear(self, answer: object) -> None:
        if isinstance(answer, Heartbeat):
            return
        with self._lock:
            if answer != (self.heard + 1, self._message(self.heard)):
                self._wrong.append(answer)
            self.heard += 1
            if not self._enough:
                self._say()

    @staticmethod
    def _message(number: int) -> object:
        return number, b"x" * (number * 997 % 10_000)


@contextlib.contextmanager
def genuine(port: int) -> Iterator[Exchange]:
    with contextlib.closing(Exchange(port)) as exchange:
        yield exchange
        exchange.end()


def vanishes(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    sock.close()


def is_silent(sock: socket.socket) -> None:
    pass


def has_a_wrong_secret(sock: socket.socket) -> None:
    greeting = sock.recv(protocol.GREETING.size, socket.MSG_WAITALL)
    sock.sendall(protocol.hello(b"another secret", greeting, bytes(32), 0) + BOMBS)


def talks_garbage(sock: socket.socket) -> None:
    sock.sendall(BOMB.ljust(protocol.HELLO.size) + BOMBS)


def has_half_a_hello(sock: socket.socket) -> None:
    greeting = sock.recv(protocol.GREETING.size, socket.MSG_WAITALL)
    sock.sendall(protocol.hello(SECRET, greeting, bytes(32), 1)[:-1])


def goes_after_half_a_hello(sock: socket.socket) -> None:
    has_half_a_hello(sock)
    sock.shutdown(socket.SHUT_WR)


def sends_frames_at_once(sock: socket.socket) -> None:
    sock.sendall(BOMBS)


def announces_too_much(sock: socket.socket) -> None:
    sock.sendall(b"\xff" * protocol.HEADER.size)


def announces_and_sends_too_much(sock: socket.socket) -> None:
    sock.sendall(b"\xff" * protocol.HEADER.size + BOMB + BOMBS)


KINDS: Final = [
    vanishes,
    is_silent,
    has_a_wrong_secret,
    talks_garbage,
    sends_frames_at_once,
    has_half_a_hello,
    goes_after_half_a_hello,
    announces_too_much,
    announces_and_sends_too_much,
]
WAVES = 10


def wave(port: int, size: int) -> None:
    """Let strangers of all kinds connect; all are hung up on, and told nothing but the greeting."""
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(stranger(port)) for _ in range(size)]
        for number, sock in enumerate(strangers):
            with contextlib.suppress(ConnectionError):  # the hub does not hear all of it
                KINDS[number % len(KINDS)](sock)
        for sock in strangers:
            if sock.fileno() != -1:
                assert len(hung_up(sock)) <= protocol.GREETING.size


@pytest.mark.slow
def test_ten_thousand_strangers_of_all_kinds_change_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = STRANGERS // WAVES
    with (
        descriptors(4 * size),
        driver(tmp_path, handshake=2.0, descriptors=4 * size) as hub,
        genuine(hub.port) as exchange,
    ):
        for _ in range(2):  # from which the hub's process keeps memory to use it again
            wave(hub.port, size)
        hub.assert_serves_none_but(links=1)
        before = hub.memory()
        for _ in range(WAVES - 2):
            wave(hub.port, size)
            exchange.goes_on()
        hub.assert_serves_none_but(links=1)
        # It grows by 3 to 5 MiB, however many more come; when it kept closed connections, by 14.
        assert hub.memory() - before < 8 * MIB
    assert os.listdir(tmp_path) == ["printed"]
    monkeypatch.chdir(tmp_path)
    protocol.decode(BOMB)
    assert sorted(os.listdir(tmp_path)) == ["printed", "unpickled"]  # so it would have shown


def is_held(sock: socket.socket) -> bool:
    """Tell whether the hub has not hung up yet, be it that the connection waits to be accepted."""
    sock.setblocking(False)
    try:
        while sock.recv(65536):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


def crowd(port: int, number: int, at_once: int = 500) -> Iterator[socket.socket]:
    """Connect strangers, each greeted before more come than a listener's backlog takes."""
    for _ in range(number // at_once):
        batch = [stranger(port) for _ in range(at_once)]
        for sock in batch:
            assert sock.recv(1) == protocol.MAGIC[:1]
            yield sock


def test_ten_thousand_silent_strangers_at_once_are_not_all_held(tmp_path: pathlib.Path) -> None:
    most, enough = listener.MAX_UNPROVED, STRANGERS + 1000
    with (
        descriptors(enough),
        driver(tmp_path, handshake=60.0, descriptors=enough) as hub,
        genuine(hub.port) as exchange,
    ):
        exchange.goes_on()
        before = hub.memory()
        with contextlib.ExitStack() as stack:
            strangers = [stack.enter_context(sock) for sock in crowd(hub.port, STRANGERS)]
            until(lambda: sum(map(is_held, strangers)) <= most)
            until(lambda: hub.connections() <= most + 1)
            # Some 4 KiB for each that is held, and as much again for another Python's allocator.
            assert hub.memory() - before < 8 * 2**10 * most
            exchange.goes_on()
        hub.assert_serves_none_but(links=1)
        link(hub.port, 1).close()


def test_strangers_leave_descriptors_to_the_run(tmp_path: pathlib.Path) -> None:
    usual = 1024
    with (
        descriptors(2 * usual),
        driver(tmp_path, handshake=60.0, descriptors=usual) as hub,
        genuine(hub.port) as exchange,
        contextlib.ExitStack() as stack,
    ):
        strangers = [stack.enter_context(stranger(hub.port)) for _ in range(usual + usual // 4)]
        exchange.goes_on()
        until(lambda: sum(map(is_held, strangers)) <= usual // 2)
        assert hub.connections() < usual * 3 // 4
        exchange.goes_on()


# Peers that have proved themselves.

VISITORS = 150
RESIDENTS = 4


class Plan(NamedTuple):
    """What a visitor says, how many bytes of it get said, and whether it is then cut off."""

    said: list[object]
    bytes_said: int
    cut_off: bool

    def proven(self) -> bool:
        return self.bytes_said >= protocol.HELLO.size

    def arrives(self) -> list[object]:
        """Return the messages that are said whole."""
        left = self.bytes_said - protocol.HELLO.size
        whole = []
        for message in self.said:
            left -= len(protocol.encode(message))
            if left >= 0:
                whole.append(message)
        return whole


def plan(chance: random.Random) -> Plan:
    said = messages(chance, chance.randrange(20))
    size = protocol.HELLO.size + sum(len(protocol.encode(message)) for message in said)
    # One in four goes before it has proved itself.
    most = chance.choice([protocol.HELLO.size - 1, size, size, size])
    return Plan(said, chance.randint(0, most), chance.random() < 0.5)


def messages(chance: random.Random, number: int) -> list[object]:
    return [(n, chance.randbytes(chance.choice([0, 10, 1000, 20_000]))) for n in range(number)]


def visit(hub: Hub, node: int, plan: Plan, chance: random.Random) -> Iterator[None]:
    """Say what is planned in pieces of random sizes, and go; others have a turn at each ``yield``.

    One that is cut off has seen its welcome, or the hub might never hear that it was there.
    """
    sock, greeting = greeted(hub.port)
    with sock:
        hello = protocol.hello(SECRET, greeting, chance.randbytes(protocol.NONCE_SIZE), node)
        left = (hello + b"".join(map(protocol.encode, plan.said)))[: plan.bytes_said]
        while left:
            yield
            size = chance.choice([1, 10, 100, 10_000, 100_000])
            sock.sendall(left[:size])
            left = left[size:]
        if plan.cut_off:
            if plan.proven():
                sock.recv(protocol.WELCOME.size, socket.MSG_WAITALL)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        else:
            sock.shutdown(socket.SHUT_WR)
            yield
            hung_up(sock)


def reside(hub: Hub, node: int, said: list[object], heard: list[object]) -> Iterator[None]:
    """Be a link that outlives the visitors, for it takes a turn for each message."""
    with link(hub.port, node, heard.append) as resident:
        for message in said:
            yield
            resident.send(message)


def interleave(hub: Hub, turns: list[Iterator[None]], chance: random.Random) -> None:
    """Let them take turns by chance; the hub tells each turn's number to whoever is there."""
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
    """Return what each node said, once all of these are lost."""
    said: dict[int, list[object]] = collections.defaultdict(list)
    while nodes:
        event = hub.get(SOON)
        assert event, f"not a word from {nodes}"
        node, message = event
        said[node].append(message)
        if message is LOST:
            nodes = nodes - {node}
    return said


def assert_as_planned(plans: dict[int, Plan], said: dict[int, list[object]]) -> None:
    """See the planned messages and one `LOST`; of those cut off, the first ones, and one `LOST`."""
    for node, plan in plans.items():
        if not plan.proven():
            assert node not in said
            continue
        *arrived, last = said[node]
        assert last is LOST
        expected = plan.arrives()
        assert arrived == (expected[: len(arrived)] if plan.cut_off else expected)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_visitors_do_residents_are_heard(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "MAX_WAITING", 8 * 2**10)  # the hub holds them back all along
    chance = random.Random(seed)
    plans = {node: plan(chance) for node in range(RESIDENTS, RESIDENTS + VISITORS)}
    resident_said = [messages(chance, 300) for _ in range(RESIDENTS)]
    told: list[list[object]] = [[] for _ in range(RESIDENTS)]
    with Hub("127.0.0.1", SECRET) as hub, ThreadPoolExecutor(1) as pool:
        proven = {node for node, plan in plans.items() if plan.proven()}
        collected = pool.submit(collect, hub, proven | {*range(RESIDENTS)})
        visits = [visit(hub, node, plan, chance) for node, plan in plans.items()]
        stays = [reside(hub, node, resident_said[node], told[node]) for node in range(RESIDENTS)]
        interleave(hub, [*visits, *stays], chance)
        said = collected.result(SOON)
        until(lambda: not hub.nodes())
        assert hub.get(0) is None
    assert said.keys() <= {*range(RESIDENTS), *plans}
    assert_as_planned(plans, said)
    for node in range(RESIDENTS):
        assert said[node] == [*resident_said[node], LOST]
        numbers = [number for number in told[node] if isinstance(number, int)]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
