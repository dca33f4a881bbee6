"""A rank's batches: which rows, in what form, prepared ahead, and after a restart."""

from __future__ import annotations

import doctest
import gc
import pickle
import threading
import traceback
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tables import TableSource, points, shard_of
from support.waiting import until
from test_tensors import VECTOR, dense, sparse

from distributor import DistributorError
from distributor.data import DatasetShard, shard
from distributor.rank import context as contexts

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)
BATCH = st.integers(1, 50)


def ids(batches: Any) -> list[int]:
    """Return the numbers of the rows in batches."""
    return list(chain(*(batch["id"].tolist() for batch in batches)))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "distributor-batches"]


@pytest.fixture
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Return a function after which shards resume from a position."""

    def resume_from(position: Any) -> None:
        monkeypatch.setattr(contexts._context, "register_loader", lambda *_: position)

    return resume_from


def test_the_examples_run() -> None:
    globs = {"shard": shard_of(points([6, 4]))}
    result = doctest.testmod(shard, extraglobs=globs)
    assert result.failed == 0
    assert result.attempted > 4


@given(SIZES, BATCH, st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 2))
def test_batches_have_their_size_and_each_row_once(
    sizes: list[int], batch: int, ranks: int, shuffle: bool, drop_last: bool, ahead: int
) -> None:
    source = points(sizes)
    seen = []
    for rank in range(ranks):
        share = shard_of(source, rank, ranks)
        options = {"drop_last": drop_last, "shuffle": shuffle, "prefetch_batches": ahead}
        batches = [b["id"].tolist() for b in share.iter_torch_batches(batch_size=batch, **options)]
        rows = share.count()
        lengths = [batch] * (rows // batch) + ([] if drop_last else [rows % batch])
        assert [len(found) for found in batches] == [length for length in lengths if length]
        seen += chain(*batches)
    assert len(set(seen)) == len(seen)
    if not drop_last:
        assert sorted(seen) == list(range(sum(sizes)))
        assert shuffle or seen == sorted(seen)


def test_each_pass_is_the_next_epoch() -> None:
    share = shard_of(points([30]))
    batches = share.iter_torch_batches(batch_size=8, shuffle=True)
    epochs = [ids(batches) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(30))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    share.set_epoch(1)
    assert ids(batches) == epochs[1]
    assert ids(share.iter_batches(batch_size=8, shuffle=True)) == epochs[2]


def test_the_rest_of_an_epoch_keeps_its_order(checkpoints: Callable[[Any], Any]) -> None:
    share = shard_of(points([30]))
    whole = ids(share.iter_torch_batches(batch_size=10, shuffle=True, seed=3))
    share.set_epoch(0)
    passed = iter(share.iter_torch_batches(batch_size=10, shuffle=True, seed=3))
    assert next(passed)["id"].tolist() == whole[:10]
    checkpoints(share.position())

    resumed = shard_of(points([30]))
    assert resumed.position() == share.position(), "before the first batch, too"
    again = resumed.iter_torch_batches(batch_size=4, shuffle=True, seed=8)
    assert ids(again) == whole[10:]
    assert sorted(ids(again)) == list(range(30))


def test_another_dataset_begins_the_epoch_again(
    checkpoints: Callable[[Any], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    share = shard_of(points([30]))
    next(iter(share.iter_torch_batches(batch_size=10)))
    checkpoints(share.position())
    assert ids(shard_of(points([31])).iter_torch_batches()) == list(range(31))
    assert "30 rows of points, which has 31 now: epoch 0 begins again" in capsys.readouterr().out


def test_the_position_is_never_ahead_of_other_ranks(checkpoints: Callable[[Any], Any]) -> None:
    """With windows as batches ranks are not in lockstep, and rows that are dropped are done."""
    windows = shard_of(points([30]), 0, 2)
    next(iter(windows.iter_torch_batches(batch_size=None)))
    assert windows.position()["history"] == []
    dropped = shard_of(points([30]))
    assert len(list(dropped.iter_torch_batches(batch_size=20, drop_last=True))) == 1
    assert (dropped.position()["epoch"], dropped.position()["history"]) == (1, [])


def test_rows_on_another_node_are_an_error() -> None:
    source = points([3, 4])
    share = shard_of(TableSource(source.tables, missing=frozenset([1])))
    with pytest.raises(DistributorError, match=r"did not know the checkpoint's position"):
        list(share.iter_torch_batches(batch_size=3))


BAD: list[tuple[dict[str, Any], Any, str]] = [
    ({"batch_size": 0}, ValueError, "batch_size must be at least 1, but is 0"),
    ({"device": "gpu"}, ValueError, "device must be .auto. or a device of torch"),
    ({"collate_fn": len, "fill": 0}, ValueError, "fill and collate_fn exclude"),
    ({"fill": {"ids": 0}}, ValueError, "names .ids., but the columns of points are"),
]


def test_bad_arguments_are_errors_of_the_call() -> None:
    share = shard_of(points([3]))
    for arguments, error, message in BAD:
        with pytest.raises(error, match=message):
            share.iter_torch_batches(**arguments)
    with pytest.raises(ValueError, match="batch_format must be one of 'default', 'numpy'"):
        share.iter_batches(batch_format="tensors")
    maps = pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))
    share = shard_of(TableSource([pa.table({"options": maps})]))
    for call in (share.iter_torch_batches, share.dataset, share.iterable):
        with pytest.raises(TypeError, match=r"options.*has no tensor"):
            call()


def test_formats() -> None:
    vectors = [dense(1, 2), sparse(2, {1: 3}), sparse(2, {1: 3})]
    columns = {
        "id": [0, 1, 2],
        "name": ["a", "b", None],
        "pixels": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32())),
        "fixed": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2)),
        "ragged": [[1], [1, 2], []],
        "struct": [{"a": [1], "b": None}, {"a": [], "b": "x"}, None],
    }
    table = pa.table({**columns, "v": pa.array(vectors, VECTOR)})
    source = TableSource([table.slice(0, 2), table.slice(2)], vectors=frozenset("v"))
    share = shard_of(source)
    assert share.names == share.schema().names == [*columns, "v"]
    for batch_format in ("numpy", "default"):
        [arrays] = share.iter_batches(batch_format=batch_format)
        assert arrays["name"].tolist() == ["a", "b", None]
        assert arrays["pixels"].tolist() == [[1, 2], [3, 4], [5, 6]]
        assert arrays["pixels"].dtype == np.float32
        assert [list(value) for value in arrays["ragged"]] == [[1], [1, 2], []]
        assert arrays["v"].tolist() == [[1, 2], [0, 3], [0, 3]]
        arrays["id"] += 1
    [frame] = share.iter_batches(batch_format="pandas")
    assert isinstance(frame, pd.DataFrame)
    assert frame["id"].tolist() == [0, 1, 2], "changed batches do not change the rows"
    assert list(map(list, frame["v"])) == [[1, 2], [0, 3], [0, 3]]
    for batch_format in ("pyarrow", None):
        [found] = share.iter_batches(batch_format=batch_format)
        assert found.equals(table)
        [shuffled] = share.iter_batches(batch_format=batch_format, shuffle=True, seed=2)
        assert shuffled["id"].to_pylist() != [0, 1, 2]
        assert shuffled.sort_by("id").to_pylist() == table.to_pylist()
    rows = [{**row, "v": list(row["v"])} for row in share.iter_rows()]
    assert [row["v"] for row in rows] == [[1, 2], [0, 3], [0, 3]]
    assert [row["struct"] for row in rows] == columns["struct"]


class ArrowBatchCollateFn:
    """Named as Ray's class."""

    def __call__(self, batch: pa.Table) -> torch.Tensor:
        return torch.tensor(sum(batch["id"].to_pylist()))


def test_collate_fn() -> None:
    share = shard_of(points([6]))
    for collate in (lambda batch: torch.as_tensor(batch["id"]).sum(), ArrowBatchCollateFn()):
        sums = share.iter_torch_batches(batch_size=3, collate_fn=collate)
        assert [batch.item() for batch in sums] == [3, 12]


def test_batches_are_prepared_ahead_and_the_thread_ends() -> None:
    made = []
    share = shard_of(points([100]))

    def collate(batch: Any) -> Any:
        made.append(threading.current_thread())
        return batch

    batches = iter(share.iter_torch_batches(batch_size=10, prefetch_batches=3, collate_fn=collate))
    assert made == [], "nothing is made before it is wanted"
    next(batches)
    until(lambda: len(made) == 4, "three batches are ready", 20)
    assert share.position()["history"] == [[1, 10]], "batches that are ready are not read yet"
    assert set(made) == set(threads())
    assert made[0].daemon
    del batches
    gc.collect()
    until(lambda: not threads(), "the thread of an abandoned pass ends", 20)
    assert len(made) == 4
    for _ in share.iter_torch_batches(batch_size=10, prefetch_batches=0, collate_fn=collate):
        assert made[-1] is threading.current_thread()


def test_an_error_in_the_thread_is_raised_with_its_traceback() -> None:
    def collate(batch: Any) -> Any:
        raise ArithmeticError("row 5")

    batches = shard_of(points([9])).iter_torch_batches(batch_size=4, collate_fn=collate)
    with pytest.raises(ArithmeticError, match="row 5") as raised:
        next(iter(batches))
    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "collate"
    until(lambda: not threads(), "the thread ends", 20)


def test_a_shard_can_be_pickled_and_held_in_memory() -> None:
    share = shard_of(points([5, 5]), 1, 2)
    next(iter(share.iter_torch_batches(batch_size=2)))
    copied: DatasetShard = pickle.loads(pickle.dumps(share))
    assert copied.position() == share.position()
    for each in (copied, share.materialize()):
        assert ids(each.iter_batches()) == [5, 6, 7, 8, 9]
