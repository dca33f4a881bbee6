"""Names and texts that are no valid Unicode, such as a file name in Latin-1."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import cloudpickle
import pyarrow.fs as pafs
import pytest
from support.plain import plain

from distributor import TorchDistributor, train
from distributor.filesystems import local_name, stored_name
from distributor.train import Checkpoint, RunConfig, ScalingConfig
from distributor.train.torch import TorchTrainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])
LATIN_1 = os.fsdecode(b"caf\xe9")


@pytest.mark.parametrize("text", [f"cannot parse {LATIN_1}.csv", "a lone \ud800"])
def test_the_users_exception_is_raised_with_its_exact_text(tmp_path: Path, text: str) -> None:
    def fail() -> None:
        raise ValueError(text)

    ranks = TorchDistributor(1, use_gpu=False, timeout=120, log_dir=tmp_path)
    with pytest.raises(ValueError, match=r"^(cannot parse|a lone) ") as caught:
        ranks.run(fail)
    assert str(caught.value) == text
    (stderr,) = tmp_path.glob("*/attempt_0/rank0.stderr")
    written = text.encode(errors="backslashreplace").decode()
    assert f"ValueError: {written}\n" in stderr.read_text()


SCRIPT = """
import os, sys
name, value = sys.argv[1], os.environ["NAME"]
with open(sys.argv[2], "wb") as file:
    file.write(b"|".join(map(os.fsencode, (os.path.basename(__file__), name, value))))
raise KeyError(name)
"""


def test_a_script_its_arguments_and_variables_may_be_named_so(tmp_path: Path) -> None:
    script, found = tmp_path / f"{LATIN_1}.py", tmp_path / "found"
    script.write_text(SCRIPT)
    variables = {"NAME": LATIN_1, "A_SECRET": f"{LATIN_1} {LATIN_1}"}
    ranks = TorchDistributor(1, use_gpu=False, timeout=120, env=variables)
    with pytest.raises(KeyError) as caught:
        ranks.run(script, LATIN_1, found)
    assert caught.value.args == (LATIN_1,)
    assert found.read_bytes() == b"caf\xe9.py|caf\xe9|caf\xe9"


FILES = {
    f"{LATIN_1}.csv": b"1",
    f"{LATIN_1}/caf\u00e9 {LATIN_1}": b"2",
    "\u201bE9": b"3",
    f"\u201b\u201b {LATIN_1}": b"4",
    "plain": b"5",
}
"""What each rank saves, by name; some names look like those that stand for others in storage."""


def content_of(folder: str | Path) -> dict[str, bytes]:
    root = Path(folder)
    files = (path for path in root.rglob("*") if path.is_file())
    found = {str(path.relative_to(root)): path.read_bytes() for path in files}
    return {name: content for name, content in found.items() if not name.startswith(".")}


def save_and_load(config: dict[str, Path]) -> None:
    """Save the files; in the second attempt check what the first has saved."""
    folder = config["folder"] / os.environ["RANK"]
    wanted = {name: content for rank in range(2) for name, content in named(rank).items()}
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as found:
            assert content_of(found) == wanted
        shutil.rmtree(folder)
    for name, content in named(int(os.environ["RANK"])).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    train.report({}, checkpoint=Checkpoint.from_directory(folder))
    if not checkpoint:
        raise KeyError("once")


def named(rank: int) -> dict[str, bytes]:
    """Return the files of a rank, of which both save the one that is plainly named."""
    return {name if name == "plain" else f"{rank}{name}": data for name, data in FILES.items()}


def test_a_checkpoint_may_have_files_with_such_names(tmp_path: Path) -> None:
    """The folders of storage may be named so, too."""
    (tmp_path / "mine").mkdir()
    result = TorchTrainer(
        save_and_load,
        train_loop_config={"folder": tmp_path / "mine"},
        scaling_config=ScalingConfig(num_workers=2, local_mode=True),
        run_config=RunConfig(
            name=f"run {LATIN_1}",
            storage_path=str(tmp_path / f"runs {LATIN_1}"),
            failure_config=train.FailureConfig(max_failures=1),
            settings={"timeout": 120},
        ),
    ).fit()
    assert result.checkpoint
    assert content_of(result.checkpoint.to_directory(tmp_path / "copy")) == {**named(0), **named(1)}


@pytest.mark.parametrize("name", FILES)
def test_a_stored_name_stands_for_one_name(name: str) -> None:
    files = plain(pafs.LocalFileSystem())
    stored = stored_name(files, name)
    stored.encode()
    assert local_name(stored) == name
    assert stored_name(pafs.LocalFileSystem(), name) == name
