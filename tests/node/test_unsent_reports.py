"""Reports that no link could carry: all of them become rows, or a message says what is missing."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from distributor.launchers.spark.task.result_rows import REPORTS_PART, UnsentReports, unpacked
from distributor.wire.messages import Output

MANY = 2**40


def reports(count: int, size: int) -> list[Output]:
    return [Output(3, "progress", b"%08d" % number * (size // 8)) for number in range(count)]


def rows_of(unsent: UnsentReports, room: int) -> list[dict[str, Any]]:
    rows = [row for batch in unsent.rows(room) for row in batch.to_pylist()]
    assert {(row["rank"], row["part"]) for row in rows} <= {(3, REPORTS_PART)}
    return rows


def carried_by(rows: list[dict[str, Any]]) -> list[Output]:
    return [report for row in rows for report in unpacked(row["data"])]


def test_reports_of_any_size_become_rows() -> None:
    unsent, sent = UnsentReports(), reports(180, 400_000)
    for report in sent:
        unsent.add(report)
    assert sum(len(report.data) for report in sent) > 64 * 2**20
    assert carried_by(rows_of(unsent, MANY)) == sent
    assert rows_of(UnsentReports(), MANY) == []


def incompressible(count: int) -> list[Output]:
    return [Output(3, "progress", os.urandom(2**20 + 1)) for _ in range(count)]


def test_reports_for_which_spark_has_no_room_are_counted() -> None:
    unsent, sent = UnsentReports(), incompressible(10)
    for report in sent:
        unsent.add(report)
    rows = rows_of(unsent, 5 * 2**20)
    *carried, message = carried_by(rows)
    assert carried == sent[:4], "with a little more for each"
    assert sum(len(row["data"]) for row in rows) < 6 * 2**20
    assert message.source == "stderr"
    assert b"6.29 MB of compressed reports of this node are missing" in message.data


def test_a_full_disk_costs_reports_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    unsent, sent = UnsentReports(), incompressible(3)
    unsent.add(sent[0])
    file = unsent._file

    class FullDisk:
        """The file, of a disk that is full."""

        seek = file.seek

        def write(self, data: bytes) -> int:
            file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(unsent, "_file", FullDisk())
        unsent.add(sent[1])
    unsent.add(sent[2])
    first, third, message = carried_by(rows_of(unsent, MANY))
    assert (first, third) == (sent[0], sent[2])
    assert b"1.05 MB of compressed reports" in message.data
