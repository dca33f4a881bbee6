"""Datasets of PyTorch that are one rank's share already."""

from __future__ import annotations

from torch.utils.data import ConcatDataset, Subset


class RankShare:
    """A dataset that samplers and data loaders must not divide among the ranks."""

    rows_of_all_ranks: int


def is_rank_share(dataset: object) -> bool:
    """Return whether a dataset is one rank's share, or consists of such datasets."""
    if isinstance(dataset, Subset):
        return is_rank_share(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(map(is_rank_share, dataset.datasets))
    return isinstance(dataset, RankShare)


def rows_of_all_ranks(dataset: object) -> int:
    """Return the rows of all ranks of which a dataset has one rank's share."""
    if isinstance(dataset, Subset):
        return rows_of_all_ranks(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return sum(map(rows_of_all_ranks, dataset.datasets))
    return dataset.rows_of_all_ranks if isinstance(dataset, RankShare) else 0
