"""The software versions that nodes must share, and the error if they differ."""

from __future__ import annotations

import cloudpickle
import pytest

from distributor.core.versions import check_alike, pickling_software, software
from distributor.errors import ExecutorNotReady


def test_equal_versions_are_accepted_and_the_driver_needs_no_torch() -> None:
    check_alike({"a": software(), "b": software(), "the driver": pickling_software()})
    assert software()["cloudpickle"] == cloudpickle.__version__
    assert {"Python", "torch"} <= software().keys()


@pytest.mark.parametrize("name", ["Python", "torch", "gadget"])
def test_a_difference_names_versions_and_hosts(name: str) -> None:
    found = {f"host{number}": {name: "1.0", **software()} for number in range(6)}
    found["host3"][name] = "0.1"

    with pytest.raises(ExecutorNotReady) as caught:
        check_alike(found)

    assert f"differ in {name}: 0.1 on host3; " in str(caught.value)
    assert f"{found['host0'][name]} on host0, host1, host2 and 2 more." in str(caught.value)
    assert "\n" not in str(caught.value), "it travels through Spark as one line"
