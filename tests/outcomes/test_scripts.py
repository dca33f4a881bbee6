"""Scripts run as if started by hand, over both launchers."""

from __future__ import annotations

import json
import sys
import zipapp
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.ranks import (
    Distribute,
    failures_of,
)

from distributor import (
    TorchDistributor,
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

    expected = [
        list(arguments),
        "__main__",
        str(script),
        "from beside the script",
        "2",
    ]
    assert [json.loads((out / rank).read_text()) for rank in "01"] == [expected, expected]
    assert sorted(path.name for path in out.iterdir()) == ["0", "1"]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [(("exit", "3"), WorkerDied), (("raise",), Exception)],
    ids=["exit", "raise"],
)
def test_failing_script_raises_its_own_error(
    distribute: Distribute, script: Path, tmp_path: Path, arguments: tuple[str, ...], kind: Any
) -> None:
    with pytest.raises(kind) as caught:
        distribute(2).run(script, str(tmp_path), *arguments)

    error: Any = caught.value
    assert set(failures_of(error)) <= {0, 1}
    if kind is WorkerDied:
        assert (error.exit_code, error.signal) == (3, None)
    else:
        assert type(error).__name__ == "Trouble"
        assert (error.args, error.code) == (("in the script",), 7)
        shown = str(error.__cause__)
        assert 'raise Trouble(7, "in the script")  # the script\'s line' in shown
        assert f'File "{script}", line ' in shown
        assert "runpy" not in shown


def test_a_linked_script_imports_from_beside_its_target(
    distribute: Distribute, script: Path, tmp_path: Path
) -> None:
    out, links = tmp_path / "out", tmp_path / "links"
    out.mkdir()
    links.mkdir()
    link = links / "experiment.py"
    link.symlink_to("../project/train.py")

    distribute(1).run(link, str(out), "--")

    name, file, value = json.loads((out / "0").read_text())[1:4]
    assert (name, file, value) == ("__main__", str(link), "from beside the script")


def test_a_zip_application_runs(distribute: Distribute, tmp_path: Path) -> None:
    (tmp_path / "application").mkdir()
    for name, source in {"__main__.py": "import inner", "inner.py": ZIPPED}.items():
        (tmp_path / "application" / name).write_text(source)
    zipapp.create_archive(tmp_path / "application", tmp_path / "train.pyz", "/usr/bin/python3")

    distribute(1).run(tmp_path / "train.pyz", str(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == str(tmp_path / "train.pyz")


ZIPPED = "import sys; open(sys.argv[1], 'w').write(sys.argv[0])"
READS = """
import sys
open(sys.argv[1]).close()
"""


@pytest.mark.spark
def test_the_error_of_a_missing_file_says_that_the_driver_has_it(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "reads.py"
    script.write_text(READS)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").touch()
    monkeypatch.chdir(tmp_path)
    ranks = TorchDistributor(1, local_mode=False, use_gpu=False)

    with pytest.raises(FileNotFoundError) as caught:
        ranks.run("reads.py", "data/train.csv")
    notes = " ".join(vars(caught.value)["__notes__"])
    assert f"On the driver 'data/train.csv' is {tmp_path}/data/train.csv" in notes
    assert "absolute path to storage that all executors can reach" in notes

    with pytest.raises(FileNotFoundError) as caught:
        ranks.run("reads.py", "nowhere/train.csv")
    assert "On the driver" not in " ".join(vars(caught.value)["__notes__"])
