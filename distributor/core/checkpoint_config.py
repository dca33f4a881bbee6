"""What a training run keeps and where, passed from the driver to its ranks in a variable."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

VARIABLE = "DISTRIBUTOR_TRAIN"
"""The variable in which a rank finds what its training keeps where."""


def absolute(path: str | os.PathLike[str]) -> str:
    """Give a path of this machine from its root on; an address, which has a scheme, as it is."""
    text = os.fspath(path)
    return text if "://" in text else str(Path(text).expanduser().absolute())


def check_name(what: str, name: object) -> None:
    """Refuse what is no name of a folder in another.

    Raises
    ------
    ValueError
        Says what was found.
    """
    named = isinstance(name, str) and name not in ("", ".", "..")
    if not named or not {"/", "\0"}.isdisjoint(str(name)):
        raise ValueError(f"{what} is the name of a folder, but is {name!r}.")


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """What a training keeps, and where.

    Parameters
    ----------
    storage_path, name : str
        The folder of all trainings, and this one's in it.
    num_to_keep : int or None
        How many checkpoints are kept; None for all.
    score_attribute : str or None
        The metric that makes a checkpoint worth keeping; None for its age.
    score_order : "max" or "min"
        Which end of that metric is the better.
    """

    storage_path: str
    name: str
    num_to_keep: int | None = None
    score_attribute: str | None = None
    score_order: Literal["max", "min"] = "max"

    def to_variable(self) -> dict[str, str]:
        """Give the variable for ranks."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def here(cls) -> CheckpointSettings | None:
        """Read what this rank's training keeps; None where nobody said."""
        text = os.environ.get(VARIABLE)
        return cls(**json.loads(text)) if text else None
