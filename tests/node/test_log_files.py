"""Output in ``log_dir``, on disks that have room and on one that has none."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.machines import small_disk, why_not_mounted

from distributor import TorchDistributor
from distributor.core.text import Redaction
from distributor.node.agent.output import LogRelay

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


def test_what_a_lost_rank_has_left_is_passed_on_alone(tmp_path: Path) -> None:
    """The others still write, and nothing of that may count as passed on."""
    workers: list[Any] = []
    for rank in range(2):
        (tmp_path / str(rank)).write_bytes(b"%d\n" % rank)
        files = {"stdout": (tmp_path / str(rank)).open("rb")}
        origin = SimpleNamespace(rank=rank)
        workers.append(SimpleNamespace(origin=origin, output_files=files, relayed=Counter()))
    passed_on: list[tuple[int, str, bytes]] = []
    sink: Any = SimpleNamespace(write=lambda *output: passed_on.append(output))
    sink.has_room = lambda: True
    relay = LogRelay(sink, Redaction({}))

    relay.drain(workers[:1])
    assert passed_on == [(0, "stdout", b"0\n")]
    relay.relay(workers)
    assert passed_on[1:] == [(1, "stdout", b"1\n")]
