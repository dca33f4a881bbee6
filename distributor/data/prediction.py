"""`predict`: the plan of a prediction, after all checks that need no rows."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from distributor._compat import pyspark as private
from distributor.core.extras import require_spark
from distributor.data.dataframes import is_dataframe, numbered, vectors_of
from distributor.data.outputs import ELEMENTS, arrow_type
from distributor.data.parquet import ParquetShard
from distributor.data.prediction_task import Prediction
from distributor.data.shard import Dtypes, Ragged
from distributor.data.share import whole_number
from distributor.data.tensors import TensorOptions, check_columns
from distributor.errors import UnpicklableError
from distributor.serialization import code_pickle
from distributor.serialization.pickle_diagnostics import find_unpicklable
from distributor.spark.package_shipping import portable_task
from distributor.spark.session import Session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DEFAULT_OUTPUT = "prediction"
PARTITION_BYTES = 64 * 1024 * 1024  # of Parquet files' rows in memory, in a task


def predict(
    data: DataFrame | ParquetShard,
    load: Callable[[], Callable[[Any], Any]],
    *,
    columns: str | Sequence[str] | None = None,
    outputs: str | None = None,
    keep: Sequence[str] | None = None,
    batch_size: int = 1024,
    collate_fn: Callable[[Any], Any] | None = None,
    device: str | None = None,
    dtypes: Dtypes = None,
    fill: Any = None,
    ragged: Ragged = "error",
) -> DataFrame:
    """Return a DataFrame with a model's outputs for each row.

    It is lazy, as any DataFrame: its rows are computed when they are used. Each Python worker of
    Spark loads the model once, and keeps it for later tasks; it keeps the two models used last.

    Rows of a DataFrame go through Spark's conversion to Arrow data, which often takes longer than
    the model. Tasks read the row groups of Parquet files themselves, without it: pass what
    `from_parquet` returns.

    Parameters
    ----------
    data : pyspark.sql.DataFrame or DatasetShard
        Rows, of classic Spark or Spark Connect; or Parquet files, as `from_parquet` returns them.
    load : callable
        Returns the model: a module, which is moved to the device and set to evaluation, or a
        callable. It is called in the Python workers. The model gets tensors without gradients, and
        returns a tensor with a value for each row along its first dimension, or a dict of tensors
        by the names of columns. It may also return arrays of numpy and lists of strings.
    columns : str or sequence of str, optional
        The columns that the model gets: the tensor of one column, or a dict of tensors by the names
        of several. Strings are lists. By default, a dict of all columns.
    outputs : str, optional
        The names and types of the model's outputs, such as ``"label int, scores array<float>"``.
        The types are boolean, tinyint, smallint, int, bigint, float, double, string, and arrays of
        these. By default a job finds them, by the model's outputs for two rows; an output that is
        no dict is ``prediction`` then.
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
    rows = _FileRows(data) if isinstance(data, ParquetShard) else _SparkRows(data)
    batch_size = whole_number("batch_size", batch_size, 1)
    schema = rows.schema()
    inputs = schema.names if columns is None else columns
    _check_names("columns", [inputs] if isinstance(inputs, str) else inputs, schema.names)
    if not inputs:
        raise ValueError("columns is empty: name at least one column for the model.")
    if isinstance(keep, str):
        raise TypeError(f"keep must be a list of names, but is the string {keep!r}.")
    kept = list(schema.names if keep is None else keep)
    _check_names("keep", kept, schema.names)
    _check_callable("load", load)
    if collate_fn is not None:
        _check_callable("collate_fn", collate_fn)
    if device is not None:
        torch.device(device)
    needed = {inputs} if isinstance(inputs, str) else set(inputs)
    options = TensorOptions(dtypes, fill, ragged, rows.vectors() & needed)
    check_columns(_arrow_schema(schema, needed), options, None, rows.name)
    named = {} if outputs is None else _parse_outputs(outputs)
    plan = Prediction(
        key=uuid.uuid4().hex,
        functions=_pickled(load, collate_fn),
        names=[name for name in schema.names if name in needed or name in kept],
        columns=inputs if isinstance(inputs, str) else list(inputs),
        keep=kept,
        default=next(iter(named)) if len(named) == 1 else DEFAULT_OUTPUT,
        outputs=named,
        batch_size=batch_size,
        device=device,
        options=options,
    )
    if outputs is None:
        plan = replace(plan, outputs=rows.described(plan))
    if taken := sorted(plan.outputs.keys() & set(kept)):
        raise ValueError(
            f"{taken[0]!r} is an output, and also a column of the rows. Name the outputs otherwise "
            "(outputs=...), or leave the column out (keep=...)."
        )
    task = "distributor.data.prediction_task:predict_rows"
    planned: DataFrame = rows.planned(plan, task, _result(schema, plan))
    return planned


def _arrow_schema(schema: Any, names: set[str]) -> pa.Schema:
    """Return the types of some columns as a task gets them."""
    from pyspark.sql.types import StructType

    found: pa.Schema = private.arrow_schema(StructType([schema[name] for name in names]))
    return found


def _result(schema: Any, plan: Prediction) -> Any:
    """Return the columns of the result."""
    from pyspark.sql.types import StructType

    kinds = [(name, arrow_type(kind)) for name, kind in plan.outputs.items()]
    outputs = private.spark_schema(pa.schema(kinds))
    return StructType([*(schema[name] for name in plan.keep), *outputs])


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
        self._session = Session(frame.sparkSession)

    def schema(self) -> Any:
        return self._frame.schema

    def vectors(self) -> frozenset[str]:
        return vectors_of(self._frame)

    def described(self, plan: Prediction) -> dict[str, str]:
        if self._frame.isStreaming:
            raise ValueError(
                "A streaming DataFrame has no rows yet to find the model's outputs with. Name "
                "them: outputs='score float'."
            )
        return _described(_mapped(self._session, self._rows(plan).limit(2), plan, *_DESCRIBE))

    def planned(self, plan: Prediction, task: str, schema: Any) -> Any:
        return _mapped(self._session, self._rows(plan), plan, task, schema)

    def _rows(self, plan: Prediction) -> Any:
        columns = self._frame.columns
        return numbered(self._frame).select(*(f"c{columns.index(name)}" for name in plan.names))


class _FileRows:
    """The rows of Parquet files."""

    def __init__(self, shard: ParquetShard) -> None:
        self._groups = shard.row_groups
        self._session = Session.require_active()
        self.name = self._groups.name

    def schema(self) -> Any:
        return private.spark_schema(self._groups.schema)

    def vectors(self) -> frozenset[str]:
        return self._groups.vectors

    def described(self, plan: Prediction) -> dict[str, str]:
        first = int(np.flatnonzero(self._groups.chunk_rows)[0])
        return _described(self._mapped((first, first + 1), 1, plan, *_DESCRIBE))

    def planned(self, plan: Prediction, task: str, schema: Any) -> Any:
        groups = len(self._groups.chunk_rows)
        parts = self._session.num_partitions(self._groups.chunk_bytes.sum(), PARTITION_BYTES)
        return self._mapped((0, groups), parts and min(parts, groups), plan, task, schema)

    def _mapped(
        self, groups: tuple[int, int], parts: int | None, plan: Prediction, task: str, schema: Any
    ) -> Any:
        fields = [self._groups.schema.field(name) for name in plan.names]
        plan = replace(plan, source=replace(self._groups, schema=pa.schema(fields)))
        numbers = self._session.spark.range(*groups, 1, parts)
        return _mapped(self._session, numbers, plan, task, schema)


_DESCRIBE = "distributor.data.prediction_task:describe_outputs", "name string, type string"


def _mapped(session: Session, frame: Any, plan: Prediction, task: str, schema: Any) -> Any:
    return session.map_in_arrow(frame, portable_task(session, task, pickle.dumps(plan)), schema)


def _described(frame: Any) -> dict[str, str]:
    found = {row.name: row.type for row in frame.collect()}
    if not found:
        raise ValueError(
            "There are no rows to find the model's outputs with. Name them: outputs='score float'."
        )
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


def _pickled(*functions: Any) -> bytes:
    try:
        return code_pickle.dumps(functions)
    except Exception as error:
        for name, function in zip(("load", "collate_fn"), functions, strict=True):
            if culprit := find_unpicklable(name, function):
                raise UnpicklableError(f"{name} cannot be sent to executors: {culprit}.") from error
        raise UnpicklableError(f"load cannot be sent to executors: {error}") from error


def _parse_outputs(text: str) -> dict[str, str]:
    """Parse names and types, such as "label int, scores array<float>"."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, _, kind = part.strip().partition(" ")
        kind = _ALIASES.get(kind := "".join(kind.lower().split()), kind)
        try:
            arrow_type(kind)
        except KeyError:
            raise ValueError(
                f"outputs is {text!r}, in which {part.strip()!r} is no name with a type of "
                f"{', '.join(ELEMENTS)}, or an array of these, such as 'scores array<float>'."
            ) from None
        if name in found:
            raise ValueError(f"outputs is {text!r}, in which {name!r} is there twice.")
        found[name] = kind
    return found


_ALIASES = {"integer": "int", "long": "bigint", "short": "smallint", "byte": "tinyint"}
