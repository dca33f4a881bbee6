"""Each error of the package is on the troubleshooting page, with the text that it really has."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.error_classes import error_classes
from support.pages import texts_of_error

from distributor import TorchDistributor, train
from distributor.train.torch import TorchTrainer
from distributor.wire import sealing

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.repository
ERRORS = error_classes()
HANDLED_INSIDE = {"NodeStopped", "RefusedError", "Resized"}


def ranks(number: int = 1, **settings: Any) -> TorchDistributor:
    return TorchDistributor(number, use_gpu=False, **{"timeout": 100, **settings})


def worker_died() -> None:
    ranks().run(os._exit, 3)


def unpicklable_value() -> None:
    ranks().run(threading.Lock)


def run_timeout() -> None:
    ranks(timeout=0.5).run(time.sleep, 60)


def wrong_variable() -> None:
    environment = {"DISTRIBUTOR_CACHE_GB": "many"}
    ranks(environment=["einops"], env=environment).run(os.getpid)


def worker_group_error(folder: Path) -> None:
    TorchTrainer(
        lambda: {}["x"],
        scaling_config=train.ScalingConfig(num_workers=1, local_mode=True),
        run_config=train.RunConfig(storage_path=folder, settings={"timeout": 100}),
    ).fit()


def unsupported_parameter() -> None:
    train.ScalingConfig(label_selector={"zone": "a"})


def not_authentic() -> None:
    sealing.unseal(sealing.seal(b"failure", b"s" * 32), b"t" * 32)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("WorkerDied", worker_died),
        ("UnpicklableError", unpicklable_value),
        ("RunTimeout", run_timeout),
        ("ExecutorNotReady", wrong_variable),
        ("WorkerGroupError", worker_group_error),
        ("UnsupportedParameter", unsupported_parameter),
        ("NotAuthentic", not_authentic),
    ],
)
def test_the_text_of_an_error_is_documented(
    name: str, cause: Callable[..., None], tmp_path: Path
) -> None:
    arguments = [tmp_path] if cause.__code__.co_argcount else []
    with pytest.raises(ERRORS[name]) as caught:
        cause(*arguments)
    assert any(text.search(str(caught.value)) for text in texts_of_error(name)), str(caught.value)


def test_every_error_has_an_entry() -> None:
    missing = [name for name in ERRORS.keys() - HANDLED_INSIDE if not texts_of_error(name)]
    assert missing == []
