"""A driver process: ``python -m benchmarks.driver MODULE:FUNCTION PARAMETERS FILE``.

It calls the function with the parameters, which are JSON, and writes the return value or the error
to the file.
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
    """Call the function and write its outcome."""
    module, _, name = target.partition(":")
    try:
        facts = getattr(importlib.import_module(module), name)(**json.loads(parameters))
        outcome = {FACTS: facts}
    except Exception as error:
        traceback.print_exc()
        outcome = {ERROR: f"{type(error).__name__}: {error}"}
    Path(file).write_text(json.dumps(outcome))
    return ERROR in outcome


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
