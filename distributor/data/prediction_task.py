"""A task of a prediction: batches of Arrow, or row groups of files, go through the model."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import socket
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial, wraps
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import pyarrow as pa
import torch

from distributor.core.cell_errors import format_users_part
from distributor.core.files import atomic_path, lock_exclusively, private_folder
from distributor.core.resources import spark_local_dirs
from distributor.data.batches import (
    PART_BYTES,
    Converted,
    Format,
    batches_of,
    converted_tables,
    prefetched,
    rows_of_part,
    whole,
)
from distributor.data.outputs import named_outputs, to_arrow, type_of
from distributor.data.parquet import ParquetSource
from distributor.data.tensors import TensorOptions, tensor_format
from distributor.rank.context import move
from distributor.serialization import code_pickle
from distributor.spark.shipped_files import modules_from

# The first worker loads the model and saves it in the executor's local folder. All map that file,
# so that its pages, which the kernel may drop and read again, are the tensors. There is no process
# to end, and nothing to free: Spark removes the folder with the executor.

T = TypeVar("T")
MAX_FILES = 4  # of an executor: those used last
LOADING_SECONDS = 3600.0
"""Seconds to wait for another Python worker of the executor that loads the same model."""


def load_once(key: str, load: Callable[[], T]) -> T:
    """Return what `load` returns, which only one of an executor's Python workers calls.

    The others call it too if there are no tensors in what it returns, such as in a function that
    uses a global variable, or if that cannot be pickled.
    """
    folder = _folder()
    if folder is None:
        return load()
    path = folder / key
    if not path.exists():
        with (folder / f"{key}.lock").open("w") as lock:
            lock_exclusively(
                lock.fileno(),
                LOADING_SECONDS,
                f"Another Python worker of this executor on {socket.gethostname()} has been "
                f"loading the model for more than {LOADING_SECONDS:g} s. If load hangs there, "
                "the executor's stderr, or a stack of that process, shows where.",
            )
            if not path.exists():
                value = load()
                if not _saved(value, path):
                    return value
                del value  # its memory, before the file is mapped
                _remove_oldest(folder)
    with contextlib.suppress(FileNotFoundError):  # removed by a worker that has loaded another one
        if path.stat().st_size:
            os.utime(path)
            return cast(T, _mapped(path))
    return load()


def _folder() -> Path | None:
    for folder in spark_local_dirs():
        with contextlib.suppress(OSError):
            return private_folder(Path(folder, "distributor-models"))
    return None


def _saved(value: Any, path: Path) -> bool:
    """Save a model for the other workers, or an empty file if they must load it themselves."""
    try:
        # Settings of torch, which `load` may have changed in this process.
        precision = torch.get_float32_matmul_precision()
        settings = torch.get_num_threads(), precision, torch.get_default_dtype()
        with atomic_path(path) as partial:
            torch.save(
                (value, *settings),
                partial,
                pickle_module=code_pickle,
                pickle_protocol=pickle.HIGHEST_PROTOCOL,
            )
            with zipfile.ZipFile(partial) as file:
                has_tensors = any("/data/" in name for name in file.namelist())
            if has_tensors:
                _mapped(partial)
            else:
                partial.write_bytes(b"")
        return has_tensors
    except Exception as error:  # of any type: the model's classes may pickle themselves
        print(
            "distributor.data.predict: the model cannot be shared, so that each Python worker "
            f"loads its own ({type(error).__name__}: {error}).",
            file=sys.stderr,
        )
        path.touch()
        return False


def _mapped(path: Path) -> Any:
    # Pages are copied once a process writes to them.
    value, num_threads, precision, dtype = torch.load(path, mmap=True, weights_only=False)
    torch.set_num_threads(num_threads)
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(dtype)
    return value


def _remove_oldest(folder: Path) -> None:
    # Those with a suffix are locks, and files that other workers write now.
    files = [path for path in folder.iterdir() if not path.suffix]
    with contextlib.suppress(FileNotFoundError):  # another worker removes them too
        for path in sorted(files, key=lambda path: path.stat().st_mtime)[:-MAX_FILES]:
            path.unlink()  # workers that have mapped it keep it


MAX_WAIT_SECONDS = 0.1  # for more rows of a batch
MAX_MODELS = 2  # that a Python worker keeps; those used last
_MODELS: dict[tuple[str, str], Model] = {}


@dataclass(frozen=True)
class Prediction:
    """What the tasks of a prediction do.

    Parameters
    ----------
    key : str
        Identifies the model among those of the executor.
    functions : bytes
        The pickled `load`, `collate_fn` and `checkpoint`.
    modules : str or None
        The archive of the user's modules that these need.
    names : sequence of str
        The columns that the tasks get.
    columns : str or sequence of str
        Those that the model gets: as a tensor, or as a dict of tensors.
    keep : sequence of str
        Those of the result, before the outputs.
    default : str
        The name of an output that is no dict.
    outputs : pyarrow.Schema
        The columns of the outputs; empty if they are not known yet.
    batch_size : int
        The rows that the model gets at once, at most.
    device : str or None
        The model's device; None for the task's GPU if it has one.
    options : TensorOptions
        How columns become tensors.
    source : ParquetSource or None
        Row groups, which tasks read themselves; None for rows of Spark.
    """

    key: str
    functions: bytes
    modules: str | None
    names: Sequence[str]
    columns: str | Sequence[str]
    keep: Sequence[str]
    default: str
    outputs: pa.Schema
    batch_size: int
    device: str | None
    options: TensorOptions
    source: ParquetSource | None = None

    @cached_property
    def format(self) -> Format:
        """Return how rows become what the model gets: one tensor, or a dict of tensors."""
        columns = self.columns
        return tensor_format(
            self.options, itemgetter(columns) if isinstance(columns, str) else None
        )

    def read(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        """Yield rows of the task, which gets them or the numbers of row groups."""
        if (source := self.source) is None:
            for batch in batches:
                yield pa.Table.from_arrays(batch.columns, list(self.names))
            return
        for batch in batches:
            for chunk in batch.column(0).to_pylist():
                fitting = rows_of_part(source.chunk_rows[chunk], source.chunk_bytes[chunk])
                full_batches = -(-fitting // self.batch_size) * self.batch_size
                yield from source.read_parts(chunk, full_batches)


def _joined(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Join small tables, each of which would otherwise cost more time than its rows."""
    parts: list[pa.Table] = []
    size, began = 0, 0.0
    for table in tables:
        if not parts:
            began = time.monotonic()
        parts.append(table)
        size += table.nbytes
        is_late = time.monotonic() > began + MAX_WAIT_SECONDS  # the tables come slowly
        if size >= PART_BYTES or is_late:
            yield pa.concat_tables(parts)
            parts, size = [], 0
    if parts:
        yield pa.concat_tables(parts)


class Batch(NamedTuple):
    """Rows of a partition, and what the model gets of them."""

    rows: pa.Table
    first: int  # the number of the first row in the partition
    inputs: Converted


class Model:
    """A loaded model on its device."""

    def __init__(self, prediction: Prediction, device: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        load, self._collate, checkpoint = pickle.loads(prediction.functions)
        if checkpoint is not None:
            load = partial(_load_from, checkpoint, load)
        self._device = torch.device(device)
        self._default = prediction.default
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                f"The executor on {socket.gethostname()} sees no GPU, and device is {device!r}. "
                "Start executors that have one (spark.executor.resource.gpu.amount), or leave "
                "device out, so that the model is on the CPU there."
            )
        self._model: Callable[[Any], Any] = load_once(prediction.key, load)
        if not callable(self._model):
            name = (
                "None" if self._model is None else f"a value of type {type(self._model).__name__}"
            )
            raise TypeError(
                f"load has returned {name}, which is no model. It must "
                "return a module, or a function of the batch."
            )
        if isinstance(self._model, torch.nn.Module):
            self._model = _in_evaluation(self._model.to(self._device))

    def outputs(self, batch: Any) -> dict[str, Any]:
        """Return what the model makes of a batch, by the names of columns."""
        if self._collate is not None:
            batch = self._collate(batch)
        if self._device.type != "cpu":
            batch = move(batch, self._device)
        with torch.inference_mode():
            return named_outputs(self._model(batch), self._default)


def _in_evaluation(model: torch.nn.Module) -> torch.nn.Module:
    try:
        return model.eval()
    except NotImplementedError as error:  # of torch.export
        raise TypeError(
            f"load has returned an exported module, which eval() does not support ({error}). "
            "Export the model in evaluation mode, and return a function that calls the module: "
            "lambda batch: module(batch)."
        ) from error


def _load_from(checkpoint: Any, load: Callable[[str], Any]) -> Any:
    with checkpoint.as_directory() as folder:
        return load(folder)


class _RowsFailed(RuntimeError):
    """Names the rows for which its cause was raised."""


@contextlib.contextmanager
def _explained_errors() -> Iterator[None]:
    """Raise errors whose messages have the traceback of the user's functions.

    PySpark shows the frames of the error that a task raises, but not those of its cause.
    """
    try:
        yield
    except Exception as error:
        summary, cause = f"{type(error).__name__}: {error}", error
        if isinstance(error, _RowsFailed) and isinstance(error.__cause__, Exception):
            summary, cause = str(error), error.__cause__
        raise RuntimeError(f"{summary}\n\n{format_users_part(cause)}".rstrip()) from None


@contextlib.contextmanager
def _unpickled(argument: bytes) -> Iterator[Prediction]:
    with _explained_errors():
        prediction: Prediction = pickle.loads(argument)
        with modules_from(prediction.modules):
            yield prediction


def predict_rows(
    argument: bytes, batches: Iterator[pa.RecordBatch], _: str
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a partition with the model's outputs; a task of ``mapInArrow``."""
    with _unpickled(argument) as prediction:
        part, model = _begin(prediction)
        # While the model computes, a thread receives or reads what comes next, and converts it.
        for batch in prefetched(_converted(prediction, batches, part), 1):
            yield _predicted(prediction, model, batch, part)


def load_function(argument: bytes, _: Iterator[Any], __: str) -> Iterator[Callable[..., Any]]:
    """Yield the function of `predict_batch_udf`, which the executor has loaded once."""
    key, functions, modules = pickle.loads(argument)
    with _explained_errors(), modules_from(modules):
        [make_predict_fn] = pickle.loads(functions)
        found = load_once(key, make_predict_fn)

    @wraps(found)  # PySpark looks at the parameters
    def predict_fn(*columns: Any) -> Any:
        with _explained_errors(), modules_from(modules):  # it may import one when it is called
            return found(*columns)

    yield predict_fn


def describe_outputs(
    argument: bytes, batches: Iterator[pa.RecordBatch], _: str
) -> Iterator[pa.RecordBatch]:
    """Yield the columns for the model's outputs, as a schema; a task of ``mapInArrow``."""
    with _unpickled(argument) as prediction:
        part, model = _begin(prediction)
        batch = next(_converted(prediction, batches, part), None)
        if batch is None:
            return
        with _errors_name_rows(part, batch.first, batch.rows.num_rows):
            inputs = next(batches_of([batch.inputs], prediction.format))[1]
            found = model.outputs(inputs)
            schema = pa.schema([(name, type_of(value, name)) for name, value in found.items()])
    serialized = pa.array([schema.serialize().to_pybytes()])
    yield pa.RecordBatch.from_arrays([serialized], ["schema"])


def _begin(prediction: Prediction) -> tuple[int, Model]:
    """Return the number of this task's partition, and the model, loaded if it is not yet."""
    from pyspark import TaskContext

    _freeze_modules()
    context: Any = TaskContext.get()
    device = prediction.device or _device_of(context)
    key = prediction.key, device
    model = _MODELS.pop(key, None) or Model(prediction, device, context.cpus())
    _MODELS[key] = model
    while len(_MODELS) > MAX_MODELS:
        del _MODELS[next(iter(_MODELS))]
    return context.partitionId(), model


@cache
def _freeze_modules() -> None:
    """Leave what is imported out of the garbage collection that PySpark does after each task.

    With torch it would take a tenth of a second.
    """
    gc.collect()
    gc.freeze()


def _device_of(context: Any) -> str:
    """Return the GPU that Spark has assigned to the task, or the first that it sees, or the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    gpus = context.resources().get("gpu")
    address = gpus.addresses[0] if gpus is not None and gpus.addresses else ""
    # Addresses are positions among the GPUs that the executor sees.
    is_seen = address.isdecimal() and int(address) < torch.cuda.device_count()
    return f"cuda:{address}" if is_seen else "cuda"


def _converted(
    prediction: Prediction, batches: Iterator[pa.RecordBatch], part: int
) -> Iterator[Batch]:
    columns = prediction.columns
    names = [columns] if isinstance(columns, str) else list(columns)
    first = 0
    for table in _joined(prediction.read(batches)):
        inputs = converted_tables([table.select(names)], prediction.format, prediction.batch_size)
        while table.num_rows:
            with _errors_name_rows(part, first, table.num_rows):
                converted = next(inputs)
            yield Batch(table.slice(0, converted.rows), first, converted)
            table = table.slice(converted.rows)
            first += converted.rows


def _predicted(prediction: Prediction, model: Model, batch: Batch, part: int) -> pa.RecordBatch:
    kinds = {field.name: field.type for field in prediction.outputs}
    columns: dict[str, list[pa.Array]] = {name: [] for name in kinds}
    first = batch.first
    for num_rows, inputs in batches_of([batch.inputs], prediction.format):
        with _errors_name_rows(part, first, num_rows):
            found = model.outputs(inputs)
            if found.keys() != kinds.keys():
                raise ValueError(
                    f"The model has returned {', '.join(found) or 'nothing'}, and the outputs are "
                    f"{', '.join(kinds)}."
                )
            for name, kind in kinds.items():
                columns[name].append(to_arrow(found[name], kind, num_rows, name))
        first += num_rows
    kept = [whole(batch.rows.column(name)) for name in prediction.keep]
    predicted = [pa.concat_arrays(parts) for parts in columns.values()]
    return pa.RecordBatch.from_arrays([*kept, *predicted], [*prediction.keep, *kinds])


@contextlib.contextmanager
def _errors_name_rows(part: int, first: int, num_rows: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        where = f"rows {first:,} to {first + num_rows - 1:,} of partition {part}"
        raise _RowsFailed(f"{type(error).__name__} for {where}: {error}") from error
