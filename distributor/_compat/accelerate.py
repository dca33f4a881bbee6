"""The private API of Accelerate that data loaders depend on; Accelerate is not imported."""

from __future__ import annotations


def mark_as_prepared(loader: object) -> None:
    """Have ``Accelerator.prepare`` return a data loader as it is, without sharding it again."""
    loader._is_accelerate_prepared = True  # type: ignore[attr-defined]
