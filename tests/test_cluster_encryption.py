"""Clusters that require TLS, which connections between nodes do not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distributor import TorchDistributor

IGNORE_SSL = "pytorch.spark.distributor.ignoreSsl"


@pytest.fixture
def encrypted(spark: Any) -> Iterator[Any]:
    """Set the session's cluster to require encryption."""
    spark.conf.set("spark.ssl.enabled", "true")
    yield spark
    spark.conf.unset("spark.ssl.enabled")
    spark.conf.unset(IGNORE_SSL)


@pytest.mark.spark
@pytest.mark.parametrize("ignored", [None, "false"])
@pytest.mark.parametrize("use_gpu", [False, True])
def test_required_encryption_is_an_error(
    encrypted: Any, use_gpu: bool, ignored: str | None
) -> None:
    if ignored:
        encrypted.conf.set(IGNORE_SSL, ignored)
    with pytest.raises(RuntimeError, match="This cluster has TLS encryption enabled") as raised:
        TorchDistributor(2, local_mode=False, use_gpu=use_gpu)
    assert f"you may set '{IGNORE_SSL}' to 'true'" in str(raised.value)


@pytest.mark.spark
def test_a_waiver_of_encryption_is_a_warning(
    encrypted: Any, warned: Callable[[], list[str]]
) -> None:
    encrypted.conf.set(IGNORE_SSL, "true")
    ranks = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120)
    (warning,) = warned()
    assert "sent between nodes unencrypted" in warning
    assert ranks.run(lambda: "trained") == "trained"


@pytest.mark.spark
def test_local_mode_needs_no_encryption(encrypted: Any, warned: Callable[[], list[str]]) -> None:
    TorchDistributor(2, local_mode=True, use_gpu=False)
    assert warned() == []
