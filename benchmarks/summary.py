"""Tables of the most important figures, from the file of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks import (
    checkpoint,
    data,
    launch,
    loaders,
    predict,
    recovery,
    recovery_steps,
    scale,
    step_times,
    study,
    values,
)
from benchmarks.spark import EMBEDDED, LOCAL

HEAD = ("median", "distributor", "PySpark's class", "torchrun", "Ray", "plain code")
PEERS = ("pyspark", "torchrun", "ray")
PLAIN = {
    "floor_allreduce_hook": "torch's `allreduce_hook`",
    "floor_arrow": "`mapInArrow` without a model",
    "floor_copy": "a copy in memory",
    "floor_executor": "Spark starts an executor",
    "floor_forks": "forks",
    "floor_processes": "new processes",
    "floor_pyarrow": "pyarrow, from Parquet",
    "floor_save": "`dcp.save`",
    "floor_sockets": "sockets",
    "floor_stage": "an empty barrier stage",
    "floor_torch": "torch in one process",
}
"""What the plain code is, by peer."""
NOTHING = ""


KILLED_RANK, LARGE_RANK = ((LOCAL, recovery.RANK, size) for size in recovery.SIZES)
KILLED_EXECUTOR = recovery.THREE_EXECUTORS, recovery.EXECUTOR, recovery.SIZES[0]


class Line(NamedTuple):
    """A line of the table: a figure of some peers in one case.

    Parameters
    ----------
    title : str
        Label in the tables.
    benchmark, case, what : str
        Its place in the results.
    plain : str
        The peer that is plain code, if there is one.
    ours : str
        The variant of this project that is shown. Beside a variant there are no other launchers,
        which have none.
    in_readme : bool
        Whether the README has the line too.
    """

    title: str
    benchmark: str
    case: str
    what: str
    plain: str = ""
    ours: str = "ours"
    in_readme: bool = False


_HERE = launch.titled(LOCAL, launch.RANKS)
_ON_CLUSTER = launch.titled(EMBEDDED, launch.RANKS)
_STANDALONE = launch.titled("spark://", launch.RANKS)
_SCALARS = data.titled(loaders.SCALARS)
GIGABYTE = 1000

LINES = (
    Line("first run, 2 ranks", "launch", _HERE, launch.FIRST, "floor_processes"),
    Line(
        "first run, 2 s after `warm_up()`",
        "launch",
        _HERE,
        launch.FIRST,
        ours="ours_ahead",
    ),
    Line("later runs", "launch", _HERE, launch.LATER, "floor_forks", in_readme=True),
    Line("later runs, `warm=False`", "launch", _HERE, launch.LATER, "floor_processes", "ours_cold"),
    Line("first run on local-cluster", "launch_spark", _ON_CLUSTER, launch.FIRST),
    Line("later runs on local-cluster", "launch_spark", _ON_CLUSTER, launch.LATER, "floor_stage"),
    Line("later runs on standalone", "launch_spark", _STANDALONE, launch.LATER, "floor_stage"),
    *(
        Line(f"{what} on {where}", "launch_managers", launch.titled(place, launch.RANKS), what)
        for place, where in (("yarn", "YARN"), ("k8s://", "Kubernetes"))
        for what in (launch.FIRST, launch.LATER)
    ),
    Line(
        "a value of 1 GB",
        "values",
        values.titled(LOCAL, GIGABYTE),
        values.VALUE_ALONE,
        "floor_copy",
    ),
    Line(
        "a value of 1 GB on local-cluster",
        "values",
        values.titled(EMBEDDED, GIGABYTE),
        values.VALUE_ALONE,
    ),
    Line(
        "arguments of 500 MB on local-cluster",
        "arguments",
        values.titled(EMBEDDED, values.ARGUMENTS[-1]),
        values.ARGUMENTS_ALONE,
        "floor_sockets",
    ),
    Line(
        "the same 500 MB of arguments again, on local-cluster",
        "arguments",
        values.titled(EMBEDDED, values.ARGUMENTS[-1]),
        values.AGAIN,
    ),
    Line(
        "a checkpoint of 1 GB, saved and in storage",
        "checkpoint",
        checkpoint.titled(checkpoint.MEGABYTES),
        checkpoint.SAVED,
        "floor_save",
    ),
    Line(
        "a killed rank, until the next attempt's first collective",
        "recovery",
        recovery.titled(LOCAL, recovery.RANK, recovery.SIZES[0]),
        recovery.RECOVERED,
        in_readme=True,
    ),
    Line(
        "a killed rank, with a checkpoint of 1 GB",
        "recovery",
        recovery.titled(LOCAL, recovery.RANK, recovery.SIZES[1]),
        recovery.RECOVERED,
    ),
    Line(
        "a killed rank on local-cluster, until the next attempt's first collective",
        "recovery",
        recovery.titled(EMBEDDED, recovery.RANK, recovery.SIZES[0]),
        recovery.RECOVERED,
    ),
    Line(
        "a killed rank on local-cluster, with a checkpoint of 1 GB",
        "recovery",
        recovery.titled(EMBEDDED, recovery.RANK, recovery.SIZES[1]),
        recovery.RECOVERED,
    ),
    Line(
        "a killed executor on local-cluster, until the next attempt's first collective",
        "recovery",
        recovery.titled(recovery.ONE_CORE, recovery.EXECUTOR, recovery.SIZES[0]),
        recovery.RECOVERED,
        "floor_executor",
    ),
    *(
        Line(
            f'a killed {victim}, `recovery="in_place"`, {when} the others have {done}',
            "recovery",
            recovery.titled(*case),
            what,
            ours="ours_in_place",
            in_readme=what == recovery.STEPPED,
        )
        for victim, case, what, when, done in (
            ("rank", KILLED_RANK, recovery.FORMED, "until", "a new group"),
            ("rank", KILLED_RANK, recovery.STEPPED, "until", "done a step"),
            ("rank", LARGE_RANK, recovery.FORMED, "a model of 1 GB, until", "a new group"),
            ("executor", KILLED_EXECUTOR, recovery.STEPPED, "until", "done a step"),
        )
    ),
    Line(
        "a host that is cut off, until the run reports it",
        "recovery",
        f"{recovery.TWO_HOSTS}, {recovery.HOST}",
        recovery.REPORTED,
    ),
    *(
        Line(
            f"a trial of 2 ranks in a study{where}, beside the time in its function",
            "study",
            study.titled(place, study.RANKS, 1),
            study.OVERHEAD,
        )
        for place, where in ((LOCAL, ""), (study.cluster(1), " on local-cluster"))
    ),
    Line(
        "slots without ranks in a study on local-cluster, with trials of 10 s",
        "study",
        study.titled(study.cluster(2), study.RANKS, 2, study.SECONDS),
        study.IDLE,
    ),
    Line(
        "steps of 2 ms with `step_times`, beside those without",
        "step_times",
        step_times.titled(),
        step_times.RATIO,
    ),
    Line(
        "what `step_times` takes in a step",
        "step_times",
        step_times.titled(),
        step_times.HOOKS,
    ),
    Line(
        'steps of 10 ms with `recovery="in_place"`, beside those of DDP',
        "recovery_steps",
        recovery_steps.titled(),
        recovery_steps.RATIO,
    ),
    Line(
        'what `recovery="in_place"` takes in a step for each bucket',
        "recovery_steps",
        recovery_steps.titled(),
        recovery_steps.HOOKS,
        "floor_allreduce_hook",
    ),
    Line(
        "rows of 16 floats from a DataFrame",
        "data",
        _SCALARS,
        data.RATE,
        "floor_pyarrow",
        in_readme=True,
    ),
    Line(
        "rows of 784 floats from a DataFrame",
        "data",
        data.titled(loaders.ARRAY),
        data.RATE,
        "floor_pyarrow",
    ),
    Line(
        "rows with images of 3 kB from a DataFrame",
        "data",
        data.titled(loaders.IMAGE),
        data.RATE,
        "floor_pyarrow",
    ),
    Line(
        "from `run` to the first batch of a DataFrame of 100,000 rows",
        "data",
        data.titled(loaders.SCALARS, data.START_ROWS[0]),
        data.LATER_START,
    ),
    Line(
        "from `run` to the first batch of a DataFrame of a million rows",
        "data",
        data.titled(loaders.SCALARS, data.START_ROWS[1]),
        data.LATER_START,
    ),
    *(
        Line(
            f"predictions for {rows} {source}",
            "predict",
            predict.titled(work),
            predict.RATE,
            plain,
            ours,
        )
        for rows, work in (
            ("rows of 784 floats", predict.ARRAYS_WORK),
            ("rows of 16 floats", predict.SCALARS_WORK),
            ("a large model and rows", predict.LARGE_WORK),
        )
        for ours, source, plain in (
            ("ours", "of a DataFrame", "floor_arrow"),
            ("ours_parquet", "of Parquet files", "floor_torch"),
        )
    ),
    Line(
        "models in the memory of 4 predicting tasks",
        "predict",
        predict.titled(predict.HUGE_WORK),
        predict.MODELS,
    ),
    *(
        Line(
            f"first predictions after a fit{how}",
            "predict",
            predict.AFTER_FIT,
            predict.FIRST,
            "",
            ours,
        )
        for ours, how in (("ours", ""), ("ours_daemon", ", with `distributor.spark.daemon`"))
    ),
    Line(
        "rendezvous of 1,000 simulated nodes",
        "scale",
        scale.titled(1000),
        scale.RENDEZVOUSED,
        "floor_sockets",
    ),
)


def summary(results: dict[str, Any]) -> str:
    """Lay the main figures out as a table in Markdown; what was not measured is left out."""
    return _table(LINES, results)


def highlights(results: dict[str, Any]) -> str:
    """Lay the README's figures out as a table in Markdown."""
    return _table([line for line in LINES if line.in_readme], results)


def _table(lines: Sequence[Line], results: dict[str, Any]) -> str:
    figures = [(line, _figures(line, results)) for line in lines]
    return markdown(HEAD, [(line.title, *figures) for line, figures in figures if figures[0]])


def _figures(line: Line, results: dict[str, Any]) -> list[str]:
    rows = results.get(line.benchmark, {"rows": []})["rows"]
    found = {
        row["peer"]: row for row in rows if (row["case"], row["what"]) == (line.case, line.what)
    }
    others = PEERS if line.ours == "ours" else (NOTHING,) * len(PEERS)
    figures = [figure(found.get(peer)) for peer in (line.ours, *others)]
    plain = figure(found.get(line.plain))
    return [*figures, f"{plain}: {PLAIN[line.plain]}" if plain else NOTHING]


def figure(row: dict[str, Any] | None) -> str:
    """Return a row's median with its unit; nothing without a row."""
    if row is None or row["median"] is None:
        return NOTHING
    median = row["median"]
    return f"{_short(median)} {row['unit']}" if row["unit"] else f"{median:.2f}"


def _short(number: float) -> str:
    """Return a number as text; three digits of a large one, which is a rate and not a count."""
    if number >= 1e6:
        return f"{number / 1e6:.3g} million"
    if number >= 1e4:
        number = float(f"{number:.3g}")
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay cells out as a table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows))
