"""The software versions that nodes must share, and the error if they differ."""

from __future__ import annotations

import platform

import cloudpickle
import pytest
import torch

from distributor.core.versions import check_alike, pickling_software, software
from distributor.errors import ExecutorNotReady


def test_versions_are_those_of_this_interpreter() -> None:
    assert platform.python_version().startswith(software()["Python"] + ".")
    assert software()["cloudpickle"] == cloudpickle.__version__
    # The metadata of wheels from PyPI lack the local part, such as +cu121.
    assert software()["torch"] in (torch.__version__, torch.__version__.partition("+")[0])
    assert software().items() >= pickling_software().items()


def test_equal_versions_are_accepted_and_the_driver_needs_no_torch() -> None:
    check_alike({"a": software(), "b": software(), "the driver": pickling_software()})


def test_a_difference_in_installed_packages_is_reported() -> None:
    found = {"host0": {"gadget": "1.0"}, "host1": {"gadget": "2.0"}, "the driver": {}}
    with pytest.raises(ExecutorNotReady) as caught:
        check_alike({host: {**software(), **versions} for host, versions in found.items()})

    assert "differ in gadget: 1.0 on host0; 2.0 on host1. Name one in environ" in str(caught.value)


@pytest.mark.parametrize("name", ["Python", "torch", "cloudpickle"])
def test_a_difference_names_versions_and_hosts(name: str) -> None:
    found = {f"host{number}": {**software()} for number in range(6)}
    found["host3"][name] = "0.1"

    with pytest.raises(ExecutorNotReady) as caught:
        check_alike(found)

    assert f"differ in {name}: 0.1 on host3; " in str(caught.value)
    assert f"{software()[name]} on host0, host1, host2 and 2 more." in str(caught.value)
    assert "PYSPARK_PYTHON" in str(caught.value)
    assert "\n" not in str(caught.value), "it travels through Spark as one line"
