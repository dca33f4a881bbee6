"""Helpers for tests of reports: functions for ranks, and a listener for the driver."""

from __future__ import annotations

from pathlib import Path

from distributor import Listener, train
from distributor.train import Checkpoint, CheckpointUploadMode
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.files import Damaged, Manifest, read_share


def save(folder: Path, text: str) -> Checkpoint:
    """Save a file of this rank in the rank's own folder."""
    rank = train.get_context().get_world_rank()
    mine = folder / f"of rank {rank}"
    mine.mkdir(parents=True, exist_ok=True)
    (mine / f"{rank}.txt").write_text(text)
    return Checkpoint.from_directory(mine)


def find_damage(storage: Storage, name: str, manifest: Manifest) -> str | None:
    """Read the files of a checkpoint completely, and describe the first that is damaged."""
    try:
        read_share(storage.checkpoint(name), manifest.files, rank=0, size=1)
    except Damaged as damage:
        return str(damage)
    return None


def use_plain_writes() -> None:
    """Register the file system of URIs such as ``plain:///folder``."""
    import fsspec

    from support import plain

    fsspec.register_implementation(plain.PROTOCOL, plain.Addressed, clobber=True)


def count_on(folder: Path, until: int, mode: str = "SYNC") -> tuple[int, str | None]:
    """Count on from the latest checkpoint, and report a checkpoint at each step.

    Returns the step at which this began, and the path of the latest checkpoint at the end.
    """
    found = train.get_checkpoint()
    begin = 0
    if found:
        rank = train.get_context().get_world_rank()
        with found.as_directory() as local:
            begin = int(Path(local, f"{rank}.txt").read_text())
    for step in range(begin, until):
        train.report(
            {"step": step, "loss": 1 / (step + 1)},
            checkpoint=save(folder / str(step), str(step + 1)),
            checkpoint_upload_mode=CheckpointUploadMode(mode),
        )
    latest = train.get_checkpoint()
    return begin, latest.path if latest else None


class TouchWhenPrinted(Listener):
    """Creates a file when a rank prints a text, so that other ranks can wait for it."""

    def __init__(self, text: bytes, file: Path) -> None:
        self._text, self._file = text, file

    def printed(self, rank: int, stream: str, data: bytes) -> None:
        if self._text in data:
            self._file.touch()
