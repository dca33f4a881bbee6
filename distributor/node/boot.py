"""How an interpreter that is to be a rank, to keep ranks, or to fork their keepers, begins."""

from __future__ import annotations

from collections.abc import Callable

from distributor.node.order import Order


def main(role: str, argument: str, at_the_end: list[Callable[[], object]]) -> None:
    """Be a rank, at once or forked from what this process becomes."""
    if role == "rank":
        order = Order.from_argument(argument)
    elif role == "zygote":
        from distributor.node import zygote

        order = zygote.serve(argument)
    else:
        from distributor.node import keeper

        keeper.serve_fresh(argument)
    from distributor.node import worker  # not before: a keeper of fresh ranks is to be small

    worker.main(order, at_the_end)
