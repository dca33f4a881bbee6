"""A part of ``make chaos``: every day some faults in a local run, else the others and a cluster."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chaos import ACTIVITIES, FAULTS, ORDINARY, Case, bed, hurt, side_by_side
from support.cluster import Cluster

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has supervisors")
ROOT = Path(__file__).parent.parent
EVERY_DAY = ("a rank is killed", "a rank's parent is killed", "a listener never returns")
ON_A_CLUSTER = ("an executor is killed", ORDINARY)


@pytest.mark.repository
def test_the_guarantees_show_the_results() -> None:
    found = (ROOT / "benchmarks" / "results" / "chaos.txt").read_text()
    page = ROOT / "docs" / "explanation" / "guarantees.md"
    assert side_by_side(found.splitlines()) in page.read_text()


@pytest.fixture(scope="module")
def machine() -> Iterator[Cluster]:
    with bed("local") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Start a cluster that works without root."""
    with bed("cluster", apart=False) as cluster:
        yield cluster


def local_faults() -> Iterator[Any]:
    for fault, activity in zip(FAULTS["local"], itertools.cycle(ACTIVITIES), strict=False):
        marks = [] if fault in EVERY_DAY else [pytest.mark.slow]
        yield pytest.param(fault, activity, marks=marks)


@pytest.mark.parametrize(("fault", "activity"), list(local_faults()))
def test_a_faulty_run_reports_its_cause_and_leaves_nothing(
    machine: Cluster, fault: str, activity: str
) -> None:
    [result] = hurt(machine, Case("local", "warm", fault), [activity], times=1)

    assert result.spotless, result


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("fault", ON_A_CLUSTER)
def test_a_faulty_run_on_a_cluster_does_so_too(cluster: Cluster, fault: str) -> None:
    case = Case("cluster", "ordinary" if fault == ORDINARY else "warm", fault)
    results = hurt(cluster, case, ["ignores SIGTERM", "reduces"], times=2)

    assert all(result.spotless for result in results), results
