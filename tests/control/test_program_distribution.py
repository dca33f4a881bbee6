"""Which node receives a large program from where."""

from __future__ import annotations

import math

import pytest

from distributor.control.program_distribution import FAN_OUT, ProgramDistribution
from distributor.wire.messages import ProgramSource, ProgramStored


class Nodes:
    """Nodes that receive what a distribution sends them."""

    def __init__(self) -> None:
        self.sources: dict[int, ProgramSource] = {}
        self.stored: list[int] = []
        self.distribution = ProgramDistribution(self.receive)

    def receive(self, node: int, message: ProgramSource | ProgramStored) -> None:
        if isinstance(message, ProgramStored):
            self.stored.append(node)
        else:
            assert node not in self.sources, "one source for each node"
            self.sources[node] = message

    def depth(self, node: int) -> int:
        address = self.sources[node].address
        return 1 if address is None else 1 + self.depth(address[1])


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100, 1000])
def test_sources_are_a_tree_whose_depth_grows_as_the_logarithm(nodes: Nodes, count: int) -> None:
    for node in range(count):
        nodes.distribution.want(node, f"folder {node}")
    served: list[int] = []
    while len(served) < count:
        new = sorted(nodes.sources.keys() - set(served))
        assert new, "nobody waits for ever"
        for node in new:
            nodes.distribution.relay("a host", node)
            served.append(node)

    children = [source.address for source in nodes.sources.values()]
    assert max(children.count(address) for address in children) <= FAN_OUT
    assert children.count(None) == min(count, FAN_OUT), "the driver sends each byte twice"
    assert max(map(nodes.depth, range(count))) <= math.ceil(math.log2(count + 2)) + 1


def test_one_node_of_a_folder_receives_and_the_others_wait_for_it(nodes: Nodes) -> None:
    for node in range(3):
        nodes.distribution.want(node, "shared")
    assert nodes.sources == {0: ProgramSource(None)}
    nodes.distribution.stored(0, "shared")
    assert nodes.stored == [1, 2]
    nodes.distribution.want(3, "shared")
    assert nodes.stored == [1, 2, 3]


def test_nodes_that_pass_nothing_on_free_their_source_when_they_are_done(nodes: Nodes) -> None:
    for node in range(5):
        nodes.distribution.want(node, f"folder {node}")
    assert set(nodes.sources) == {0, 1}
    for node in range(5):
        nodes.distribution.stored(node, f"folder {node}")
    assert set(nodes.sources.values()) == {ProgramSource(None)}
    assert set(nodes.sources) == set(range(5))


def test_nodes_are_preferred_to_the_driver_as_sources(nodes: Nodes) -> None:
    nodes.distribution.want(0, "folder 0")
    nodes.distribution.relay("a host", 0)
    nodes.distribution.stored(0, "folder 0")
    for node in (1, 2):
        nodes.distribution.want(node, f"folder {node}")
        assert nodes.sources[node] == ProgramSource(("a host", 0))
