"""Call a function by name, with arguments from a file: ``call.py module:function folder``.

What a user of torchrun writes by hand: arguments are read with ``torch.load``, and rank 0 writes
the return value with ``torch.save``.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

ARGUMENTS = "arguments.pt"
VALUE = "value.pt"


def main(target: str, folder: str) -> None:
    import torch

    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    given = Path(folder, ARGUMENTS)
    arguments = torch.load(given, weights_only=False) if given.exists() else ()
    value = function(*arguments)
    if os.environ["RANK"] == "0":
        torch.save(value, Path(folder, VALUE))


if __name__ == "__main__":
    main(*sys.argv[1:])
