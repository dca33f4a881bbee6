"""Scripts run as if started by hand, over both launchers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from conftest import cluster_is_slow
from support.ranks import (
    Distribute,
)

from distributor import (
    WorkerDied,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


SCRIPT = """
import gzip, json, os, sys
from pathlib import Path
import sibling

out = Path(sys.argv[1], os.environ["RANK"])
rank_file = open(out, "w")
closed = gzip.open(os.devnull, "wt")
closed.close()  # has no descriptor any more
json.dump([sys.argv[1:], __name__, __file__, sibling.VALUE, os.environ["WORLD_SIZE"]], rank_file)

class Trouble(Exception):
    def __init__(self, code, why):
        super().__init__(why)
        self.code = code

def main():  # a cycle that keeps the module's globals alive, both files among them
    if sys.argv[2] == "raise":
        raise Trouble(7, "in the script")  # the script's line
    if sys.argv[2] == "exit":
        sys.exit(int(sys.argv[3]))
    if os.environ["RANK"] == "1":
        sys.exit(0)

main()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Write a script beside the module that it imports, in a folder outside of the path."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "sibling.py").write_text("VALUE = 'from beside the script'\n")
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return path


def test_script_runs_as_if_started_by_hand(
    distribute: Distribute, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(script.parent.parent)

    arguments = (str(out), "--b", "word with spaces")
    assert distribute(2).run_all("project/train.py", *arguments) == [None, None]

    expected = [list(arguments), "__main__", str(script), "from beside the script", "2"]
    assert [json.loads((out / rank).read_text()) for rank in "01"] == [expected, expected]
    assert sorted(path.name for path in out.iterdir()) == ["0", "1"]


@cluster_is_slow
def test_failing_script_raises_its_own_error(
    distribute: Distribute, script: Path, tmp_path: Path
) -> None:
    with pytest.raises(WorkerDied) as died:
        distribute(2).run(script, str(tmp_path), "exit", "3")
    assert (died.value.exit_code, died.value.signal) == (3, None)

    with pytest.raises(Exception, match="in the script") as caught:
        distribute(2).run(script, str(tmp_path), "raise")
    error: Any = caught.value
    assert (type(error).__name__, error.args, error.code) == ("Trouble", ("in the script",), 7)
    shown = str(error.__cause__)
    assert 'raise Trouble(7, "in the script")  # the script\'s line' in shown
    assert f'File "{script}", line ' in shown
    assert "runpy" not in shown
