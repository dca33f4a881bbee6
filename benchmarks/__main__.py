"""``python -m benchmarks``: measure, print tables, write results."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    checkpoint,
    data,
    launch,
    predict,
    recovery,
    recovery_steps,
    scale,
    step_times,
    study,
    values,
)
from benchmarks.measure import adopt_orphans, end_descendants
from benchmarks.packages import machine, versions
from benchmarks.report import Row, load, save, table, with_ratios
from benchmarks.summary import summary
from benchmarks.turns import Effort

BENCHMARKS: dict[str, Callable[[Effort], list[Row]]] = {
    "launch": launch.measure,
    "launch_spark": launch.measure_spark,
    "launch_managers": launch.measure_managers,
    "values": values.measure,
    "arguments": values.measure_arguments,
    "checkpoint": checkpoint.measure,
    "recovery": recovery.measure,
    "data": data.measure,
    "predict": predict.measure,
    "scale": scale.measure,
    "study": study.measure,
    "step_times": step_times.measure,
    "recovery_steps": recovery_steps.measure,
}


def main() -> int:
    """Run the benchmarks that the command line selects."""
    wanted = _arguments()
    effort = Effort(quick=wanted.quick, families=tuple(wanted.peers))
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for name in wanted.only or BENCHMARKS:
            _measure(name, effort, wanted.out)
        print(f"\n{summary(load(wanted.out))}")
    finally:
        end_descendants()
    return 0


def _measure(name: str, effort: Effort, out: Path) -> None:
    found = ", ".join(f"{key} {value}" for key, value in {**versions(), **machine()}.items())
    print(f"\n{name} ({found})", flush=True)
    rows = with_ratios(BENCHMARKS[name](effort))
    print(table(rows), flush=True)
    save(out, name, rows, quick=effort.quick)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="once, and only the small cases")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=[], metavar="NAME")
    parser.add_argument(
        "--peers",
        type=lambda text: text.split(","),
        default=[],
        help="comma-separated families of peers: ours,pyspark,floor",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
