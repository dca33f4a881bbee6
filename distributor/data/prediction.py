"""`predict`: the plan of a prediction, after all checks that need no rows."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from distributor._compat import pyspark as private
from distributor.core.cell_errors import ends_at_caller
from distributor.core.versions import require_spark
from distributor.data.batches import whole_number
from distributor.data.dataframes import is_dataframe, numbered, vectors_of
from distributor.data.outputs import unsupported
from distributor.data.parquet import ParquetShard, leaves, spark_type
from distributor.data.prediction_task import Prediction
from distributor.data.tensors import Dtypes, Ragged, TensorOptions, check_columns
from distributor.errors import UnpicklableError
from distributor.serialization import code_pickle
from distributor.serialization.code_search import imports_of
from distributor.serialization.pickle_diagnostics import explain_parts
from distributor.spark.application import check_not_ended
from distributor.spark.session import Session
from distributor.spark.shipping import portable_task
from distributor.spark.user_modules import ship_modules

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

DEFAULT_OUTPUT = "prediction"
PARTITION_BYTES = 128 * 1024 * 1024  # of Parquet files' rows in a task, as Spark's for files


@ends_at_caller
def predict(
    data: DataFrame | ParquetShard,
    load: Callable[..., Callable[[Any], Any]],
    *,
    checkpoint: Any = None,
    columns: str | Sequence[str] | None = None,
    outputs: str | StructType | None = None,
    keep: Sequence[str] | None = None,
    batch_size: int = 1024,
    collate_fn: Callable[[Any], Any] | None = None,
    device: str | None = None,
    dtypes: Dtypes = None,
    fill: Any = None,
    ragged: Ragged = "error",
) -> DataFrame:
    """Return a DataFrame with a model's outputs for each row.

    It is lazy, as any DataFrame: its rows are computed when they are used. Each executor loads the
    model once. Its Python workers share the memory of the model's tensors, and keep the two models
    used last for later tasks. A model without tensors, or that cannot be pickled, is loaded by each
    Python worker.

    Rows of a DataFrame go through Spark's conversion to Arrow data, which often takes longer than
    the model. Tasks read the row groups of Parquet files themselves, without it: pass what
    `from_parquet` returns.

    Parameters
    ----------
    data : pyspark.sql.DataFrame or DatasetShard
        Rows, of classic Spark or Spark Connect; or Parquet files, as `from_parquet` returns them.
    load : callable
        Returns the model: a module, which is moved to the device and set to evaluation, or a
        callable. It is called on the executors. The model gets tensors without gradients, and
        returns a tensor with a value for each row along its first dimension, or a dict of tensors
        by the names of columns. It may also return arrays of numpy and lists, in which
        None is a null. Modules of the user, such as those beside the notebook, are sent to the
        executors.
    checkpoint : Checkpoint or Result, optional
        What `load` loads: it is called with the path of a local folder with the checkpoint's files.
        Of a Result it is the latest checkpoint.
    columns : str or sequence of str, optional
        The columns that the model gets: the tensor of one column, or a dict of tensors by the names
        of several. Strings are lists. By default, a dict of all columns.
    outputs : str or pyspark.sql.types.StructType, optional
        The names and types of the model's outputs, such as ``"label int, scores array<float>"``; or
        a type alone, for the output ``prediction``. The types are boolean, numbers, string, binary,
        arrays and structs of these, and ``VectorUDT()`` in a StructType. A dict in a dict is a
        struct. By default a job finds the types, by the model's outputs for two rows.
    keep : sequence of str, optional
        The columns that the result has before the outputs; by default all. Fewer are faster.
    batch_size : int, default 1024
        Rows that the model gets at once, at most.
    collate_fn : callable, optional
        Makes of the tensor or dict of tensors what the model gets, such as tokens of texts.
    device : str, optional
        The model's device, such as ``"cpu"``. By default the GPU that Spark has assigned to the
        task, or the first that the task sees, else the CPU.
    dtypes, fill, ragged : optional
        How columns become tensors, as for `DatasetShard.iter_torch_batches`.

    Returns
    -------
    pyspark.sql.DataFrame
        The kept columns, and a column for each output.

    Raises
    ------
    TypeError
        If an argument is of another type, or a column has no tensor.
    ValueError
        If a column does not exist, or exists twice, or `outputs` has another type.
    UnpicklableError
        If `load` or `collate_fn` cannot be pickled.

    Examples
    --------
    >>> def load():
    ...     model = Net()
    ...     model.load_state_dict(torch.load("/shared/model.pt"))
    ...     return model
    >>> predict(df, load, columns="features", outputs="score float").show()  # doctest: +SKIP
    """
    require_spark()
    rows: _FileRows | _SparkRows
    rows = _FileRows(data) if isinstance(data, ParquetShard) else _SparkRows(data)
    batch_size = whole_number("batch_size", batch_size, 1)
    inputs = rows.columns if columns is None else columns
    _check_names("columns", [inputs] if isinstance(inputs, str) else inputs, rows.columns)
    if not inputs:
        raise ValueError("columns is empty: name at least one column for the model.")
    if isinstance(keep, str):
        raise TypeError(f"keep must be a list of names, but is the string {keep!r}.")
    kept = list(rows.columns if keep is None else keep)
    _check_names("keep", kept, rows.columns)
    _check_callable("load", load)
    if collate_fn is not None:
        _check_callable("collate_fn", collate_fn)
    checkpoint = getattr(checkpoint, "checkpoint", checkpoint)
    if checkpoint is not None and not hasattr(checkpoint, "as_directory"):
        raise TypeError(
            "checkpoint must be a Checkpoint, or a Result that has one, but is of the type "
            f"{type(checkpoint).__name__}. Of a path, Checkpoint(path) makes one."
        )
    if device is not None:
        torch.device(device)
    needed = {inputs} if isinstance(inputs, str) else set(inputs)
    names = [name for name in rows.columns if name in needed or name in kept]
    schema = rows.schema(names)
    options = TensorOptions(dtypes, fill, ragged, rows.vectors & needed)
    check_columns(_arrow_schema(schema, needed), options, None, rows.name)
    named = None if outputs is None else _parse_outputs(outputs)
    plan = Prediction(
        key=uuid.uuid4().hex,
        functions=_pickled(load=load, collate_fn=collate_fn, checkpoint=checkpoint),
        modules=_modules(rows.session, load, collate_fn),
        names=names,
        columns=inputs if isinstance(inputs, str) else list(inputs),
        keep=kept,
        default=named.names[0] if named and len(named) == 1 else DEFAULT_OUTPUT,
        outputs=pa.schema([]),
        batch_size=batch_size,
        device=device,
        options=options,
    )
    named = named or private.spark_schema(_described(rows, plan))
    plan = replace(plan, outputs=private.arrow_schema(named))
    if taken := sorted(set(named.names) & set(kept)):
        raise ValueError(
            f"{taken[0]!r} is an output, and also a column of the rows. Name the outputs otherwise "
            "(outputs=...), or leave the column out (keep=...)."
        )
    result = type(named)([*(schema[name] for name in kept), *named])
    planned: DataFrame = rows.planned(_PREDICT, plan, result)
    return planned


@ends_at_caller
def predict_batch_udf(
    make_predict_fn: Callable[[], Callable[..., Any]], **options: Any
) -> Callable[..., Any]:
    """Return a function of columns that predicts, as PySpark's function of this name does.

    An executor loads the model once, as for `predict`. Everything else is PySpark's, which converts
    columns to pandas: `predict` is faster.

    Parameters
    ----------
    make_predict_fn : callable
        Returns a function from arrays of numpy to an array, or to a dict of arrays.
    **options
        ``return_type``, ``batch_size`` and ``input_tensor_shapes``, as for
        ``pyspark.ml.functions.predict_batch_udf``:
        https://spark.apache.org/docs/latest/api/python/reference/api/pyspark.ml.functions.predict_batch_udf.html

    Returns
    -------
    function
        It takes columns, and returns a column.

    Raises
    ------
    TypeError
        If `make_predict_fn` is no function.
    UnpicklableError
        If it cannot be pickled.

    Examples
    --------
    >>> score = predict_batch_udf(make_fn, return_type=FloatType(), batch_size=64)  # doctest: +SKIP
    >>> df.withColumn("score", score("a", "b")).show()  # doctest: +SKIP
    """
    require_spark()
    from pyspark.ml.functions import predict_batch_udf as pyspark_function

    _check_callable("make_predict_fn", make_predict_fn)
    session = Session.require_active()
    functions = _pickled(make_predict_fn=make_predict_fn)
    modules = _modules(session, make_predict_fn)
    argument = pickle.dumps((uuid.uuid4().hex, functions, modules))
    task = portable_task(session, _LOAD, argument)
    return session.column_function(pyspark_function(lambda: next(task(iter(()))), **options))


def _arrow_schema(schema: Any, names: set[str]) -> pa.Schema:
    """Return the types of some columns as a task gets them."""
    found: pa.Schema = private.arrow_schema(type(schema)([schema[name] for name in names]))
    return found


class _SparkRows:
    """The rows of a DataFrame."""

    name = "the DataFrame"

    def __init__(self, frame: Any) -> None:
        if not is_dataframe(frame):
            raise TypeError(
                "predict takes a Spark DataFrame, or Parquet files as from_parquet returns them, "
                f"but got an object of type {type(frame).__module__}.{type(frame).__name__}."
            )
        self._frame = frame
        self.session = Session(frame.sparkSession)
        check_not_ended(self.session.spark)
        self.columns: list[str] = frame.columns
        self.vectors = vectors_of(frame)

    def schema(self, names: Sequence[str]) -> Any:
        schema = self._frame.schema
        for name in names:
            try:
                _arrow_schema(schema, {name})
            except Exception as error:  # of another type in each version
                raise TypeError(
                    f"Column {name!r} of the DataFrame has the type "
                    f"{schema[name].dataType.simpleString()}, which Spark does not convert to "
                    "Arrow data. Cast it, or leave it out: name the others in columns and keep."
                ) from error
        return schema

    def planned(self, task: str, plan: Prediction, schema: Any, sample: bool = False) -> Any:
        """Return what a task makes of the rows, or of the first two."""
        columns = self._frame.columns
        rows = numbered(self._frame).select(*(f"c{columns.index(name)}" for name in plan.names))
        if sample and self._frame.isStreaming:
            raise ValueError(
                "A streaming DataFrame has no rows yet to find the model's outputs with. Name "
                "them: outputs='score float'."
            )
        return _mapped(self.session, rows.limit(2) if sample else rows, plan, task, schema)


class _FileRows:
    """The rows of Parquet files."""

    def __init__(self, shard: ParquetShard) -> None:
        self._groups = shard.row_groups
        self.session = Session.require_active()
        self.name = self._groups.name
        self.columns: list[str] = self._groups.schema.names
        self.vectors = self._groups.vectors

    def schema(self, names: Sequence[str]) -> Any:
        """Return columns with the types that ``spark.read.parquet`` reads them as."""
        from pyspark.sql.types import StructType

        return StructType([self._column(name) for name in names])

    def _column(self, name: str) -> Any:
        from pyspark.sql.types import StructField

        kind = self._kind(name)
        try:
            if (stored := self._groups.spark_types.get(name)) is not None:
                found = StructField.fromJson(copy.deepcopy(stored))  # it changes its argument
                column = StructField(name, found.dataType)
            else:
                [column] = private.spark_schema(pa.schema([(name, spark_type(kind))]))
            [field] = private.arrow_schema([column])
            pa.nulls(0, kind).cast(field.type)
            if len(leaves(kind)) != len(leaves(field.type)):  # a variant that has columns
                raise TypeError(f"It is stored otherwise than {field.type}.")
        except Exception as error:
            raise TypeError(
                f"Column {name!r} of {self.name} has the type {kind}, which Spark does not have "
                "for rows of Parquet files. Leave it out: name the others in columns and keep."
            ) from error
        return column

    def _kind(self, name: str) -> pa.DataType:
        """Return the type of a column; times in folders' names are those of the session's zone."""
        kind = self._groups.schema.field(name).type
        if name in self._groups.files[0].partition and pa.types.is_timestamp(kind):
            return pa.timestamp("us", self.session.spark.conf.get("spark.sql.session.timeZone"))
        return kind

    def planned(self, task: str, plan: Prediction, schema: Any, sample: bool = False) -> Any:
        """Return what a task makes of the rows, or of the first row group that has some."""
        first, count = 0, len(self._groups.chunk_rows)
        parts: int | None
        if sample:
            first, count, parts = int(np.flatnonzero(self._groups.chunk_rows)[0]), 1, 1
        elif parts := self.session.num_partitions(self._groups.chunk_bytes.sum(), PARTITION_BYTES):
            parts = min(parts, count)
        fields = []
        for field in private.arrow_schema(self.schema(plan.names)):
            zone = getattr(self._kind(field.name), "tz", None)
            kind = pa.timestamp("us", zone) if zone else field.type
            fields.append((field.name, kind))
        # A model may write into its input, but not into a column of the result.
        own = frozenset(name for name in plan.names if name not in plan.keep)
        plan = replace(
            plan,
            # There is a task for each core.
            source=replace(self._groups, schema=pa.schema(fields), use_threads=False),
            options=replace(plan.options, private=own),
        )
        numbers = self.session.spark.range(first, first + count, 1, parts)
        return _mapped(self.session, numbers, plan, task, schema)


_PREDICT = "distributor.data.prediction_task:predict_rows"
_DESCRIBE = "distributor.data.prediction_task:describe_outputs"
_LOAD = "distributor.data.prediction_task:load_function"


def _mapped(session: Session, frame: Any, plan: Prediction, task: str, schema: Any) -> Any:
    return session.map_in_arrow(frame, portable_task(session, task, pickle.dumps(plan)), schema)


def _described(rows: _FileRows | _SparkRows, plan: Prediction) -> pa.Schema:
    row = rows.planned(_DESCRIBE, plan, "schema binary", sample=True).first()
    if row is None:
        raise ValueError(
            "There are no rows to find the model's outputs with. Name them: outputs='score float'."
        )
    return pa.ipc.read_schema(pa.py_buffer(row.schema))


def _parse_outputs(outputs: Any) -> StructType:
    from pyspark.sql.types import DataType, StructType

    found = outputs
    example = "Write names and types, such as outputs='label int, scores array<float>'."
    if isinstance(outputs, str):
        try:
            found = private.parse_type(outputs)
        except Exception as error:  # of another type in each kind of session
            raise ValueError(f"outputs is {outputs!r}, which is no schema. {example}") from error
    if not isinstance(found, DataType):
        raise TypeError(f"outputs is of the type {type(outputs).__name__}. {example}")
    if not isinstance(found, StructType):
        found = StructType().add(DEFAULT_OUTPUT, found)
    for field in private.arrow_schema(found):
        if (kind := unsupported(field.type)) is not None:
            raise ValueError(
                f"outputs has {field.name!r} of the type {kind}, which a model cannot return. The "
                "types are numbers, boolean, string, binary, arrays and structs of these, and "
                "vectors."
            )
        if found.names.count(field.name) > 1:
            raise ValueError(f"outputs has {field.name!r} twice. Rename one of the two.")
    return found


def _check_names(argument: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(
                f"{argument} has {name!r}, which is no column. The columns are {', '.join(known)}."
            )
        if known.count(name) > 1 or names.count(name) > 1:
            raise ValueError(f"Column {name!r} is there twice ({argument}). Rename one of the two.")


def _check_callable(name: str, function: object) -> None:
    if not callable(function):
        hint = " Pass a function that returns the model." if name == "load" else ""
        raise TypeError(f"{name} must be a function, but is {type(function).__name__}.{hint}")
    if isinstance(function, torch.nn.Module) and name != "collate_fn":
        raise TypeError(
            f"{name} must be a function that returns the model, but is itself a module, "
            f"{type(function).__name__}. Write a function around it: lambda: model."
        )


def _modules(session: Session, *functions: Any) -> str | None:
    """Send the user's modules to the executors, and return the archive's name."""
    found = itertools.chain.from_iterable(map(imports_of, functions))
    return ship_modules(session, imports=frozenset(found))


def _pickled(**functions: Any) -> bytes:
    with names_unpicklable(functions):
        return code_pickle.dumps([*functions.values()])


@contextlib.contextmanager
def names_unpicklable(
    parts: Mapping[str, object], errors: type[Exception] = Exception
) -> Iterator[None]:
    """Raise an error that names the part that cannot be pickled, if the block raises one."""
    try:
        yield
    except errors as error:
        why = explain_parts(parts)
        if why is None and isinstance(error, UnpicklableError):
            raise
        raise UnpicklableError(why or str(error)) from error
