"""Jobs of Spark that run on threads of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.waiting import SOON, until

from distributor.launchers.spark.task.task_data import ROW_SCHEMA
from distributor.spark.session import Session
from distributor.spark.spark_job import CallSite, SparkJob

pytestmark = pytest.mark.spark


def test_a_job_is_cancelled_and_no_other_one_is(spark: Any, tmp_path: Path) -> None:
    session, enough, begun = Session(spark), tmp_path / "enough", tmp_path / "begun"

    def hold(_: Any) -> Iterator[Any]:
        begun.with_suffix(f".{os.getpid()}").touch()
        while not enough.exists():
            time.sleep(0.05)
        yield from ()

    def job(tag: str, ends: list[Any]) -> SparkJob:
        return SparkJob(
            session,
            session.map_in_arrow(spark.range(0, 1, 1, 1), hold, ROW_SCHEMA, barrier=True),
            tag,
            ends.append,
            description=tag,
            call_site=CallSite.of_caller("hold"),
        )

    ends: list[Any] = []
    ends_of_other: list[Any] = []
    with job("cancelled", ends) as cancelled, job("other", ends_of_other) as other:
        try:
            until(lambda: cancelled.has_begun() and other.has_begun(), "both run", 60)
            # Spark 4.3 takes an interrupt while it waits for a new Python worker for a lost daemon,
            # and ends all Python workers of the executor.
            until(lambda: len(list(tmp_path.glob("begun.*"))) == 2, "both have a worker", 60)
            cancelled.cancel()
            until(lambda: ends, "the job ends", SOON)
            assert isinstance(ends[0], Exception)
            assert "cancelled" in str(ends[0])
            assert not ends_of_other
        finally:
            enough.touch()
        until(lambda: ends_of_other, "the other job ends", 60)
    assert ends_of_other == [[]], str(ends_of_other[0])
