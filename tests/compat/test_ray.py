"""A canary for what `distributor._compat.ray` uses of Ray that no other test would notice."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from support.canary import relies_on

from distributor._compat import ray as private

pytestmark = [
    pytest.mark.repository,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]


def test_the_file_with_the_address_and_the_variables() -> None:
    from ray._common.utils import get_ray_address_file
    from ray._private import ray_constants

    with relies_on("ray", "the file that ray start writes", "ray.ADDRESS_FILE"):
        assert get_ray_address_file("/folder") == f"/folder/{private.ADDRESS_FILE}"
    with relies_on("ray", "a variable for the end of a node", "ray.VARIABLES"):
        for name in private.VARIABLES:
            assert hasattr(ray_constants, name)
