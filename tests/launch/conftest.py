"""Fixtures for tests of the driver's part."""

from __future__ import annotations

import pytest
from support.driver_output import DriverOutput


@pytest.fixture
def driver() -> DriverOutput:
    return DriverOutput()
