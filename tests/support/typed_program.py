"""A program of a user, for mypy: `make lint` checks its types, and that wrong calls are errors."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import assert_type

from distributor import TorchDistributor


def train(epochs: int, *, lr: float = 0.1) -> list[str]:
    return [f"{epochs} {lr}"]


def right() -> None:
    runs = TorchDistributor(2)
    assert_type(runs.run(train, 1), list[str])
    assert_type(runs.run(train, 1, lr=0.5), list[str])
    assert_type(runs.run_all(train, 1), list[list[str]])
    assert_type(runs.run(lambda: 3), int)
    assert_type(runs.run("x.py", "--epochs", 3), None)
    assert_type(runs.run(Path("x.py")), None)
    assert_type(runs.run_all("x.py"), list[None])
    TorchDistributor(
        2, True, False, env={"A": "b"}, timeout=3, show_output=[0], log_dir=Path("logs")
    )


def wrong() -> None:
    """Each comment is an error that mypy has to find: it refuses comments without an error."""
    runs = TorchDistributor(2)
    seconds: int = runs.run(train, 1)  # type: ignore[assignment]
    print(seconds)
    runs.run(train, "1")  # type: ignore[call-overload]
    runs.run(train)  # type: ignore[call-overload]
    runs.run(train, 1, momentum=0.9)  # type: ignore[call-arg]
    runs.run("x.py", epochs=3)  # type: ignore[call-overload]
    runs.run(3)  # type: ignore[call-overload]
    TorchDistributor("2")  # type: ignore[arg-type]
    TorchDistributor(2, env={"A": 1})  # type: ignore[dict-item]
    TorchDistributor(2, show_output="loud")  # type: ignore[arg-type]
    TorchDistributor(2, no_such_setting=1)  # type: ignore[call-arg]
