"""Reports that no link could carry: all of them become rows, or a message says what is missing."""

from __future__ import annotations

import os
from typing import Any

from distributor.launchers.spark.task.task_data import REPORTS_PART, UnsentReports, unpacked
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
    assert carried_by(rows_of(unsent, MANY)) == sent


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
