"""Ways to read rows as batches of tensors on each rank, and the data that they read.

Each yields a function ``read(folder, rows, epochs)``, which returns what rank 0 measured.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.launchers import ray_cluster
from benchmarks.packages import library
from benchmarks.spark import LOCAL, session

Read = Callable[..., dict[str, Any]]
Batch = dict[str, Any]

BATCH = 1024
"""Rows of a batch."""
FILES = 16
LABEL = "label"
SCALARS, ARRAY, IMAGE = "16 floats", "an array of 784 floats", "an image of 3 kB"
COLUMNS = {
    SCALARS: [f"cast((id * {31 + 2 * i}) % 10007 / 10007 as float) as x{i}" for i in range(16)],
    ARRAY: ["transform(sequence(0, 783), i -> cast((id + i) % 256 / 255 as float)) as pixels"],
    IMAGE: ["cast(repeat(sha2(cast(id as string), 256), 48) as binary) as image"],
}
"""What a row consists of besides its label, in Spark's SQL."""


def write_rows(tables: list[tuple[str, int, str]]) -> dict[str, Any]:
    """Write Parquet files, always the same ones, for each kind and number of rows into a folder."""
    with session(f"local[{os.cpu_count()}]") as spark:
        for kind, rows, folder in tables:
            numbers = spark.range(0, rows, 1, FILES)
            numbers.selectExpr(*COLUMNS[kind], f"id % 10 as {LABEL}").write.parquet(folder)
    return {}


def consume(loader: Callable[[], Iterable[Batch]], epochs: int) -> dict[str, Any]:
    """Read some epochs, or the first batch if there are none, and measure.

    Returns
    -------
    dict
        The time of the first batch (since the epoch), the rows and the rate of the last epoch, and
        the memory of this process in bytes.
    """
    if not epochs:
        next(iter(loader()))
        return {"first": time.time()}
    for _ in range(epochs):
        rows = total = 0
        began = time.perf_counter()
        for batch in loader():
            rows += len(batch[LABEL])
            total += int(batch[LABEL].sum())
        rate = rows / (time.perf_counter() - began)
        if abs(total / rows - 4.5) > 15 / rows**0.5:  # ranks may have any of the rows
            raise RuntimeError(f"the mean of the labels is {total / rows}, and should be 4.5")
    return {"rows": rows, "rate": rate, **memory()}


def memory() -> dict[str, int]:
    """Return the memory of this process in bytes: its own (anonymous), and all that is resident."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").open())
    kilobytes = {name: int(status[name].split()[0]) for name in ("RssAnon", "VmRSS")}
    return {name: 1024 * value for name, value in kilobytes.items()}


@contextmanager
def dataframe(place: str, ranks: int) -> Iterator[Read]:
    """Pass a DataFrame to this project's run."""
    from distributor import TorchDistributor

    def train(shard: Any, epochs: int) -> dict[str, Any]:
        return consume(lambda: shard.iter_torch_batches(batch_size=BATCH), epochs)

    with session(place) as spark:

        def read(folder: str, rows: int, epochs: int) -> dict[str, Any]:
            frame = spark.read.parquet(folder)
            distributor = TorchDistributor(ranks, local_mode=False, use_gpu=False)
            return distributor.run(train, frame, epochs)

        yield read


@contextmanager
def parquet(place: str, ranks: int) -> Iterator[Read]:
    """Read Parquet files by this project's ``from_parquet``, without Spark."""
    from distributor import TorchDistributor
    from distributor.data.parquet import from_parquet

    def train(shard: Any, epochs: int) -> dict[str, Any]:
        return consume(lambda: shard.iter_torch_batches(batch_size=BATCH), epochs)

    def read(folder: str, rows: int, epochs: int) -> dict[str, Any]:
        distributor = TorchDistributor(ranks, local_mode=True, use_gpu=False)
        return distributor.run(train, from_parquet(folder), epochs)

    yield read


@contextmanager
def pyspark(place: str, ranks: int) -> Iterator[Read]:
    """Pass a DataFrame to PySpark's class, whose loader converts a row at a time."""
    from pyspark.ml.torch import distributor as pyspark_distributor

    def train(names: list[str], rows: int, epochs: int) -> dict[str, Any]:
        from pyspark.ml.torch import distributor as pyspark_distributor

        loader = pyspark_distributor._get_spark_partition_data_loader(rows, BATCH)

        def batches() -> Iterator[Batch]:
            return (dict(zip(names, batch, strict=True)) for batch in loader)

        return consume(batches, epochs)

    with session(place) as spark:

        def read(folder: str, rows: int, epochs: int) -> dict[str, Any]:
            # It requires as many partitions as ranks.
            frame = spark.read.parquet(folder).repartition(ranks)
            distributor = pyspark_distributor.TorchDistributor(
                ranks, local_mode=False, use_gpu=False
            )
            found: dict[str, Any] = distributor._train_on_dataframe(
                train, frame, frame.columns, rows // ranks, epochs
            )
            return found

        yield read


@contextmanager
def ray(place: str, ranks: int) -> Iterator[Read]:
    """Read Parquet files by Ray Data, in ranks of Ray Train."""
    with tempfile.TemporaryDirectory() as storage, ray_cluster(ranks):
        train, data = library("ray.train"), library("ray.data")
        trainer = library("ray.train.torch").TorchTrainer

        def loop(config: dict[str, Any]) -> None:
            shard = train.get_dataset_shard("train")
            collate = _without_image_tensors if config["images"] else None
            found = consume(
                lambda: shard.iter_torch_batches(batch_size=BATCH, collate_fn=collate),
                config["epochs"],
            )
            if train.get_context().get_world_rank() == 0:
                Path(config["file"]).write_text(json.dumps(found))

        def read(folder: str, rows: int, epochs: int) -> dict[str, Any]:
            file, rows_of_files = Path(storage, "found.json"), data.read_parquet(folder)
            images = "image" in rows_of_files.schema().names
            fitted = trainer(
                loop,
                train_loop_config={"epochs": epochs, "file": str(file), "images": images},
                datasets={"train": rows_of_files},
                scaling_config=train.ScalingConfig(num_workers=ranks),
                run_config=train.RunConfig(storage_path=storage),
            )
            fitted.fit()
            found: dict[str, Any] = json.loads(file.read_text())
            return found

        yield read


def _without_image_tensors(batch: Batch) -> Batch:
    """Leave images as they are: Ray Data's own conversion refuses binary columns."""
    import torch

    return {"image": list(batch["image"]), LABEL: torch.as_tensor(batch[LABEL])}


@contextmanager
def bare(place: str, ranks: int) -> Iterator[Read]:
    """Convert the columns of row groups by pyarrow and torch, with no package between them."""
    from benchmarks.launchers import ours

    with ours(LOCAL, ranks) as run:
        yield lambda folder, rows, epochs: run(read_bare, folder, ranks, epochs)


def read_bare(folder: str, ranks: int, epochs: int) -> dict[str, Any]:
    """Read this rank's files."""
    files = sorted(Path(folder).glob("*.parquet"))[int(os.environ["RANK"]) :: ranks]
    return consume(lambda: bare_batches(files), epochs)


def bare_batches(files: list[Path]) -> Iterator[Batch]:
    """Yield batches of the rows of files."""
    from pyarrow.parquet import ParquetFile

    for path in files:
        file = ParquetFile(path)
        for number in range(file.num_row_groups):
            table = file.read_row_group(number)
            columns = {name: converted(table[name]) for name in table.column_names}
            for start in range(0, len(table), BATCH):
                yield {name: column[start : start + BATCH] for name, column in columns.items()}


def converted(column: Any) -> Any:
    """Convert a column of a table to a tensor, or to a list."""
    import pyarrow as pa
    import torch

    whole = column.combine_chunks()
    if pa.types.is_binary(whole.type):
        return whole.to_pylist()
    if pa.types.is_list(whole.type):
        flat = torch.from_numpy(whole.flatten().to_numpy(zero_copy_only=False))
        return flat.reshape(len(whole), -1)
    return torch.from_numpy(whole.to_numpy(zero_copy_only=False))
