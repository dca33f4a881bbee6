"""Clusters that require TLS, which connections between nodes do not have."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distributor import DeepspeedTorchDistributor, TorchDistributor

IGNORE_SSL = {
    TorchDistributor: "pytorch.spark.distributor.ignoreSsl",
    DeepspeedTorchDistributor: "deepspeed.spark.distributor.ignoreSsl",
}


@pytest.fixture
def encrypted(spark: Any) -> Iterator[Any]:
    """Set the session's cluster to require encryption."""
    spark.conf.set("spark.ssl.enabled", "true")
    yield spark
    for key in ("spark.ssl.enabled", *IGNORE_SSL.values()):
        spark.conf.unset(key)


def made(kind: Any) -> Any:
    """Return a distributor of two CPU ranks on the cluster."""
    if kind is TorchDistributor:
        return TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120)
    return DeepspeedTorchDistributor(2, localMode=False, useGpu=False, timeout=120)


@pytest.mark.spark
@pytest.mark.parametrize(("kind", "other"), list(itertools.permutations(IGNORE_SSL)))
def test_required_encryption_is_an_error_unless_it_is_waived(
    encrypted: Any, warned: Callable[[], list[str]], kind: Any, other: Any
) -> None:
    """Each class has a waiver of its own, with which each run warns."""
    encrypted.conf.set(IGNORE_SSL[other], "true")
    with pytest.raises(RuntimeError, match=f"{kind.__name__} .*{IGNORE_SSL[kind]}"):
        made(kind).run(print, "not run")
    local = TorchDistributor(2, use_gpu=False)
    assert local.run(int) == 0, "local mode needs no encryption"
    assert warned() == []

    encrypted.conf.set(IGNORE_SSL[kind], "true")
    distributor = made(kind)
    for runs in (1, 2):
        assert distributor.run(lambda: "trained") == "trained"
        assert len([text for text in warned() if "encryption" in text]) == runs
