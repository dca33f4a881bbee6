"""Failures inside the text of an exception that Spark passes on."""

from __future__ import annotations

import base64
import pickle
import random
import zlib
from collections.abc import Sequence

import pytest

from distributor.errors import RunTimeout
from distributor.wire.outcome import Failure, Origin, failure_of
from distributor.wire.report import LIMIT, TaskFailed, failures_in, timeout_in

RANDOM = random.Random(7)


def noise(length: int, lowest: int = 33, highest: int = 126) -> str:
    """Text that compression makes no shorter."""
    return "".join(chr(RANDOM.randint(lowest, highest)) for _ in range(length))


def failure(rank: int = 0, text: str = "Traceback", summary: str = "ValueError: no") -> Failure:
    origin = Origin(rank=rank, local_rank=0, host="host-1")
    return Failure(origin=origin, summary=summary, text=text, pickled=b"pickled")


def through_spark(failures: Sequence[Failure]) -> str:
    """The text in which Spark embeds a task's exception."""
    return (
        "Job aborted: Task 1 failed 1 times, most recent failure: Lost task 1.0 (10.0.0.2):\n"
        f"distributor.wire.report.TaskFailed: {TaskFailed.of(failures)}\n\n\tat org.apache.spark"
    )


def test_failures_come_back_whole() -> None:
    failures = [failure(3, "a\nb"), failure(1, "naïve 🚀 <distributor-report AAAA>")]
    assert failures_in(through_spark(failures)) == failures


def test_the_text_tells_people_too() -> None:
    text = str(TaskFailed.of([failure(3), failure(1, summary="OSError: disk")]))
    assert text.startswith("rank 3 (local rank 0) on host-1, attempt 0: ValueError: no; rank 1 ")
    assert "OSError: disk\n" in text


def test_a_node_that_was_stopped_reports_no_failure() -> None:
    text = through_spark([])
    assert "stopped because the run ended elsewhere" in text
    assert failures_in(text) == []


def test_what_spark_repeats_is_read_once() -> None:
    first, second = through_spark([failure(0), failure(1)]), through_spark([failure(1, "later")])
    assert failures_in(first + first + second) == [failure(0), failure(1)]


@pytest.mark.parametrize(
    "failures",
    [
        pytest.param([failure(2, text=noise(300_000))], id="text"),
        pytest.param([failure(2, text=noise(100_000, 0x1F300, 0x3134A))], id="wide text"),
        pytest.param([failure(2, summary=noise(300_000))], id="summary"),
        pytest.param([failure(2, noise(300_000), noise(300_000, 0x4E00, 0x9FFF))], id="both"),
        pytest.param([failure(rank, noise(60_000)) for rank in (2, 3, 4)], id="many"),
        pytest.param([failure(rank, noise(300_000)) for rank in (2, 3)], id="many that are long"),
        pytest.param(
            [failure_of(ValueError(noise(300_000)), Origin(rank=2, local_rank=0, host="host-1"))],
            id="exception",
        ),
    ],
)
def test_a_report_beyond_the_limit_still_arrives(failures: list[Failure]) -> None:
    text = through_spark(failures)
    assert len(text) <= LIMIT + 3000
    (found,) = failures_in(text)
    first = failures[0]
    assert found.origin == first.origin
    assert found.summary
    assert first.summary.startswith(found.summary)
    assert first.text.endswith(found.text), "of a traceback the end tells most"
    assert len(found.text) >= min(len(first.text), 1000)
    assert found.exception() is not None


def encoded(thing: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(thing))).decode()


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        "java.lang.OutOfMemoryError",
        "<distributor-report >",
        "<distributor-report A>",
        "<distributor-report AAAA>",
        f"<distributor-report {base64.b64encode(zlib.compress(b'no pickle')).decode()}>",
        f"<distributor-report {encoded(None)}>",
        f"<distributor-report {encoded(['no failure'])}>",
        f"<distributor-report {encoded([failure()])[:-8]}>",
        f"<distributor-report {encoded([failure()])[:-8]} ... (cut)",
    ],
)
def test_garbage_is_no_failure_and_hides_none(garbage: str) -> None:
    assert failures_in(garbage) == []
    assert failures_in(garbage + "\n" + through_spark([failure()])) == [failure()]


@pytest.mark.parametrize("length", [10, 2 * LIMIT])
def test_a_deadlines_error_comes_through_spark(length: int) -> None:
    error = RunTimeout(f"The run took too long.\n{noise(length)}", stacks={3: noise(length)})
    found = timeout_in(f"Job aborted: {TaskFailed.timed_out(error)}\n\tat org.apache.spark")
    assert isinstance(found, RunTimeout)
    assert str(found).startswith("The run took too long.")
    assert found.stacks == (error.stacks if length < LIMIT else {}), "all, unless too large"
    assert timeout_in("<distributor-timeout bm90aGluZw==>") is None
    assert timeout_in(str(TaskFailed.of([failure()]))) is None
