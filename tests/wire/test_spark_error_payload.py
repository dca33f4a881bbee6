"""Failures embedded in the text of an exception that Spark forwards."""

from __future__ import annotations

import base64
import pickle
import random
import zlib
from collections.abc import Callable, Sequence

import pytest

from distributor.serialization.outcome import Failure, Origin, failure_of
from distributor.wire import protocol as sealing
from distributor.wire import spark_error_payload
from distributor.wire.spark_error_payload import LIMIT, TaskFailed

RANDOM = random.Random(7)
SECRET = bytes(range(32))


def noise(length: int, lowest: int = 33, highest: int = 126) -> str:
    """Return text that does not compress."""
    return "".join(map(chr, RANDOM.choices(range(lowest, highest + 1), k=length)))


def failure(
    rank: int = 0,
    text: str = "Traceback",
    summary: str = "ValueError: no",
    kind: str = "ValueError",
) -> Failure:
    origin = Origin(rank=rank, local_rank=0, host="host-1")
    return Failure(origin=origin, summary=summary, text=text, pickled=b"pickled", kind=kind)


def failures_in(text: str) -> list[Failure]:
    return spark_error_payload.failures_in(text, SECRET)


def through_spark(failures: Sequence[Failure]) -> str:
    """Return the text in which Spark embeds a task's exception."""
    return (
        "Job aborted: Task 1 failed 1 times, most recent failure: Lost task 1.0 (10.0.0.2):\n"
        f"distributor.wire.spark_error_payload.TaskFailed: {TaskFailed.of(failures, SECRET)}\n\n"
        "\tat org.apache.spark"
    )


def test_failures_round_trip_and_only_ranks_and_types_are_readable() -> None:
    failures = [
        failure(3, "a\nb"),
        failure(1, "naïve 🚀 <distributor-report AAAA>", kind="OSError"),
    ]
    assert failures_in(through_spark(failures)) == failures
    text = str(TaskFailed.of(failures, SECRET))
    assert text.startswith("rank 3 (local rank 0) on host-1, attempt 0: ValueError; rank 1 ")
    assert "attempt 0: OSError (the driver raises the whole error)\n" in text


def test_only_the_driver_of_the_run_can_read_messages() -> None:
    error = ValueError("hunter2-hunter2")
    failed = failure_of(error, Origin(rank=0, local_rank=0, host="host-1"))
    text = through_spark([failed])
    assert "hunter2" not in text
    [found] = spark_error_payload._REPORT.findall(text)
    assert b"hunter2" not in base64.b64decode(found)
    with pytest.raises(zlib.error):
        zlib.decompress(base64.b64decode(found)[sealing.NONCE_BYTES :])
    assert failures_in(text) == [failed]
    assert spark_error_payload.failures_in(text, bytes(32)) == []


class Tripwire:
    """Fails the test if it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("unpickled",))


def test_only_payloads_sealed_with_the_secret_are_unpickled() -> None:
    payload = zlib.compress(pickle.dumps([Tripwire()]))
    for forged in (payload, sealing.seal(payload, bytes(32))):
        encoded = base64.b64encode(forged).decode()
        assert failures_in(f"<distributor-report {encoded}>") == []


@pytest.mark.parametrize("position", [0, 20, -1])
def test_a_changed_or_truncated_payload_is_refused(position: int) -> None:
    payload = b"payload" * 10
    assert sealing.unseal(sealing.seal(payload, SECRET), SECRET) == payload
    sealed = bytearray(sealing.seal(payload, SECRET))
    sealed[position] ^= 1
    for damaged in (bytes(sealed), bytes(sealed)[:-1], b""):
        with pytest.raises(sealing.NotAuthentic):
            sealing.unseal(damaged, SECRET)


def test_repeated_payloads_are_read_once_and_a_stopped_node_has_none() -> None:
    first, second = through_spark([failure(0), failure(1)]), through_spark([failure(1, "later")])
    assert failures_in(first + first + second) == [failure(0), failure(1)]
    assert failures_in(through_spark([])) == []


@pytest.mark.parametrize(
    "make_failures",
    [
        pytest.param(lambda: [failure(2, text=noise(100_000, 0x1F300, 0x3134A))], id="wide text"),
        pytest.param(lambda: [failure(rank, noise(300_000)) for rank in (2, 3)], id="many"),
        pytest.param(
            lambda: [
                failure_of(ValueError(noise(300_000)), Origin(rank=2, local_rank=0, host="host-1"))
            ],
            id="exception",
        ),
    ],
)
def test_a_report_beyond_the_limit_still_arrives(
    make_failures: Callable[[], list[Failure]],
) -> None:
    failures = make_failures()
    text = through_spark(failures)
    assert len(text) <= LIMIT + 3000
    (found,) = failures_in(text)
    first = failures[0]
    assert found.origin == first.origin
    assert found.summary
    assert first.summary.startswith(found.summary)
    assert first.text.endswith(found.text), "the end of a traceback is the most useful part"
    assert len(found.text) >= min(len(first.text), 1000)
    assert found.exception() is not None


def encoded(thing: object) -> str:
    return encoded_bytes(pickle.dumps(thing))


def encoded_bytes(data: bytes) -> str:
    return base64.b64encode(sealing.seal(zlib.compress(data), SECRET)).decode()


@pytest.mark.parametrize(
    "garbage",
    [
        "java.lang.OutOfMemoryError",
        "<distributor-report AAAA>",
        f"<distributor-report {encoded_bytes(b'no pickle')}>",
        f"<distributor-report {encoded(['no failure'])}>",
        f"<distributor-report {encoded([failure()])[:-8]} ... (cut)",
    ],
)
def test_garbage_is_ignored_and_hides_no_failure(garbage: str) -> None:
    assert failures_in(garbage) == []
    assert failures_in(garbage + "\n" + through_spark([failure()])) == [failure()]
