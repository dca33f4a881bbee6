"""Output in ``log_dir``, on disks that have room and on one that has none."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.machines import small_disk, why_not_mounted

from distributor import TorchDistributor

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
