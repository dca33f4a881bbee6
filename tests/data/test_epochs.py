"""Which rows each rank reads: every row once, in shares of equal size, also after restarts."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distributor.data.epochs import Epoch, Equal, Layout, Order, Span

CHUNKS = st.lists(st.integers(0, 40), min_size=1, max_size=12)
RANKS = st.integers(1, 5)
ORDERS = st.builds(
    Order, st.booleans(), st.none() | st.integers(1, 30), st.integers(0, 3), st.booleans()
)
ATTEMPTS = st.lists(st.tuples(RANKS, st.integers(0, 60)), max_size=3)


def layout_of(rows: list[int], equal: Equal = False, split: bool = True) -> Layout:
    chunk_rows = np.array(rows, dtype=np.int64)
    # Large rows, so that windows end inside a rank's share.
    return Layout(chunk_rows, chunk_rows * 1024 * 1024, equal, split)


def rows_of(layout: Layout, spans: list[Span]) -> list[int]:
    """Return the numbers of the rows that spans consist of, in their order."""
    begins = np.cumsum(layout.chunk_rows) - layout.chunk_rows
    found: list[int] = []
    for span in spans:
        window = np.concatenate(
            [begins[chunk] + np.arange(start, stop) for chunk, start, stop in span.pieces]
        )
        order = span.permutation()
        rows = window[span.begin : span.end] if order is None else window[order]
        found += rows.tolist()
    assert layout.row_numbers(spans).tolist() == found
    return found


@given(CHUNKS, RANKS, ORDERS, st.integers(0, 2))
def test_each_row_is_read_once(rows: list[int], ranks: int, order: Order, epoch: int) -> None:
    """Equal shares drop or repeat fewer rows than there are ranks."""
    total = sum(rows)
    lengths = {False: None, "drop": total // ranks, "pad": -(-total // ranks)}
    for equal, length in lengths.items():
        layout = layout_of(rows, equal)  # type: ignore[arg-type]
        shares = [rows_of(layout, layout.plan(Epoch(epoch, order), r, ranks)) for r in range(ranks)]
        counts = Counter(chain(*shares))
        assert [len(share) for share in shares] == layout.rows_per_rank(ranks)
        if equal is False:
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
        else:
            assert layout.rows_per_rank(ranks) == [length] * ranks
        if equal != "pad":
            assert set(counts.values()) <= {1}
        if equal != "drop":
            assert set(counts) == set(range(total))


def read_in_attempts(
    layout: Layout, attempts: list[tuple[int, int]], ranks: int, order: Order
) -> tuple[list[int], list[list[int]]]:
    """Return the rows that attempts have read, and each rank's share of the rest of the epoch."""
    epoch = Epoch(1, order)
    seen: list[int] = []
    for attempt_ranks, read in attempts:
        for rank in range(attempt_ranks):
            seen += rows_of(layout, layout.plan(epoch, rank, attempt_ranks))[:read]
        epoch = epoch.after(attempt_ranks, read)
    shares = [rows_of(layout, layout.plan(epoch, rank, ranks)) for rank in range(ranks)]
    return seen, shares


@given(CHUNKS, ATTEMPTS, RANKS, ORDERS)
def test_after_restarts_on_other_numbers_of_ranks_each_row_is_read_once(
    rows: list[int], attempts: list[tuple[int, int]], ranks: int, order: Order
) -> None:
    layout = layout_of(rows)
    seen, shares = read_in_attempts(layout, attempts, ranks, order)
    assert sorted(chain(seen, *shares)) == list(range(sum(rows)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(CHUNKS, ATTEMPTS, RANKS, ORDERS)
def test_after_restarts_fewer_rows_than_ranks_are_dropped(
    rows: list[int], attempts: list[tuple[int, int]], ranks: int, order: Order
) -> None:
    layout = layout_of(rows, "drop")
    seen, shares = read_in_attempts(layout, attempts, ranks, order)
    assert len({len(share) for share in shares}) == 1
    read_rows = [*seen, *chain(*shares)]
    assert len(read_rows) == len(set(read_rows)) > sum(rows) - ranks


def test_a_shuffled_epoch_has_an_order_of_its_own() -> None:
    layout = layout_of([50, 50])
    shuffled = Order(shuffle=True, seed=3)
    first, again, second = (
        rows_of(layout, layout.plan(Epoch(number, shuffled), 0, 1)) for number in (0, 0, 1)
    )
    assert first == again != second
    assert sorted(first) == sorted(second) == list(range(100))


def test_a_dataset_that_is_not_split_is_read_whole() -> None:
    layout = layout_of([3, 4], split=False)
    rest = Epoch(0, Order()).after(2, 5)
    for rank in range(3):
        assert rows_of(layout, layout.plan(Epoch(0, Order()), rank, 3)) == list(range(7))
        assert rows_of(layout, layout.plan(rest, rank, 3)) == [5, 6]
