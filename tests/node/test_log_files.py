"""Output in ``log_dir``, on disks that have room and on one that has none."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.machines import small_disk, why_not_mounted

from distributor import TorchDistributor
from distributor.node.agent.log_files import GAP_MARKER, LogFiles

WHY_NOT = why_not_mounted()
needs_mounts = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
MEGABYTE = 2**20


@needs_mounts
def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def flood() -> str:
        for _ in range(3 * 1024):
            print("x" * 1023)
        return "done"

    with small_disk(tmp_path / "disk", 1) as disk:
        distributor = TorchDistributor(
            2, local_mode=True, use_gpu=False, log_dir=str(disk), show_output="none", timeout=120
        )
        assert distributor.run(flood) == "done"
        shown = capfd.readouterr().err
        assert shown.count("cannot be written to") == 1
        assert "No space left" in shown
        size = sum(file.stat().st_size for file in disk.rglob("rank*"))
        assert MEGABYTE / 2 < size <= MEGABYTE


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@needs_mounts
def test_a_marker_shows_how_much_is_missing_once_there_is_room_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        files = LogFiles(disk, "run", 0)
        folder = disk / "run" / "attempt_0"
        filler = disk / "filler"
        files.write(0, "stdout", b"before\n")
        with pytest.raises(OSError, match="No space"):
            fill(filler)
        files.write(0, "stdout", bytes(2 * MEGABYTE))
        files.write(0, "stdout", bytes(100))
        size_when_full = (folder / "rank0.stdout").stat().st_size
        filler.unlink()
        files.write(0, "stdout", b"after\n")
        files.close()
        missing = 2 * MEGABYTE + 100 - (size_when_full - len(b"before\n"))
        content = (folder / "rank0.stdout").read_bytes()
    assert content.startswith(b"before\n")
    assert content.endswith(f"{GAP_MARKER.format(missing)}after\n".encode())
    assert capfd.readouterr().err.count("cannot be written to") == 1
