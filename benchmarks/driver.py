"""A driver process: ``python -m benchmarks.driver MODULE:FUNCTION PARAMETERS FILE``.

It calls the function with the parameters, which are JSON, and writes what that returned, or how it
failed, to the file.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path

FACTS = "facts"
ERROR = "error"


def main(target: str, parameters: str, file: str) -> int:
    """Measure, and tell."""
    module, _, name = target.partition(":")
    try:
        facts = getattr(importlib.import_module(module), name)(**json.loads(parameters))
        told = {FACTS: facts}
    except Exception as error:
        traceback.print_exc()
        told = {ERROR: f"{type(error).__name__}: {error}"}
    Path(file).write_text(json.dumps(told))
    return ERROR in told


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
