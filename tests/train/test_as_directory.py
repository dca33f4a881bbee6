"""Processes on one node that use a remote checkpoint at the same time share one local copy."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections import Counter
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from support.waiting import until

from distributor.train import Checkpoint

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["distributor.train", "pytest", "fsspec.implementations.local"])
DEADLINE = 60.0
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/locks")


class Remote(LocalFileSystem):  # type: ignore[misc]
    """A file system that does not count as local, and logs the name of each file that is read.

    If a pipe with the file's name and the suffix ``.gate`` lies beside the log, reading the file
    blocks.
    """

    def __init__(self, read_log: str, **options: Any) -> None:
        super().__init__(**options)
        self.read_log = read_log

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        with open(self.read_log, "a") as read_log:
            read_log.write(f"{Path(path).name}\n")
        gate = Path(self.read_log).with_name(f"{Path(path).name}.gate")
        if gate.exists():
            gate.read_bytes()
        return super()._open(path, mode, **options)


class Node:
    """A node's folder for temporary files, and a checkpoint in remote storage."""

    def __init__(self, folder: Path) -> None:
        self.temporary, self.read_log = folder / "tmp", folder / "read log"
        self.remote = Remote(str(self.read_log))
        self.temporary.mkdir()
        self.read_log.touch()
        self.checkpoint = self.save(folder / "checkpoint")

    def save(self, folder: Path) -> Checkpoint:
        (folder / "deep").mkdir(parents=True)
        (folder / "first").write_text("1")
        (folder / "deep" / "second").write_text("22")
        return Checkpoint(folder, self.remote)

    def read_counts(self) -> Counter[str]:
        """Return how often each file has been read."""
        return Counter(self.read_log.read_text().split())

    def gate(self, name: str) -> Path:
        """Create a pipe that blocks processes that are about to read a file."""
        gate = self.read_log.with_name(f"{name}.gate")
        os.mkfifo(gate)
        return gate

    def copies(self) -> list[Path]:
        """Return the local copies, and anything else beside them."""
        return [path for parent in self.temporary.iterdir() for path in parent.iterdir()]


@pytest.fixture(scope="module")
def process_server() -> None:
    """Start the server that forks the users, with its socket outside of any node's folder."""
    forkserver.ensure_running()


@pytest.fixture
def node(process_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    node = Node(tmp_path)
    monkeypatch.setenv("TMPDIR", str(node.temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return node


def use(checkpoint: Checkpoint, connection: Connection, temporary: str) -> None:
    """Enter `as_directory`, send the folder and its content, and leave on a message."""
    tempfile.tempdir = temporary  # the server that forks has another environment
    try:
        with checkpoint.as_directory() as folder:
            connection.send((folder, content_of(folder)))
            connection.recv()
        connection.send("left")
    except OSError as error:
        connection.send(error)


def content_of(folder: str | Path) -> dict[str, str]:
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


CONTENT = {"first": "1", "deep/second": "22"}


class User:
    """Another process that uses a checkpoint as a folder."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._connection, other_end = FORKS.Pipe()
        given = (checkpoint, other_end, tempfile.gettempdir())
        self.process = FORKS.Process(target=use, args=given, daemon=True)
        self.process.start()
        other_end.close()

    def receive(self) -> Any:
        assert self._connection.poll(DEADLINE), "the process sends nothing"
        return self._connection.recv()

    def wait_until_inside(self) -> Path:
        """Wait until the process has entered, and return the folder."""
        received = self.receive()
        assert not isinstance(received, Exception), received
        folder, content = received
        assert content == CONTENT
        return Path(folder)

    def leave(self) -> None:
        self._connection.send("leave")
        assert self.receive() == "left"
        self.end()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.end()

    def end(self) -> None:
        self.process.join(DEADLINE)
        assert self.process.exitcode is not None
        self._connection.close()

    def is_blocked(self) -> bool:
        """Return True if the process waits for a lock that another process holds."""
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return any(line[1] == "->" and int(line[5]) == self.process.pid for line in lines)


def test_one_process_downloads_for_all_and_the_last_one_removes_the_copy(node: Node) -> None:
    users = [User(node.checkpoint) for _ in range(3)]
    [folder] = {user.wait_until_inside() for user in users}
    assert folder.is_relative_to(node.temporary)
    assert node.read_counts() == {"first": 1, "second": 1}

    for user in users:
        assert content_of(folder) == CONTENT
        user.leave()
    assert node.copies() == []


@linux
def test_a_download_whose_process_is_killed_is_never_used(node: Node) -> None:
    gate = node.gate("second")
    killed = User(node.checkpoint)
    until(lambda: len(node.read_counts()) == 2, "the download is half done", DEADLINE)
    waiting = User(node.checkpoint)
    until(waiting.is_blocked, "it waits for another process", DEADLINE)
    gate.unlink()
    killed.kill()

    waiting.wait_until_inside()
    assert node.read_counts() == {"first": 2, "second": 2}
    waiting.leave()
    assert node.copies() == []


def test_a_checkpoint_that_has_changed_is_downloaded_again(node: Node) -> None:
    with node.checkpoint.as_directory() as before:
        Path(node.checkpoint.path, "first").write_text("changed")
        with node.checkpoint.as_directory() as after:
            assert content_of(before)["first"] == "1"
            assert content_of(after)["first"] == "changed"
        assert Path(before).exists()
    assert node.copies() == []


def test_an_abandoned_copy_is_removed_and_not_used_again(node: Node, tmp_path: Path) -> None:
    """How its users ended is not known, nor whether the machine has restarted since."""
    for other in (node.checkpoint, node.save(tmp_path / "another")):
        user = User(node.checkpoint)
        folder = user.wait_until_inside()
        user.kill()
        (folder / "first").write_text("damaged")
        with other.as_directory() as again:
            assert content_of(again) == CONTENT
            assert other is node.checkpoint or not folder.exists()
        assert node.copies() == []
