"""A remote checkpoint as a folder: one copy for all of a node's processes that have it at once."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from support.waiting import until

from distributor.train import Checkpoint

SPAWN = get_context("spawn")
DEADLINE = 60.0
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc/locks who waits")


class Remote(LocalFileSystem):  # type: ignore[misc]
    """Remote to all who ask: notes each file that is read, and stops at one until it may go on.

    Where beside a file there is a pipe of its name, with ``.gate``, somebody must open that.
    """

    def __init__(self, notes: str, **options: Any) -> None:
        super().__init__(**options)
        self.notes = notes

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        with open(self.notes, "a") as notes:
            notes.write(f"{Path(path).name}\n")
        gate = Path(self.notes).with_name(f"{Path(path).name}.gate")
        if gate.exists():
            gate.read_bytes()
        return super()._open(path, mode, **options)


class Gate:
    """Stops whoever is about to read a file."""

    def __init__(self, pipe: Path) -> None:
        self._pipe = pipe
        os.mkfifo(pipe)

    def open(self) -> None:
        """Let one pass who is there or comes, and all after that."""
        until(self._let_pass, "somebody is at the gate", DEADLINE)

    def remove(self) -> None:
        """Let all pass who are not there yet."""
        self._pipe.unlink()

    def _let_pass(self) -> bool:
        try:
            end = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads it yet
            return False
        self.remove()
        os.close(end)
        return True


class Bed:
    """A checkpoint in remote storage, and the folder for temporary files of who loads it."""

    def __init__(self, folder: Path) -> None:
        self.temporary, self.notes = folder / "tmp", folder / "notes"
        self.remote = Remote(str(self.notes))
        self.temporary.mkdir()
        self.notes.touch()
        self.checkpoint = self.saved(folder / "checkpoint")

    def saved(self, folder: Path) -> Checkpoint:
        (folder / "deep").mkdir(parents=True)
        (folder / "first").write_text("1")
        (folder / "deep" / "second").write_text("22")
        return Checkpoint(folder, self.remote)

    def read(self) -> Counter[str]:
        """Count how often each file has been read."""
        return Counter(self.notes.read_text().split())

    def gate(self, name: str) -> Gate:
        return Gate(self.notes.with_name(f"{name}.gate"))

    def copies(self) -> list[Path]:
        """List all that there is in the folder for temporary files but the place of copies."""
        return [path for place in self.temporary.iterdir() for path in place.iterdir()]


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bed:
    bed = Bed(tmp_path)
    monkeypatch.setenv("TMPDIR", str(bed.temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return bed


def use(checkpoint: Checkpoint, told: Connection) -> None:
    """Have a checkpoint as a folder, and tell of it, until one is told to leave."""
    try:
        with checkpoint.as_directory() as folder:
            told.send((folder, content_of(folder)))
            told.recv()
        told.send("left")
    except OSError as error:
        told.send(error)


def content_of(folder: str | Path) -> dict[str, str]:
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


WHOLE = {"first": "1", "deep/second": "22"}


class User:
    """Another process that has a checkpoint as a folder."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._told, its = SPAWN.Pipe()
        self.process = SPAWN.Process(target=use, args=(checkpoint, its), daemon=True)
        self.process.start()
        its.close()

    def hear(self) -> Any:
        assert self._told.poll(DEADLINE), "it tells nothing"
        return self._told.recv()

    def enters(self) -> Path:
        """Wait until it is inside; give the folder."""
        heard = self.hear()
        assert not isinstance(heard, Exception), heard
        folder, content = heard
        assert content == WHOLE
        return Path(folder)

    def leave(self) -> None:
        self._told.send("leave")
        assert self.hear() == "left"
        self.end()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.end()

    def end(self) -> None:
        self.process.join(DEADLINE)
        assert self.process.exitcode is not None
        self._told.close()

    def waits(self) -> bool:
        """Tell whether it waits for a lock that another has."""
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return any(line[1] == "->" and int(line[5]) == self.process.pid for line in lines)

    def comes_to_wait(self) -> None:
        until(self.waits, "it waits for another", DEADLINE)


@linux
def test_of_all_who_come_one_downloads_and_the_last_removes(bed: Bed) -> None:
    gate = bed.gate("second")
    users = [User(bed.checkpoint) for _ in range(3)]
    until(lambda: sum(user.waits() for user in users) == 2, "the others wait", DEADLINE)
    gate.open()
    users.append(User(bed.checkpoint))
    [folder] = {user.enters() for user in users}
    assert folder.is_relative_to(bed.temporary)
    assert bed.read() == {"first": 1, "second": 1}

    for user in users:
        assert content_of(folder) == WHOLE
        user.leave()
    assert bed.copies() == []


@linux
def test_what_is_half_downloaded_when_its_process_is_killed_is_never_used(bed: Bed) -> None:
    gate = bed.gate("second")
    killed = User(bed.checkpoint)
    until(lambda: len(bed.read()) == 2, "it is half downloaded", DEADLINE)
    waiting = User(bed.checkpoint)
    waiting.comes_to_wait()
    gate.remove()
    killed.kill()

    waiting.enters()
    assert bed.read() == {"first": 2, "second": 2}
    waiting.leave()
    assert bed.copies() == []


def test_the_last_who_lives_removes_it(bed: Bed) -> None:
    killed, other = User(bed.checkpoint), User(bed.checkpoint)
    folder = killed.enters()
    assert other.enters() == folder
    killed.kill()
    assert content_of(folder) == WHOLE
    other.leave()
    assert bed.copies() == []


def test_what_was_left_behind_is_not_used_again(bed: Bed) -> None:
    """For who knows how all of its users ended, and whether the machine went on."""
    folder = left_behind(bed)
    (folder / "first").write_text("damaged")
    with bed.checkpoint.as_directory() as again:
        assert content_of(again) == WHOLE
    assert bed.copies() == []


def test_what_was_left_behind_is_removed_for_another(bed: Bed, tmp_path: Path) -> None:
    folder = left_behind(bed)
    with bed.saved(tmp_path / "another").as_directory():
        assert not folder.exists()
    assert bed.copies() == []


def left_behind(bed: Bed) -> Path:
    """Have a copy all of whose users are killed."""
    users = [User(bed.checkpoint), User(bed.checkpoint)]
    [folder] = {user.enters() for user in users}
    for user in users:
        user.kill()
    assert folder.exists()
    return folder


def test_nobody_waits_for_another_checkpoint(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / "third").write_text("333")
    gate = bed.gate("second")
    slow = User(bed.checkpoint)
    until(lambda: bed.read()["second"] == 1, "it downloads", DEADLINE)
    with Checkpoint(tmp_path / "another", bed.remote).as_directory() as folder:
        assert content_of(folder) == {"third": "333"}
        gate.open()
        assert slow.enters() != Path(folder)
    slow.leave()
    assert bed.copies() == []


@linux
def test_who_waited_for_a_download_that_failed_has_an_error_too(bed: Bed) -> None:
    gate = bed.gate("second")
    users = [User(bed.checkpoint)]
    until(lambda: bed.read()["second"] == 1, "it downloads", DEADLINE)
    users += [User(bed.checkpoint), User(bed.checkpoint)]
    for user in users[1:]:
        user.comes_to_wait()
    shutil.rmtree(bed.checkpoint.path)
    gate.open()

    first, *others = (user.hear() for user in users)
    assert isinstance(first, FileNotFoundError)
    gone = f"There is no checkpoint at {bed.checkpoint.path}."
    assert [str(error) for error in others] == [gone] * 2
    assert bed.copies() == []
    with pytest.raises(FileNotFoundError, match=gone), bed.checkpoint.as_directory():
        pass


def test_what_has_changed_is_another(bed: Bed) -> None:
    with bed.checkpoint.as_directory() as before:
        Path(bed.checkpoint.path, "first").write_text("changed")
        with bed.checkpoint.as_directory() as after:
            assert content_of(before)["first"] == "1"
            assert content_of(after)["first"] == "changed"
        assert Path(before).exists()
    assert bed.copies() == []


def test_a_file_system_that_cannot_be_named_is_shared_with_nobody(bed: Bed) -> None:
    bed.remote.storage_options["lock"] = lambda: None
    with bed.checkpoint.as_directory() as one, bed.checkpoint.as_directory() as other:
        assert one != other
        assert content_of(one) == content_of(other) == WHOLE
    assert bed.copies() == []


def link_elsewhere(place: Path) -> None:
    place.symlink_to(place.parent.parent)


def give_away(place: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    place.mkdir()
    os.chown(place, 1234, 1234)


@pytest.mark.parametrize("taken", [Path.touch, link_elsewhere, give_away])
def test_where_another_has_the_place_each_has_its_own(
    bed: Bed, taken: Callable[[Path], object]
) -> None:
    taken(bed.temporary / f"distributor-checkpoints-{os.getuid()}")
    with bed.checkpoint.as_directory() as one, bed.checkpoint.as_directory() as other:
        assert {Path(one).parent, Path(other).parent} == {bed.temporary}
        assert content_of(one) == content_of(other) == WHOLE
    assert not Path(one).exists()
    assert not Path(other).exists()


def test_a_copy_of_ones_own_stays(bed: Bed) -> None:
    with bed.checkpoint.as_directory() as shared:
        own = bed.checkpoint.to_directory()
        assert own != shared
    assert content_of(own) == WHOLE
