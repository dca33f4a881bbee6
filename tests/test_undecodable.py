"""Names and texts that are no valid Unicode, such as a file name in Latin-1."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pyarrow.fs as pafs
import pytest
from support.plain import plain
from support.reports import find_damage
from support.waiting import until

from distributor import TorchDistributor, train
from distributor.filesystems import local_name, stored_name
from distributor.train import Checkpoint, RunConfig, ScalingConfig
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.torch import TorchTrainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])
LATIN_1 = os.fsdecode(b"caf\xe9")


def begin(folder: Path) -> None:
    (folder / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}").touch()


def fail(folder: Path, text: str) -> None:
    """Fail once both ranks have begun: the first failure ends a rank that has not."""
    begin(folder)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    until(lambda: len(list(folder.glob(f"{attempt}-*"))) == 2, "both ranks begin", 120)
    raise ValueError(text)


@pytest.mark.parametrize("text", [f"cannot parse {LATIN_1}.csv", "a lone \ud800"])
def test_the_users_exception_is_raised_with_its_exact_text(
    distribute: Callable[..., TorchDistributor], tmp_path: Path, text: str
) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    log = tmp_path / "driver.log"
    handler = logging.FileHandler(log, encoding="utf-8")
    logger = logging.getLogger("distributor")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with pytest.raises(ValueError, match=r"^(cannot parse|a lone) ") as caught:
            distribute(2, max_failures=1, log_dir=tmp_path / "logs").run(fail, begun, text)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        handler.close()
    assert str(caught.value) == text
    assert sorted(path.name for path in begun.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]
    written = text.encode(errors="backslashreplace").decode()
    assert f"ValueError: {written}. Starting the next attempt" in log.read_text()
    (stderr,) = (tmp_path / "logs").glob("*/attempt_1/rank0.stderr")
    assert f"ValueError: {written}\n" in stderr.read_text()


SCRIPT = """
import os, sys
name, value = sys.argv[1], os.environ["NAME"]
with open(sys.argv[2], "wb") as file:
    file.write(b"|".join(map(os.fsencode, (os.path.basename(__file__), name, value))))
raise KeyError(name)
"""


def test_a_script_its_arguments_and_variables_may_be_named_so(
    distribute: Callable[..., TorchDistributor], tmp_path: Path
) -> None:
    script, found = tmp_path / f"{LATIN_1}.py", tmp_path / "found"
    script.write_text(SCRIPT)
    ranks = distribute(1, env={"NAME": LATIN_1, "A_SECRET": f"{LATIN_1} {LATIN_1}"})
    with pytest.raises(KeyError) as caught:
        ranks.run(script, LATIN_1, found)
    assert caught.value.args == (LATIN_1,)
    assert found.read_bytes() == b"caf\xe9.py|caf\xe9|caf\xe9"


def test_the_command_line_ends_as_for_any_failure(tmp_path: Path) -> None:
    script, found = tmp_path / f"{LATIN_1}.py", tmp_path / "found"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "distributor", "run", "--cpu", script, LATIN_1, found],
        capture_output=True,
        env={**os.environ, "NAME": LATIN_1},
        timeout=300,
    )
    assert (done.returncode, found.exists()) == (1, True), done.stderr
    assert rb"KeyError: 'caf\udce9'" in done.stderr


def test_a_value_that_no_variable_can_hold_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"env sets 'NAME' to .*, which no environment variable can"
    ):
        TorchDistributor(1, use_gpu=False, env={"NAME": "\ud800"})


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
        assert content_of(checkpoint.to_directory(folder / f"copy {LATIN_1}")) == wanted
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


@pytest.mark.parametrize("kind", ["local", "object store"])
def test_a_checkpoint_may_have_files_with_such_names(tmp_path: Path, kind: str) -> None:
    """On this machine the folders of storage may be named so, too."""
    is_local = kind == "local"
    storage_path = tmp_path / (f"runs {LATIN_1}" if is_local else "runs")
    run = RunConfig(
        name=f"run {LATIN_1}" if is_local else "run",
        storage_path=str(storage_path),
        storage_filesystem=None if is_local else plain(pafs.LocalFileSystem()),
        failure_config=train.FailureConfig(max_failures=1),
        checkpoint_config=train.CheckpointConfig(num_to_keep=1),
        settings={"timeout": 120},
    )
    scaling = ScalingConfig(num_workers=2, local_mode=True)
    (tmp_path / "mine").mkdir()
    trainer = TorchTrainer(
        save_and_load,
        train_loop_config={"folder": tmp_path / "mine"},
        scaling_config=scaling,
        run_config=run,
    )
    result = trainer.fit()
    assert result.checkpoint
    storage = Storage(storage_path, run.name or "", run.storage_filesystem)
    [(name, manifest)] = storage.committed()
    assert find_damage(storage, name, manifest) is None
    assert content_of(result.checkpoint.to_directory(tmp_path / "copy")) == {**named(0), **named(1)}
    in_storage = content_of(f"{result.path}/{name}")
    assert (in_storage.keys() == {*named(0), *named(1)}) == is_local
    assert is_local or not any("\udce9" in each for each in in_storage)


@pytest.mark.parametrize("name", FILES)
def test_a_stored_name_stands_for_one_name(name: str) -> None:
    files = plain(pafs.LocalFileSystem())
    stored = stored_name(files, name)
    stored.encode()
    assert local_name(stored) == name
    assert stored_name(pafs.LocalFileSystem(), name) == name
