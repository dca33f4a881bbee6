"""Clusters that require TLS, which connections between nodes do not have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distributor import DeepspeedTorchDistributor, TorchDistributor

IGNORE_SSL = {
    TorchDistributor: "pytorch.spark.distributor.ignoreSsl",
    DeepspeedTorchDistributor: "deepspeed.spark.distributor.ignoreSsl",
}
both_classes = pytest.mark.parametrize("kind", list(IGNORE_SSL))


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


@pytest.fixture
def pysparks_text(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Any], str]:
    """Return a function that returns what PySpark's class raises or logs, without line breaks."""
    from pyspark.ml.deepspeed import deepspeed_distributor
    from pyspark.ml.torch import distributor

    originals = {
        TorchDistributor: distributor.TorchDistributor,
        DeepspeedTorchDistributor: deepspeed_distributor.DeepspeedTorchDistributor,
    }
    # PySpark's own function changes the logger's level.
    monkeypatch.setattr(distributor, "_get_logger", logging.getLogger)

    def text_of(kind: Any) -> str:
        caplog.clear()
        count = (2,) if kind is TorchDistributor else (2, 1)
        original: Any = originals[kind](*count, False, False)
        try:
            original._check_encryption()
        except RuntimeError as error:
            text = str(error)
        else:
            (text,) = (record.getMessage() for record in caplog.records)
        caplog.clear()
        return " ".join(text.split())

    return text_of


@pytest.mark.spark
@both_classes
@pytest.mark.parametrize("ignored", [None, "false"])
def test_required_encryption_is_an_error_of_the_run(
    encrypted: Any, pysparks_text: Callable[[Any], str], kind: Any, ignored: str | None
) -> None:
    if ignored:
        encrypted.conf.set(IGNORE_SSL[kind], ignored)
    distributor = made(kind)
    with pytest.raises(RuntimeError) as raised:
        distributor.run(print, "not run")
    assert str(raised.value) == pysparks_text(kind)
    assert f"you may set '{IGNORE_SSL[kind]}'" in str(raised.value)


@pytest.mark.spark
@both_classes
def test_a_waiver_of_encryption_is_a_warning_of_each_run(
    encrypted: Any,
    pysparks_text: Callable[[Any], str],
    warned: Callable[[], list[str]],
    kind: Any,
) -> None:
    encrypted.conf.set(IGNORE_SSL[kind], "true")
    expected = pysparks_text(kind)

    def warnings_of_encryption() -> list[str]:
        return [text for text in warned() if "encryption" in text]

    distributor = made(kind)
    assert warnings_of_encryption() == []
    for runs in (1, 2):
        assert distributor.run(lambda: "trained") == "trained"
        assert warnings_of_encryption() == [expected] * runs
    encrypted.conf.set("spark.ssl.enabled", "false")
    assert distributor.run(lambda: "trained") == "trained"
    assert warnings_of_encryption() == [expected] * runs


@pytest.mark.spark
def test_each_class_has_its_own_waiver(encrypted: Any) -> None:
    encrypted.conf.set(IGNORE_SSL[TorchDistributor], "true")
    with pytest.raises(RuntimeError, match="DeepspeedTorchDistributor does not support"):
        made(DeepspeedTorchDistributor).run(print, "not run")


@pytest.mark.spark
def test_local_mode_needs_no_encryption(encrypted: Any, warned: Callable[[], list[str]]) -> None:
    assert TorchDistributor(2, local_mode=True, use_gpu=False).run(int) == 0
    assert warned() == []
