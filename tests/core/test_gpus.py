"""GPUs on a machine without the package that finds them, such as an executor."""

from __future__ import annotations

import sys

import pytest

from distributor.core import gpus
from distributor.diagnosis.machine import examine, machine_checks


@pytest.fixture(autouse=True)
def without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


def test_no_gpu_is_found() -> None:
    assert (gpus.gpu_names(), gpus.gpu_usage(), gpus.driver_version()) == ([], [], None)


def test_a_type_of_gpu_needs_the_package() -> None:
    assert gpus.missing_gpus("H100", 2) == (
        "the run needs 2 GPUs of type H100, and without the package nvidia-ml-py nobody can say "
        "whether there are any: install it there ('pip install nvidia-ml-py')"
    )


def test_doctor_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributor.core.gpus.find_spec", lambda name: None)
    found = {check.name: check for check in machine_checks(examine("localhost"), 2)}
    assert found["GPUs"].fix == "Install nvidia-ml-py, without which no GPU is found."
