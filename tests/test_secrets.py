"""A secret in the environment of ranks can be read nowhere else."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import os
import re
import sys
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from conftest import facts_in
from support.cluster import cluster_on
from support.machines import machines_on_loopback
from support.waiting import comes_true

from distributor import TorchDistributor, WorkerDied
from distributor.core.text import MASK

SECRET = "hunter2-hunter2"
RUN_SECRET = hashlib.sha256(b"of the run").digest()
"""The secret of the run itself, which the test's driver sets; its program has no copy of it."""
BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{16,}={0,2}")

PROGRAM = """
import json, os, pathlib, sys

def command_line(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""  # the process has ended

def train(folder, ballast):
    import os, pathlib, sys, time
    token = os.environ["MY_TOKEN"]
    print("printed:", token, flush=True)
    print("on stderr:", token, file=sys.stderr, flush=True)
    lines = [command_line(path) for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
    count = sum(token.encode() in line for line in lines)
    pathlib.Path(folder, os.environ["RANK"]).write_text(str(count))
    while not pathlib.Path(folder, "enough").exists():
        time.sleep(0.01)
    if os.environ["RANK"] == "0":
        return os.environ["TORCH_OWN_TOKEN"]
    raise ValueError(f"{token} is wrong")
"""

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def decodings_of(data: bytes) -> Iterator[bytes]:
    """Yield the bytes themselves, and whatever in them is base64, decoded and decompressed."""
    yield data
    for found in BASE64.finditer(data):
        text = found[0].rstrip(b"=").translate(bytes.maketrans(b"-_", b"+/"))
        with contextlib.suppress(binascii.Error):
            decoded = base64.b64decode(text + b"=" * (-len(text) % 4))
            yield decoded
            with contextlib.suppress(zlib.error):
                yield zlib.decompressobj().decompress(decoded)


def has(data: bytes, secrets: tuple[bytes, ...]) -> bool:
    return any(secret in text for text in decodings_of(data) for secret in secrets)


def holders_of(secret: str, folder: Path) -> list[str]:
    """Return the files below a folder that contain the secret, or the run's own."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [str(path) for path in files if has(path.read_bytes(), (secret.encode(), RUN_SECRET))]


@pytest.mark.parametrize(
    "data",
    [
        b"a hunter2-hunter2 b",
        b"<report " + base64.b64encode(zlib.compress(b"a hunter2-hunter2 b")) + b">",
        b"<report " + base64.urlsafe_b64encode(b"\xff\xfe hunter2-hunter2 b") + b">",
    ],
)
def test_the_search_finds_encoded_secrets(data: bytes) -> None:
    assert has(data, (SECRET.encode(),))
    assert not has(data, (b"another",))


def pages_of(ui: str) -> Iterator[str]:
    """Yield all pages of an application's UI that links lead to."""
    seen, ahead = set(), [f"{ui}/jobs/"]
    while ahead:
        url = ahead.pop()
        if url in seen or len(seen) > 200:
            continue
        seen.add(url)
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                text = answer.read().decode(errors="replace")
        except OSError:
            continue
        yield text
        links = re.findall(r'href="(/[^"#]*)"', text)
        ahead += [f"{ui}{link}" for link in links if "kill" not in link and "static" not in link]


@pytest.mark.slow(ci=True)
@pytest.mark.spark
def test_a_secret_does_not_leave_the_ranks_of_a_cluster(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    events = tmp_path / "events"
    notes.mkdir()
    events.mkdir()
    source = f"""{PROGRAM}
import hashlib, secrets
from unittest import mock
from distributor.launchers.spark import hub_address, launcher
random_bytes, of_the_run = secrets.token_bytes, hashlib.sha256(b"of the run").digest()
secrets.token_bytes = lambda count: of_the_run if count == 32 else random_bytes(count)
secret = json.loads(_channel.makefile().readline())
send(ui=spark.sparkContext.uiWebUrl)
runner = TorchDistributor(
    2, local_mode=False, use_gpu=False, timeout=120, log_dir={str(tmp_path / "logs")!r},
    env={{"MY_TOKEN": secret, "TORCH_OWN_TOKEN": secret}},
)
print(runner)
try:
    runner.run(train, {str(notes)!r}, bytes(900_000))
except ValueError as error:
    send(error=list(error.args))
out_of_reach = hub_address.HubAddress(bound="127.0.0.1", advertised="127.0.0.99")
try:
    with mock.patch.object(launcher, "choose_hub_address", return_value=out_of_reach):
        runner.run(train, {str(notes)!r}, bytes(900_000))
except ValueError as error:
    send(unlinked=list(error.args))
_channel.makefile().readline()
spark.stop()
send(stopped=True)
"""
    with machines_on_loopback(3) as machines, cluster_on(machines, tmp_path, cores=2) as cluster:
        conf = {
            "spark.ui.enabled": "true",
            "spark.ui.port": "0",
            "spark.log.level": "DEBUG",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": events.as_uri(),
        }
        with cluster.driver(source, **conf) as driver:
            driver.send(SECRET)
            ui = driver.receive("ui")["ui"]
            comes_true(lambda: len(list(notes.iterdir())) == 2, 120)
            pages = list(pages_of(ui))
            held = holders_of(SECRET, tmp_path)
            (notes / "enough").touch()
            error = driver.receive("error")["error"]
            assert error == [f"{SECRET} is wrong"], "the exception itself is not redacted"
            assert driver.receive("unlinked")["unlinked"] == error
            pages += pages_of(ui)  # with the error of a task without a link
            driver.send("stop")
            driver.receive("stopped")
            log = driver.log.read_text()

        assert [(notes / rank).read_text() for rank in "01"] == ["0", "0"], "command lines"
        assert len(pages) > 5
        assert "TaskFailed" in "".join(pages), "the task's error is shown"
        assert not [page for page in pages if has(page.encode(), (SECRET.encode(), RUN_SECRET))]
        assert held == []
        assert holders_of(SECRET, tmp_path) == []
        assert f"printed: {MASK}" in log
        assert any(events.iterdir())
        recorded = b"".join(path.read_bytes() for path in (tmp_path / "logs").rglob("rank1.*"))
        assert recorded.count(MASK.encode()) >= 3, "on stdout, on stderr, and in the traceback"


def test_a_secret_does_not_leave_local_ranks(
    run_driver: Callable[..., Any], tmp_path: Path
) -> None:
    source = f"""{PROGRAM}
from distributor import TorchDistributor
folder = pathlib.Path(sys.argv[1])
(folder / "enough").touch()
secret = os.environ["GIVEN"]
settings = dict(use_gpu=False, timeout=120, log_dir=folder / "logs")
runner = TorchDistributor(2, env={{"MY_TOKEN": secret, "TORCH_OWN_TOKEN": secret}}, **settings)
print(runner)
try:
    runner.run(train, folder, bytes(3_000_000))
except ValueError as error:
    print("FACTS " + json.dumps(type(error).__name__))
"""
    done = run_driver(source, str(tmp_path), env={"GIVEN": SECRET, "TMPDIR": str(tmp_path)})

    assert facts_in(done) == "ValueError"
    assert SECRET not in done.stdout + done.stderr
    assert f"[1] on stderr: {MASK}" in done.stderr
    (log,) = (tmp_path / "logs").glob("*/attempt_0/rank1.stderr")
    assert f"ValueError: {MASK} is wrong" in log.read_text()
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0", "0"], "command lines"
    assert holders_of(SECRET, tmp_path) == []


def test_the_output_of_a_dead_rank_is_redacted() -> None:
    def print_and_exit() -> None:
        print(os.environ["MY_TOKEN"], flush=True)
        os._exit(3)

    with pytest.raises(WorkerDied) as caught:
        TorchDistributor(1, use_gpu=False, timeout=120, env={"MY_TOKEN": SECRET}).run(
            print_and_exit
        )
    assert MASK in str(caught.value)
    assert SECRET not in str(caught.value)
