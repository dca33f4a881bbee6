"""A model's outputs for rows of Parquet files: their rate, and the model's loads and memory."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import loaders
from benchmarks.functions import MEGABYTE
from benchmarks.launchers import ray_cluster
from benchmarks.loaders import ARRAY, BATCH, LABEL, SCALARS, bare_batches
from benchmarks.measure import Driven, apart
from benchmarks.packages import library
from benchmarks.peers import Peer
from benchmarks.report import Row, gathered, row
from benchmarks.spark import session
from benchmarks.turns import Effort, measured
from distributor.core.versions import DISTRIBUTION

Load = Callable[[], Any]
Outputs = Callable[[], tuple[int, float]]
"""Computes the outputs of all rows; returns how many they are, and their sum."""
Prepare = Callable[[str, Sequence[str], Load], Outputs]
"""Prepares that for a folder, the columns of the model's input, and what loads the model."""

CORES = 2
TASKS = 4
"""Tasks at once when memory is measured."""
SMALL, LARGE = (32,), (2048, 2048)
"""The widths of a model's hidden layers."""
HUGE = (7000, 7000)
"""A model of 200 MB."""
LATER_RUNS = 3
SECONDS = 2.0
"""That a batch takes when memory is measured, so that each task has a worker of its own."""
RATE = "rows/s"
LOADS = f"loads of the model by an executor, {1 + LATER_RUNS} passes"
MEMORY = f"weights of {TASKS} tasks (PSS)"
AFTER_FIT = "after a fit on 2 ranks"
FIRST = "first rows"
MODELS = f"models in the memory of {TASKS} tasks"
QUICKER = 20
"""How many times fewer rows the quick measurements have."""
DEADLINE = 900.0


class Work(NamedTuple):
    """Rows, and the model that gets them."""

    kind: str
    rows: int
    hidden: tuple[int, ...]

    @property
    def columns(self) -> list[str]:
        return ["pixels"] if self.kind == ARRAY else [f"x{i}" for i in range(16)]

    @property
    def width(self) -> int:
        return 784 if self.kind == ARRAY else 16


ARRAYS_WORK = Work(ARRAY, 200_000, SMALL)
SCALARS_WORK = Work(SCALARS, 2_000_000, SMALL)
LARGE_WORK = Work(ARRAY, 80_000, LARGE)
HUGE_WORK = Work(SCALARS, 1_600, HUGE)
MORE_ROWS = {ARRAYS_WORK: 800_000, SCALARS_WORK: 8_000_000}
OTHER_ROWS = {
    "ours_parquet": MORE_ROWS,
    "floor_torch": MORE_ROWS,
    "ray": {ARRAYS_WORK: 50_000, SCALARS_WORK: 1_000_000, LARGE_WORK: 20_000},
}
"""For quick and for slow ways: a pass takes seconds, beside which a job's start counts little."""


def load(width: int, hidden: Sequence[int], marks: str) -> Any:
    """Return a model that has the same weights each time, and record that it was loaded."""
    import torch

    _mark(marks)
    torch.manual_seed(0)
    sizes = width, *hidden
    layers = [
        layer for pair in pairwise(sizes) for layer in (torch.nn.Linear(*pair), torch.nn.ReLU())
    ]
    return torch.nn.Sequential(*layers, torch.nn.Linear(sizes[-1], 1))


def load_slow(width: int, hidden: Sequence[int], marks: str) -> Any:
    """Return a model that takes its time, and records the processes that use it."""
    model = load(width, hidden, os.devnull)
    model.register_forward_pre_hook(partial(_mark_and_wait, marks))
    return model


def _mark(marks: str) -> None:
    with Path(marks).open("a") as file:
        file.write(f"{os.getpid()}\n")


def _mark_and_wait(marks: str, *_: Any) -> None:
    _mark(marks)
    time.sleep(SECONDS)


def matrix(batch: Any) -> Any:
    """Return the model's input: the tensor of one column, or several columns side by side."""
    import torch

    return torch.stack(list(batch.values()), 1) if isinstance(batch, dict) else batch


@contextmanager
def dataframe(place: str) -> Iterator[Prepare]:
    """Pass a DataFrame to this project's ``predict``."""
    with session(place) as spark:
        yield lambda folder, *work: _predicted(spark.read.parquet(folder), *work)


@contextmanager
def parquet(place: str) -> Iterator[Prepare]:
    """Pass Parquet files to this project's ``predict``."""
    from distributor.data import from_parquet

    with session(place):
        yield lambda folder, *work: _predicted(from_parquet(folder), *work)


def _predicted(data: Any, columns: Sequence[str], load: Load) -> Outputs:
    from distributor.data import predict

    frame = predict(
        data,
        load,
        columns=columns[0] if len(columns) == 1 else columns,
        keep=[LABEL],
        outputs="p float",
        batch_size=BATCH,
        collate_fn=matrix,
    )
    return partial(_summed, frame)


def _summed(frame: Any) -> tuple[int, float]:
    found = frame.selectExpr("count(p)", "sum(cast(p as double))").first()
    return found[0], found[1]


@contextmanager
def pyspark(place: str) -> Iterator[Prepare]:
    """Use PySpark's ``predict_batch_udf``."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import functions
    from pyspark.sql.types import FloatType

    def prepare(folder: str, columns: Sequence[str], load: Load) -> Outputs:
        def make() -> Callable[[Any], Any]:
            import numpy as np
            import torch

            model = load().eval()

            def predict(values: Any) -> Any:
                with torch.inference_mode():
                    return model(torch.from_numpy(np.float32(values))).numpy().reshape(-1)

            return predict

        rows = spark.read.parquet(folder)
        column = functions.col(columns[0]) if len(columns) == 1 else functions.array(*columns)
        width = 784 if len(columns) == 1 else len(columns)
        udf = predict_batch_udf(
            make, return_type=FloatType(), batch_size=BATCH, input_tensor_shapes=[[width]]
        )
        return partial(_summed, rows.select(LABEL, udf(column).alias("p")))

    with session(place) as spark:
        yield prepare


@contextmanager
def nothing(place: str) -> Iterator[Prepare]:
    """Pass the rows through a ``mapInArrow`` without a model."""

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for batch in batches:
            outputs = pa.nulls(len(batch), pa.float32()).fill_null(0)
            yield pa.RecordBatch.from_arrays([batch.column(LABEL), outputs], [LABEL, "p"])

    with session(place) as spark:
        yield lambda folder, columns, load: partial(
            _summed, spark.read.parquet(folder).mapInArrow(task, f"{LABEL} long, p float")
        )


@contextmanager
def ray(place: str) -> Iterator[Prepare]:
    """Use Ray Data's ``map_batches``, with an actor for each core."""
    with ray_cluster(CORES):
        data = library("ray.data")

        def prepare(folder: str, columns: Sequence[str], load: Load) -> Outputs:
            def outputs() -> tuple[int, float]:
                predicted = data.read_parquet(folder).map_batches(
                    _Actor,
                    batch_size=BATCH,
                    fn_constructor_args=(columns, load),
                    compute=data.ActorPoolStrategy(size=CORES),
                )
                rows, total = 0, 0.0
                for batch in predicted.iter_batches(batch_size=None, batch_format="numpy"):
                    rows += len(batch["p"])
                    total += float(batch["p"].sum(dtype=float))
                return rows, total

            return outputs

        yield prepare


class _Actor:
    """A model of Ray Data."""

    def __init__(self, columns: Sequence[str], load: Load) -> None:
        import torch

        torch.set_num_threads(1)
        self._columns, self._model = columns, load().eval()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import numpy as np
        import torch

        values = [batch[name] for name in self._columns]
        rows = np.stack(list(values[0])) if len(values) == 1 else np.stack(values, 1)
        with torch.inference_mode():
            outputs = self._model(torch.from_numpy(rows)).reshape(-1).numpy()
        return {LABEL: batch[LABEL], "p": outputs}


@contextmanager
def alone(place: str) -> Iterator[Prepare]:
    """Read the files by pyarrow in one process, whose torch has all the cores."""
    import torch

    def prepare(folder: str, columns: Sequence[str], load: Load) -> Outputs:
        model, files = load().eval(), sorted(Path(folder).glob("*.parquet"))

        def outputs() -> tuple[int, float]:
            rows, total = 0, 0.0
            with torch.inference_mode():
                for batch in bare_batches(files):
                    inputs = {name: batch[name] for name in columns}
                    found = model(matrix(inputs if len(columns) > 1 else inputs[columns[0]]))
                    rows += len(found)
                    total += float(found.sum(dtype=torch.float64))
            return rows, total

        return outputs

    torch.set_num_threads(CORES)
    yield prepare


WAYS = {
    peer.name: peer
    for peer in (
        Peer("ours", "distributor, a DataFrame", dataframe, DISTRIBUTION),
        Peer("ours_parquet", "distributor, from_parquet", parquet, DISTRIBUTION),
        Peer("pyspark", "predict_batch_udf", pyspark, "pyspark"),
        Peer("ray", "Ray Data's map_batches", ray, "ray", note="loads the model in each pass"),
        Peer("floor_arrow", "floor: mapInArrow without a model", nothing, "pyspark"),
        Peer("floor_torch", "floor: torch in one process", alone, "torch"),
    )
}
FOR_MEMORY = ("ours", "ours_parquet", "pyspark")
DAEMON = {"spark.python.daemon.module": "distributor.spark.daemon"}
FIRST_WAYS = {
    peer.name: peer
    for peer in (
        Peer("ours", "distributor", session, DISTRIBUTION),
        Peer(
            "ours_daemon",
            "distributor, distributor.spark.daemon",
            partial(session, **DAEMON),
            DISTRIBUTION,
        ),
    )
}
"""With Spark's Python workers, and with those that share an imported torch."""


class Case(NamedTuple):
    """A way to predict, and what it computes."""

    peer: Peer
    work: Work

    @property
    def title(self) -> str:
        return titled(self.work)


class FirstCase(NamedTuple):
    """A way to predict after a fit in the same session."""

    peer: Peer

    @property
    def title(self) -> str:
        return AFTER_FIT


def titled(work: Work) -> str:
    """Return the title of a case; rates are compared between different numbers of rows."""
    return f"{work.kind}, hidden layers of {' and '.join(f'{size:,}' for size in work.hidden)}"


def measure(effort: Effort) -> list[Row]:
    """Measure predictions."""
    peers = _selected(WAYS, effort)
    fewer = QUICKER if effort.quick else 1
    rates = [
        Case(peer, work._replace(rows=_rows_of(peer, work) // fewer))
        for work in (ARRAYS_WORK, SCALARS_WORK, LARGE_WORK)
        for peer in peers
    ]
    memory = [Case(peer, HUGE_WORK) for peer in peers if peer.name in FOR_MEMORY]
    with tempfile.TemporaryDirectory() as folder:
        tables = {(case.work.kind, case.work.rows): _data(folder, case) for case in rates + memory}
        apart(loaders.write_rows, DEADLINE, tables=[(*key, at) for key, at in tables.items()])
        found = measured(rates, effort.few_rounds, lambda case: _drive(drive, folder, case), _rates)
        found += measured(
            memory, effort.few_rounds, lambda case: _drive(drive_memory, folder, case), _memory
        )
    first = [FirstCase(peer) for peer in _selected(FIRST_WAYS, effort)]
    return found + measured(
        first,
        effort.few_rounds,
        lambda case: apart(drive_first, DEADLINE, peer=case.peer.name),
        lambda case, driven: [row(case.peer, case.title, FIRST, gathered(driven, "seconds"))],
    )


def _selected(ways: dict[str, Peer], effort: Effort) -> list[Peer]:
    return [each for each in ways.values() if not effort.families or each.family in effort.families]


def drive(peer: str, folder: str, kind: str, rows: int, hidden: list[int]) -> dict[str, Any]:
    """Predict several times in one driver; the first time is apart from the others."""
    work, marks = Work(kind, rows, tuple(hidden)), str(Path("loads").resolve())
    with WAYS[peer].open(f"local[{CORES}]") as prepare:
        model = partial(load, work.width, work.hidden, marks)
        outputs = prepare(folder, work.columns, model)
        rates = [_rate(outputs, rows) for _ in range(1 + LATER_RUNS)]
    return {"rates": rates[1:], "loads": len(_marked(marks))}


def drive_memory(peer: str, folder: str, kind: str, rows: int, hidden: list[int]) -> dict[str, Any]:
    """Measure by how much the memory of Spark's workers grows with a model."""
    work, sizes = Work(kind, rows, tuple(hidden)), []
    with WAYS[peer].open(f"local[{TASKS}]") as prepare:
        for number, layers in enumerate((SMALL, work.hidden)):
            marks = str(Path(f"workers {number}").resolve())
            model = partial(load_slow, work.width, layers, marks)
            prepare(folder, work.columns, model)()
            workers = set(_marked(marks))
            if len(workers) != TASKS:
                raise RuntimeError(f"{len(workers)} workers used the model, not {TASKS}")
            sizes.append(_pss_of_interpreters())
    weights = sum(each.numel() * 4 for each in load(work.width, hidden, os.devnull).parameters())
    grown = sizes[1] - sizes[0]
    return {"memory": grown, "models": grown / weights}


def drive_first(peer: str) -> dict[str, Any]:
    """Train a model in Spark ML, and predict a first row several times."""
    import torch

    from distributor.ml import TorchEstimator

    with FIRST_WAYS[peer].open(f"local[{CORES}]") as opened:
        spark: Any = opened
        points = spark.range(0, 2000, 1, CORES)
        points = points.selectExpr("array(rand(1), rand(2)) features", "id % 2 label").cache()
        estimator = TorchEstimator(
            module=torch.nn.Linear(2, 2),
            loss=torch.nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD,
            stepSize=0.1,
            num_processes=CORES,
        )
        model, seconds = estimator.fit(points), []
        for _ in range(LATER_RUNS):
            began = time.perf_counter()
            if model.transform(points).first() is None:
                raise RuntimeError("there is no row")
            seconds.append(time.perf_counter() - began)
    return {"seconds": seconds}


def _rate(outputs: Outputs, rows: int) -> float:
    began = time.perf_counter()
    found, total = outputs()
    seconds = time.perf_counter() - began
    if found != rows or total != total:
        raise RuntimeError(f"{found} rows of {rows} have outputs, the sum of which is {total}")
    return rows / seconds


def _pss_of_interpreters() -> int:
    """Return the memory of Spark's Python processes, in which shared pages count once."""
    family = library("psutil").Process().children(recursive=True)
    return sum(each.memory_full_info().pss for each in family if "python" in each.name())


def _marked(file: str) -> list[str]:
    return Path(file).read_text().split() if Path(file).exists() else []


def _rows_of(peer: Peer, work: Work) -> int:
    return OTHER_ROWS.get(peer.name, {}).get(work, work.rows)


def _data(folder: str, case: Case) -> str:
    return str(Path(folder, f"{case.work.kind}, {case.work.rows} rows"))


def _drive(function: Callable[..., dict[str, Any]], folder: str, case: Case) -> Driven:
    parameters = case.work._asdict()
    return apart(function, DEADLINE, peer=case.peer.name, folder=_data(folder, case), **parameters)


def _rates(case: Case, measurements: list[Driven]) -> list[Row]:
    rates, loads = gathered(measurements, "rates"), gathered(measurements, "loads")
    found = [row(case.peer, case.title, RATE, rates, "rows/s", f"{case.work.rows:,} rows")]
    if any(loads) and not case.peer.name.startswith("floor"):
        found.append(row(case.peer, case.title, LOADS, loads, "loads"))
    return found


def _memory(case: Case, measurements: list[Driven]) -> list[Row]:
    sizes = [size / MEGABYTE for size in gathered(measurements, "memory")]
    return [
        row(case.peer, case.title, MEMORY, sizes, "MB"),
        row(case.peer, case.title, MODELS, gathered(measurements, "models"), ""),
    ]
