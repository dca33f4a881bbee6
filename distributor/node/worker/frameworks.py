"""Frameworks see all ranks, even on CPUs, for which they look for none by default."""

from __future__ import annotations

from functools import partial

from distributor._compat import accelerate, lightning
from distributor.rank.import_hooks import after_import


def show_all_ranks(uses_gpus: bool) -> None:
    """Have Accelerate, Transformers and Lightning train one model on all ranks by default.

    Parameters
    ----------
    uses_gpus : bool
        Whether the run's ranks use GPUs.
    """
    after_import("accelerate.state", accelerate.see_all_ranks)
    for name in lightning.CONNECTORS:
        after_import(name, partial(lightning.see_all_ranks, uses_gpus=uses_gpus))
