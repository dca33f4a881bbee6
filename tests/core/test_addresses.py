"""Parsing and formatting of hosts and ports."""

from __future__ import annotations

import pytest

from distributor.core.addresses import bare, joined, port_range, split_address


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("host", ("host", 0)),
        ("10.0.0.1:7077", ("10.0.0.1", 7077)),
        ("[fd00::2]", ("fd00::2", 0)),
        ("[fe80::1%eth0]:5000", ("fe80::1%eth0", 5000)),
    ],
)
def test_an_address_has_a_host_and_an_optional_port(address: str, parts: tuple[str, int]) -> None:
    assert split_address("hub_address", address) == parts


def test_hosts_and_ports_are_joined_and_ranges_include_both_ends() -> None:
    assert bare("[::1]") == bare("::1") == "::1"
    assert joined("::1", 80) == joined("[::1]", 80) == "[::1]:80"
    assert joined("host", 80) == "host:80"
    assert port_range("rank_ports", "29500-29599") == range(29500, 29600)
    assert port_range("rank_ports", "29500") == range(29500, 29501)
