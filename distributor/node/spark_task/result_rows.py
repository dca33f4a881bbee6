"""The rows of a task: what did not reach the driver over the link."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from distributor.serialization.outcome import Value
from distributor.wire.messages import Output

if TYPE_CHECKING:
    import pyarrow as pa

ROW_SCHEMA = "rank int, part int, data binary"
"""The rows' schema, as Spark writes it. A value is split into parts, numbered from 0."""
REPORTS_PART = -1
"""The part number of a row that has pickled `Output` messages instead of a part of a value."""


def rows_of(values: Iterable[Value], reports: Sequence[Output]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of values, and one with reports if there are any."""
    for value in values:
        for part, data in enumerate(value.parts()):
            yield _row(value.rank, part, bytes(data))
    if reports:
        yield _row(reports[0].rank, REPORTS_PART, pickle.dumps(list(reports)))


def _row(rank: int, part: int, data: bytes) -> pa.RecordBatch:
    import pyarrow as pa

    schema = pa.schema([("rank", pa.int32()), ("part", pa.int32()), ("data", pa.binary())])
    columns: list[list[Any]] = [[rank], [part], [data]]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
