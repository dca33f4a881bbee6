"""The hub and its links over real sockets, with strangers, stuck peers and floods."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from distributor.wire import listener, peer, protocol
from distributor.wire.hub import HERE, LOST, SILENT, Hub
from distributor.wire.link import Link

SECRET = b"a secret of the run"
SOON = 10.0  # a deadline for what should take milliseconds
MIB = 2**20
FLOOD = 128  # MiB: what the hub takes before it holds back, what the kernel takes then, and more


class Call:
    """Unpickles as what a call returns."""

    def __init__(self, function: Callable[..., object], argument: object) -> None:
        self.call = function, (argument,)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object]]:
        return self.call


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub("127.0.0.1", SECRET) as hub:
        yield hub


def link(
    port: int,
    node: int = 0,
    on_message: Callable[[object], None] = print,
    on_lost: Callable[[], None] = lambda: None,
    secret: bytes = SECRET,
    timeout: float = SOON,
) -> Link:
    return Link.connect(
        "127.0.0.1", port, secret, node, timeout=timeout, on_message=on_message, on_lost=on_lost
    )


def stranger(hub: Hub) -> socket.socket:
    return socket.create_connection(("127.0.0.1", hub.port), SOON)


def proven(hub: Hub, node: int) -> socket.socket:
    """A peer that proves itself and then does only what the test makes it do."""
    sock = stranger(hub)
    greeting = sock.recv(protocol.GREETING.size, socket.MSG_WAITALL)
    sock.sendall(protocol.hello(SECRET, greeting, bytes(32), node))
    protocol.check_welcome(SECRET, greeting, bytes(32), sock.recv(32, socket.MSG_WAITALL))
    return sock


def assert_hung_up(sock: socket.socket) -> None:
    """A closed connection ends in EOF or a reset; one that is still open, in TimeoutError."""
    with sock, contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass


def assert_serves(hub: Hub, node: int = 77) -> None:
    """A newcomer is served, and the queue holds nothing but what it says."""
    with link(hub.port, node) as newcomer:
        newcomer.send("hello")
        assert hub.get(SOON) == (node, "hello")
    assert hub.get(SOON) == (node, LOST)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def test_messages_arrive_in_order_both_ways(hub: Hub) -> None:
    heard: list[object] = []
    with link(hub.port, 3, heard.append) as three, link(hub.port, 4) as four:
        assert hub.nodes() == {3, 4}
        for number in range(1000):
            three.send(("up", number))
            hub.send(3, ("down", number))
            hub.send(5, "nobody is there")
        hub.broadcast("all")
        assert [hub.get(SOON) for _ in range(1000)] == [(3, ("up", n)) for n in range(1000)]
        until(lambda: len(heard) == 1001)
        assert heard == [*(("down", n) for n in range(1000)), "all"]
        four.send(b"x" * (20 * MIB))
        assert hub.get(SOON) == (4, b"x" * (20 * MIB))
        with pytest.raises(protocol.FrameTooLarge):
            four.send(bytes(protocol.MAX_FRAME))


def test_get_wakes_for_a_post_a_deadline_and_ctrl_c(hub: Hub) -> None:
    threading.Timer(0.05, hub.post, ["mine"]).start()
    assert hub.get(SOON) == (HERE, "mine")
    assert hub.get(0.01) is None
    threading.Timer(0.1, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
    with within(SOON / 2), pytest.raises(KeyboardInterrupt):
        hub.get(SOON)


def test_each_side_refuses_a_wrong_secret(hub: Hub) -> None:
    with pytest.raises(protocol.HandshakeRefused, match="hung up"):
        link(hub.port, secret=b"another")
    assert hub.nodes() == set()
    assert_serves(hub)
    for magic, reason in ((protocol.MAGIC, "does not hold"), (b"another protocol", "not a dist")):
        with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as pool:
            refused = pool.submit(link, impostor.getsockname()[1])
            with impostor.accept()[0] as sock:
                sock.sendall(protocol.GREETING.pack(magic, bytes(32)) + bytes(32))
                with pytest.raises(protocol.HandshakeRefused, match=reason):
                    refused.result(SOON)


def test_a_hub_that_never_answers_costs_no_more_than_the_timeout() -> None:
    no_answer = pytest.raises(TimeoutError, match="no hub answers")
    with socket.create_server(("127.0.0.1", 0)) as mute, within(2), no_answer:
        link(mute.getsockname()[1], timeout=0.2)


def test_strangers_are_hung_up_on(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "HANDSHAKE_SECONDS", 1.0)
    monkeypatch.setattr(listener, "MAX_UNPROVED", 2)
    silent, garbage = stranger(hub), stranger(hub)
    assert silent.recv(1) == garbage.recv(1) == protocol.MAGIC[:1]
    with within(0.9):
        newcomer = stranger(hub)
        assert_hung_up(silent)  # who has had the most time to prove anything
        garbage.sendall(b"GET / HTTP/1.1\r\n" * 100)
        assert_hung_up(garbage)
    assert_hung_up(newcomer)
    assert_serves(hub)


def test_only_what_is_proven_is_unpickled(
    hub: Hub,
    tmp_path: pathlib.Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with stranger(hub) as early:
        bomb = protocol.encode(Call(os.mkdir, "unproved"))
        assert len(bomb) <= protocol.HELLO.size, "a hello could be it"
        early.sendall(bomb.ljust(protocol.HELLO.size) + bomb)
        assert_hung_up(early)
    assert hub.get(0.1) is None
    assert capfd.readouterr() == ("", "")
    with link(hub.port, 1) as trusted:
        trusted.send(Call(os.mkdir, str(tmp_path / "proven")))
        assert hub.get(SOON) == (1, None)
    assert os.listdir(tmp_path) == ["proven"]


UNREADABLE = protocol.encode(Call(int, "no number"))


@pytest.mark.parametrize("rest", [b"\xff" * 4, bytes(4), UNREADABLE + protocol.encode("more")])
def test_a_proven_peer_that_breaks_the_rules_is_dropped(hub: Hub, rest: bytes) -> None:
    with link(hub.port, 1) as good:
        bad = proven(hub, 2)
        bad.sendall(protocol.encode("fine") + rest)
        assert [hub.get(SOON), hub.get(SOON)] == [(2, "fine"), (2, LOST)]
        assert_hung_up(bad)
        good.send("still here")
        assert hub.get(SOON) == (1, "still here")


def test_the_first_of_two_with_one_index_stays(hub: Hub) -> None:
    with link(hub.port, 1) as first:
        with pytest.raises(protocol.HandshakeRefused):
            link(hub.port, 1)
        first.send("mine")
        assert hub.get(SOON) == (1, "mine")
    assert hub.get(SOON) == (1, LOST)
    assert_serves(hub, 1)


def test_a_peer_that_answers_no_heartbeat_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(protocol, "LEASE_SECONDS", 0.5)
    with Hub("127.0.0.1", SECRET) as hub, link(hub.port, 1) as good:
        bad = proven(hub, 2)
        assert [hub.get(SOON), hub.get(SOON)] == [(2, SILENT), (2, LOST)]
        assert_hung_up(bad)
        good.send("still here")
        assert hub.get(SOON) == (1, "still here")


def test_a_killed_peer_is_lost_after_its_last_message(hub: Hub) -> None:
    code = f"""import signal; from distributor.wire.link import Link
link = Link.connect("127.0.0.1", {hub.port}, {SECRET!r}, 9, timeout=10, on_message=print)
link.send("last"); signal.pause()"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        assert hub.get(SOON) == (9, "last")
        assert hub.nodes() == {9}
        process.kill()
        assert hub.get(SOON) == (9, LOST)
        assert hub.nodes() == set()


def test_a_lost_link_says_so_once_after_all_it_was_sent_and_swallows_the_rest(hub: Hub) -> None:
    heard: list[object] = []
    with link(hub.port, 0, heard.append, on_lost=lambda: heard.append("lost")) as lost:
        with link(hub.port, 1, on_lost=lambda: heard.append("our own close")):
            pass
        hub.send(0, bytes(8 * MIB))
        hub.close()
        until(lambda: len(heard) == 2)
        lost.send("into the void")
        assert lost.lost
        assert lost.backlog() == 0
        assert not lost.wait_below(1, SOON)
    assert heard == [bytes(8 * MIB), "lost"]


def test_unread_messages_hold_the_senders_back(hub: Hub) -> None:
    with link(hub.port, 1) as flood, link(hub.port, 2) as other:
        for number in range(FLOOD):
            flood.send((number, bytes(MIB)))
        until(lambda: hub._held_back)
        assert not flood.wait_below(16 * MIB, 0.5)
        assert 32 * MIB < hub._waiting < 34 * MIB
        other.send((FLOOD, "in the queue by and by"))
        got = [hub.get(SOON) for _ in range(FLOOD + 1)]
        assert sorted(message[0] for _, message in got) == list(range(FLOOD + 1))  # type: ignore
        assert flood.wait_below(1, SOON)
        assert hub._waiting == 0


def test_a_peer_that_does_not_read_is_dropped(hub: Hub) -> None:
    with link(hub.port, 1) as good, proven(hub, 2):
        for _ in range(10):
            hub.send(2, bytes(10 * MIB))
        assert hub.get(SOON) == (2, LOST)
        good.send("still here")
        assert hub.get(SOON) == (1, "still here")


def test_closing_either_end_is_prompt_though_the_other_is_stuck(hub: Hub) -> None:
    stuck = link(hub.port, 1)
    for _ in range(FLOOD):
        stuck.send(bytes(MIB))
    until(lambda: hub._held_back)
    with within(2):
        stuck.close(timeout=0.3)
    assert stuck.lost  # for not all was sent
    assert not [t for t in threading.enumerate() if t.name.startswith("distributor-link")]
    with stranger(hub), proven(hub, 2), within(3):
        hub.send(2, bytes(30 * MIB))
        hub.close()


def test_nothing_is_left_of_a_hundred_hubs() -> None:
    def census() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = census()
    for _ in range(100):
        with Hub("127.0.0.1", SECRET) as hub, link(hub.port) as one, stranger(hub):
            one.send("hello")
            assert hub.get(SOON) == (0, "hello")
            stranger(hub).close()  # which is perhaps just being accepted
    assert all(now <= then for now, then in zip(census(), before, strict=True))


def test_two_hundred_links_at_once(hub: Hub) -> None:
    with ThreadPoolExecutor(50) as pool, contextlib.ExitStack() as stack:
        links = list(pool.map(lambda node: link(hub.port, node), range(200)))
        for node, one in enumerate(links):
            stack.enter_context(one).send(str(node))
        assert {hub.get(SOON) for _ in links} == {(n, str(n)) for n in range(200)}
        assert hub.nodes() == set(range(200))
