"""Ranks forked from a warm process: like fresh ones, of today's code, and gone when they should be.

Real processes and real torch throughout. This process is the driver of most runs, so that they can
share a zygote; where a driver's own life matters it has a process of its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import locale
import os
import pickle
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from conftest import facts_in
from support.waiting import SOON, alive, assert_gone, marked, until
from test_repeated import driver, told_pids

from distributor import DistributorError, StartTimeout, TorchDistributor, WorkerDied
from distributor.launch.local import cool_down
from distributor.launch.programs import program_of
from distributor.node.agent.worker_env import common_environment
from distributor.node.process import zygote_client
from distributor.node.process.ipc import ShutDown, StartRank
from distributor.node.process.process_attributes import ProcessAttributes
from distributor.node.process.scratch import new_scratch_path
from distributor.node.process.supervisor_client import SupervisedSpawner
from distributor.node.process.worker_spec import WorkerSpec
from distributor.node.process.zygote_client import ZygoteSpec
from distributor.serialization.oob_pickle import anonymous_file
from distributor.serialization.outcome import Origin
from distributor.serialization.program import in_file

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.skipif(
    not zygote_client.is_supported(), reason="only Linux has warm processes"
)

DEADLINE = 60.0
"""Seconds after which whoever waits for a word goes on without it."""


@pytest.fixture(scope="module", autouse=True)
def on_the_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of modules that ranks can import; one for all tests, which then share a zygote."""
    folder = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "not_there_yet"))
        patch.syspath_prepend(str(folder))
        patch.delenv("PYTHONUNBUFFERED", raising=False)  # or nothing waits in a buffer
        yield folder
        cool_down()


Write = Callable[..., str]


@pytest.fixture
def module(on_the_path: Path, tmp_path: Path) -> Iterator[Write]:
    """Write a module to be preloaded; ``module("VALUE = 1")`` gives its name, of this test alone.

    No zygote is there before, and none that has loaded such a module stays for other tests.
    """

    def write(source: str, name: str = "module") -> str:
        name = f"{name}_of_{tmp_path.name}"
        path = on_the_path / f"{name}.py"
        # Each time of another size, whatever the clock's resolution.
        path.write_text(f"{source}\n" + "#" * (path.stat().st_size if path.exists() else 0))
        return name

    await_cold()
    yield write
    await_cold()


def await_cold() -> None:
    """End this process's zygotes, also those that would not end by themselves."""
    pids = zygotes()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pids), "a zygote is left")


def local(num_processes: int = 1, *, warm: bool = True, **settings: Any) -> TorchDistributor:
    settings = {"timeout": 120, **settings}
    return TorchDistributor(num_processes, local_mode=True, use_gpu=False, warm=warm, **settings)


def grandparent() -> int:
    """Tell, in a rank, whose child the supervisor is that started it."""
    return psutil.Process(os.getppid()).ppid()


def zygote_of(num_processes: int = 1, **settings: Any) -> int:
    """Run on so many ranks, and give their one grandparent, which is a child of this process."""
    (zygote,) = set(local(num_processes, **settings).run_all(grandparent))
    assert psutil.Process(zygote).ppid() == os.getpid()
    return zygote


def zygotes() -> list[int]:
    found: list[int] = alive(c.pid for c in psutil.Process().children() if _is_zygote(c))
    return found


def _is_zygote(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "zygote" in process.cmdline()
    return False


@dataclass
class Held:
    """A run whose ranks wait until they may go on."""

    zygote: int
    supervisor: int
    family: list[int]
    """The ranks, and a process that each has forked."""
    values: Future[list[str]]
    folder: Path

    def let_go(self) -> list[str]:
        (self.folder / "go").touch()
        return self.values.result(DEADLINE)

    def dies(self) -> WorkerDied:
        error = self.values.exception(SOON)
        assert isinstance(error, WorkerDied)
        return error


def hold(folder: Path) -> str:
    """Tell, in a rank, which processes it consists of, and wait for the word to go on."""
    child = os.fork()
    if child == 0:
        signal.pause()
    note = folder / os.environ["RANK"]
    note.with_suffix(".part").write_text(
        json.dumps([grandparent(), os.getppid(), os.getpid(), child])
    )
    note.with_suffix(".part").rename(note.with_suffix(".json"))
    deadline = time.monotonic() + DEADLINE
    while not (folder / "go").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody has let this rank go")
        time.sleep(0.01)
    return "undisturbed"


@contextmanager
def held_run(folder: Path, num_processes: int = 1, **settings: Any) -> Iterator[Held]:
    folder.mkdir()
    with ThreadPoolExecutor(1) as pool:
        values = pool.submit(local(num_processes, **settings).run_all, hold, folder)
        try:
            until(
                lambda: values.done() or len(list(folder.glob("*.json"))) == num_processes,
                "the ranks run",
                DEADLINE,
            )
            told = [json.loads(note.read_text()) for note in folder.glob("*.json")]
            ((zygote, supervisor),) = {(zygote, supervisor) for zygote, supervisor, *_ in told}
            yield Held(zygote, supervisor, [p for _, _, *own in told for p in own], values, folder)
        finally:
            (folder / "go").touch()


# One zygote


def test_all_runs_of_a_driver_share_a_zygote() -> None:
    one, other = local(2), local(3, env={"OF_THIS_RUN": "1"})
    found = {*one.run_all(grandparent), *other.run_all(grandparent), *one.run_all(grandparent)}
    assert found == {zygote_of()}


def test_runs_at_the_same_time_share_a_zygote(tmp_path: Path) -> None:
    with held_run(tmp_path / "one", 2) as one, held_run(tmp_path / "other", 2) as other:
        assert one.zygote == other.zygote
        assert len(set(one.family + other.family)) == 8
        assert other.let_go() == one.let_go() == ["undisturbed"] * 2


def test_each_driver_has_its_own_which_ends_with_it(run_driver: Any) -> None:
    done = run_driver("""
        import json, os
        from distributor import TorchDistributor

        distributor = TorchDistributor(2, local_mode=True, use_gpu=False, warm=True)

        def grandparent():
            with open(f"/proc/{os.getppid()}/stat") as stat:
                return int(stat.read().rpartition(")")[2].split()[1])

        zygotes = distributor.run_all(grandparent) + distributor.run_all(grandparent)
        print("FACTS " + json.dumps({"driver": os.getpid(), "zygotes": zygotes}))
    """)
    facts = facts_in(done)
    (zygote,) = set(facts["zygotes"])
    assert zygote not in (facts["driver"], zygote_of())
    assert_gone([zygote])


# Like fresh ones


OF_EACH_RUN = ("MASTER_PORT", "TORCHELASTIC_RUN_ID")
SIGNAL_SETS = ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")
BUFFERING = ("line_buffering", "write_through")


def facts_of_this_rank() -> dict[str, Any]:
    """Take down what a rank finds in itself and around, before and after it imports torch."""
    status = dict(re.findall(r"(\w+):\s*(.*)", Path("/proc/self/status").read_text()))
    facts: dict[str, Any] = {
        "environment": {k: v for k, v in os.environ.items() if k not in OF_EACH_RUN},
        "folder": os.getcwd(),
        "umask": status["Umask"],
        "open files": open_files(),
        "signal sets": {name: status[name] for name in SIGNAL_SETS},
        "signal handlers": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
        "limits": {
            name: resource.getrlimit(getattr(resource, name))
            for name in dir(resource)
            if name.startswith("RLIMIT_")
        },
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "main thread": threading.current_thread() is threading.main_thread(),
        "leads": [os.getpid() == leader for leader in (os.getpgid(0), os.getsid(0))],
        "arguments": sys.argv,
        "path": sys.path,
        "names in main": sorted(vars(sys.modules["__main__"])),
        "streams": [
            {name: getattr(stream, name) for name in ("encoding", "errors", "newlines", *BUFFERING)}
            | {name: getattr(stream, name)() for name in ("fileno", "isatty", "seekable")}
            for stream in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "garbage collector": (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
        "flags": str(sys.flags),
        "hooks": [str(hook) for hook in (sys.excepthook, threading.excepthook, sys.gettrace())],
        "locale": (locale.setlocale(locale.LC_ALL), locale.getpreferredencoding()),
        "time zone": (time.tzname, time.timezone, time.localtime(0).tm_hour),
    }
    import numpy as np
    import torch
    from threadpoolctl import threadpool_info

    pools = [(pool["internal_api"], pool["num_threads"]) for pool in threadpool_info()]
    return {
        **facts,
        "torch's threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "libraries' threads": sorted(pools),
        "warnings": [str(rule) for rule in warnings.filters],
        "draws": {
            "random": random.random(),
            "numpy": float(np.random.rand()),
            "torch": float(torch.rand((), dtype=torch.float64)),
            "torch seed": torch.initial_seed(),
        },
    }


def open_files() -> list[str]:
    """Tell of what kind each open descriptor is."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one with which the folder is read
            found.append(re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{number}")))
    return sorted(found)


RUNS: dict[str, dict[str, Any]] = {
    "two ranks": {"num_processes": 2},  # OMP_NUM_THREADS is 1, for there are several
    "one rank": {},  # it is not set
    "two threads": {"env": {"OMP_NUM_THREADS": "2", "OF_THIS_RUN": "1"}},
}
LOADS_NO_MORE = """
import numpy.random
from distributor.node.process import zygote
# This runs in the zygote, which must have loaded the same modules whenever it is asked.
zygote.OPTIMIZER_IMPORTS = ()
"""

Told = dict[str, list[dict[str, Any]]]
"""By the kind of run, what each of its ranks told."""


@pytest.fixture(scope="module")
def likeness(on_the_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Told, ...]:
    """What ranks of the same runs told: forked, forked once more, and fresh.

    The zygote was there before the driver changed its folder, its environment, its signals.
    """
    (on_the_path / "loads_no_more.py").write_text(LOADS_NO_MORE)
    await_cold()
    with ignoring_signals():
        zygote = zygote_of(2, preload=["loads_no_more"])
    umask = os.umask(0o027)
    try:
        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(RUNS)) as pool:
            patch.chdir(tmp_path_factory.mktemp("folder"))
            patch.setenv("TZ", "Asia/Kathmandu")
            patch.setenv("OF_THE_DRIVER", "naïve \udcff\n")
            patch.delenv("OMP_NUM_THREADS", raising=False)
            assert zygote_of() == zygote
            forked: list[Told] = [
                {name: local(**run).run_all(facts_of_this_rank) for name, run in RUNS.items()}
                for _ in range(2)
            ]
            fresh = {
                name: pool.submit(local(warm=False, **run).run_all, facts_of_this_rank)
                for name, run in RUNS.items()
            }
            return forked[0], forked[1], {run: told.result() for run, told in fresh.items()}
    finally:
        os.umask(umask)


@contextmanager
def ignoring_signals() -> Iterator[None]:
    """Ignore one signal and block another, as children then do too."""
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGUSR1, handler)


FACTS = [
    "environment", "folder", "umask", "open files", "signal sets", "signal handlers", "limits",
    "threads", "main thread", "leads", "arguments", "path", "names in main", "streams",
    "garbage collector", "flags", "hooks", "locale", "time zone", "torch's threads",
    "libraries' threads", "warnings",
]  # fmt: skip


@pytest.mark.parametrize("fact", FACTS)
def test_forked_ranks_tell_what_fresh_ones_do(likeness: tuple[Told, ...], fact: str) -> None:
    for run in RUNS:
        for first, second, fresh in zip(*(told[run] for told in likeness), strict=True):
            assert first[fact] == fresh[fact], run
            assert second[fact] == fresh[fact], run


def test_what_is_compared_tells_runs_apart(likeness: tuple[Told, ...]) -> None:
    _, _, fresh = likeness
    ranks = [told[0] for told in fresh.values()]
    assert [rank["environment"].get("OMP_NUM_THREADS") for rank in ranks] == ["1", None, "2"]
    assert ranks[0]["torch's threads"][0] == 1
    assert all(number == 1 for _, number in ranks[0]["libraries' threads"])
    for rank in ranks:
        assert rank["environment"]["OF_THE_DRIVER"] == "naïve \udcff\n"
        assert rank["umask"] == "0027"
        assert rank["time zone"][1] == -(5 * 60 + 45) * 60
        assert Path(rank["folder"]).name.startswith("folder")
        assert rank["leads"] == [True, True]


@pytest.mark.parametrize("source", ["random", "numpy", "torch", "torch seed"])
def test_each_rank_of_each_run_draws_its_own_numbers(
    likeness: tuple[Told, ...], source: str
) -> None:
    *forked, fresh = (
        [rank["draws"][source] for ranks in told.values() for rank in ranks] for told in likeness
    )
    assert len(set(fresh)) == len(fresh) == 4, "so it is where ranks start fresh"
    drawn = [number for told in forked for number in told]
    assert len(drawn) == 8
    assert max(Counter(drawn).values()) == 1


@pytest.fixture(scope="module")
def after_changes() -> tuple[dict[str, Any], dict[str, Any]]:
    """What a forked and a fresh rank found after the driver had changed what children inherit."""
    zygote = zygote_of()
    files, cpus = resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] - 1, files[1]))
        os.sched_setaffinity(0, {min(cpus)})
        with ignoring_signals():
            assert zygote_of() == zygote
            return local().run(what_is_inherited), local(warm=False).run(what_is_inherited)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        os.sched_setaffinity(0, cpus)


def what_is_inherited() -> dict[str, Any]:
    return {
        "limit of open files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "processors": os.sched_getaffinity(0),
        "ignored signal": str(signal.getsignal(signal.SIGUSR1)),
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
    }


@pytest.mark.parametrize(
    "what", ["limit of open files", "processors", "ignored signal", "blocked signals"]
)
def test_what_the_driver_has_changed_for_its_children_holds_for_ranks(
    after_changes: tuple[dict[str, Any], dict[str, Any]], what: str
) -> None:
    forked, fresh = after_changes
    assert forked[what] == fresh[what]


def test_a_deleted_folder_and_a_large_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zygote = zygote_of()
    many = {f"VARIABLE_{i}": f"{i} " * 100 for i in range(1000)}
    assert sum(map(len, many.values())) > 300_000

    def tell() -> tuple[int, dict[str, str], str]:
        with pytest.raises(FileNotFoundError):
            os.getcwd()
        found = {name: value for name, value in os.environ.items() if name in many}
        return grandparent(), found, os.readlink("/proc/self/cwd")

    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    parent, found, there = local(env=many).run(tell)
    monkeypatch.chdir(tmp_path)
    assert parent == zygote
    assert found == many
    assert there == f"{folder} (deleted)"


# Changes


def test_a_module_that_came_between_two_runs_is_found(on_the_path: Path) -> None:
    zygote, before = zygote_of(), on_the_path.stat()
    (on_the_path / "came.py").write_text("VALUE = 'where the zygote has looked before'")
    (on_the_path / "not_there_yet").mkdir()
    (on_the_path / "not_there_yet" / "came_too.py").write_text("VALUE = 'in a new folder'")
    os.utime(on_the_path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as on a coarse clock

    def load() -> tuple[int, list[str]]:
        return grandparent(), [importlib.import_module(name).VALUE for name in ("came", "came_too")]

    found = ["where the zygote has looked before", "in a new folder"]
    assert local().run(load) == (zygote, found)


def waiting(begun: Path, go: Path) -> str:
    """Source of a module that waits, when it is loaded, for the word to go on."""
    return f"""
import os, pathlib, time
pathlib.Path({str(begun)!r}).write_text(str(os.getpid()))
deadline = time.monotonic() + {DEADLINE}
while not pathlib.Path({str(go)!r}).exists() and time.monotonic() < deadline:
    time.sleep(0.01)
"""


def test_it_starts_with_the_distributor_and_nobody_waits_for_it(
    module: Write, tmp_path: Path
) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    distributor = local(preload=[module(waiting(begun, go))])
    until(begun.exists, "it loads, and no run has begun", DEADLINE)
    go.touch()
    until(begun.read_text, "it has told its number")
    assert distributor.run(grandparent) == int(begun.read_text())


def test_a_preloaded_module_is_loaded_once_and_once_more_when_it_has_changed(
    module: Write, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    source = f"import os; open({str(note)!r}, 'a').write(f'{{os.getpid()}} '); VALUE = "
    name = module(source + "'old'")
    distributor = local(2, preload=[name])

    def tell() -> tuple[int, str]:
        return grandparent(), sys.modules[name].VALUE

    ((first, value),) = set(distributor.run_all(tell) + distributor.run_all(tell))
    assert value == "old"
    module(source + "'new'")
    ((second, value),) = set(distributor.run_all(tell) + distributor.run_all(tell))
    assert value == "new"
    assert note.read_text().split() == [str(first), str(second)]
    assert_gone([first])
    assert zygote_of() == second, "who does without a module does not mind it"


@pytest.mark.parametrize("when", ["at its start", "in a quiet moment"])
def test_a_change_is_seen_even_if_more_is_loaded_after_it(
    module: Write, tmp_path: Path, when: str
) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    name, more = module("VALUE = 'old'"), module(waiting(begun, go), "more")
    if when == "in a quiet moment":
        more = module(
            "from distributor.node.process import zygote\n"
            f"zygote.OPTIMIZER_IMPORTS, zygote.IDLE_IMPORT_SECONDS = ({more!r},), 0.01",
            "setting",
        )
    distributor = local(preload=[name, more])
    until(begun.exists, "it loads more", DEADLINE)
    module("VALUE = 'new'")
    go.touch()
    assert distributor.run(lambda: importlib.import_module(name).VALUE) == "new"


def test_what_is_loaded_in_a_quiet_moment_sets_no_variable(module: Write, tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    more = module(f"import os; os.environ['OF_MORE'] = '1'; open({str(loaded)!r}, 'w').close()")
    setting = module(
        "from distributor.node.process import zygote\n"
        f"zygote.OPTIMIZER_IMPORTS, zygote.IDLE_IMPORT_SECONDS = ({more!r},), 0.01",
        "setting",
    )
    distributor = local(preload=[setting])
    until(loaded.exists, "it has loaded more", DEADLINE)
    assert distributor.run(lambda: os.environ.get("OF_MORE")) is None


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (
            "def fail():\n    raise LookupError('on purpose')\nfail()",
            "line 2, in fail\n    raise LookupError('on purpose')\nLookupError: on purpose",
        ),
        ("import sys; sys.exit('日' * 40_000)", "日日日"),
    ],
    ids=["raises", "exits with many words"],
)
def test_a_module_that_cannot_be_loaded_is_one_clear_error(
    module: Write, source: str, told: str
) -> None:
    name = module(source)
    with pytest.raises(DistributorError, match=f"{name} cannot be imported") as caught:
        local(2, preload=[name]).run(os.getppid)
    assert told in str(caught.value)
    until(lambda: not zygotes(), "a zygote is left")


def test_trouble_with_a_module_is_for_who_asks_for_it(module: Write, tmp_path: Path) -> None:
    tried = tmp_path / "tried"
    local(preload=[module(f"open({str(tried)!r}, 'w').close(); raise ValueError('on purpose')")])
    until(tried.exists, "it has been tried", DEADLINE)
    assert local().run(len, "abc") == 3


def test_trouble_that_was_mended_before_the_run_is_none(module: Write, tmp_path: Path) -> None:
    tried = tmp_path / "tried"
    name = module(f"open({str(tried)!r}, 'w').close(); raise ValueError('on purpose')")
    distributor = local(preload=[name])
    until(tried.exists, "it has been tried", DEADLINE)
    module("VALUE = 'mended'")
    assert distributor.run(lambda: sys.modules[name].VALUE) == "mended"


def test_what_a_module_did_when_it_was_loaded_does_not_show_in_ranks(
    module: Write, tmp_path: Path
) -> None:
    name = module(
        "import ctypes, tempfile\n"
        "print('from Python'); ctypes.CDLL(None).puts(b'from C')\n"
        "tempfile.gettempdir()  # as torch._dynamo does, which a zygote loads by itself"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    zygote_of(preload=[name])  # its temporary folder is not this one

    def tell() -> str:
        print("from the rank")
        return tempfile.gettempdir()

    settings: dict[str, Any] = {"env": {"TMPDIR": str(temporary)}, "log_dir": tmp_path / "logs"}
    found = local(2, preload=[name], **settings).run_all(tell)
    printed = {path.name: path.read_text() for path in tmp_path.glob("logs/*/*/*.stdout")}
    assert printed == dict.fromkeys(["rank0.stdout", "rank1.stdout"], "from the rank\n")
    assert found == [str(temporary)] * 2


def test_a_module_that_loads_for_ever_ends_with_start_timeout(
    module: Write, tmp_path: Path
) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    name = module(waiting(begun, go))
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(local(preload=[name], start_timeout=1.0).run, os.getppid)
        try:
            assert isinstance(run.exception(timeout=SOON), StartTimeout)
        finally:
            go.touch()


def test_it_ends_when_nobody_has_asked_it_for_a_while(module: Write) -> None:
    name = module(
        "from distributor.node.process import zygote\n"
        "zygote.OPTIMIZER_IMPORTS, zygote.IDLE_EXIT_SECONDS = (), 0.2  # this runs in the zygote"
    )
    assert_gone([zygote_of(preload=[name])])


def test_a_relative_path_is_looked_up_from_the_ranks_folder(
    run_driver: Any, tmp_path: Path
) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder / "lib").mkdir(parents=True)
        (tmp_path / folder / "lib" / "beside.py").write_text(f"WHERE = {folder!r}")
    done = run_driver("""
        import json, os, sys
        from distributor import TorchDistributor


        def load():
            import beside

            return beside.WHERE


        sys.path.append("lib")
        os.chdir("one")
        distributor = TorchDistributor(local_mode=True, use_gpu=False, warm=True)
        found = [distributor.run(load)]
        os.chdir("../other")
        found.append(distributor.run(load))
        print("FACTS " + json.dumps({"found": found}))
    """)
    assert facts_in(done)["found"] == ["one", "other"]


READ_AT_START = {
    "PYTHONHASHSEED": "7",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "LC_ALL": "C",
    "MALLOC_ARENA_MAX": "2",
}


def test_what_is_read_at_start_makes_a_new_one_and_runs_go_on(tmp_path: Path) -> None:
    def tell() -> tuple[int, int, str, str]:
        encoding = locale.getpreferredencoding()
        return grandparent(), hash("word"), encoding, os.environ["MALLOC_ARENA_MAX"]

    with held_run(tmp_path / "run", 2) as before:
        distributor = local(2, env=READ_AT_START)
        ((parent, *told),) = set(distributor.run_all(tell) + distributor.run_all(tell))
        assert parent != before.zygote
        assert before.let_go() == ["undisturbed"] * 2
    assert_gone([before.zygote])
    python = subprocess.run(
        [sys.executable, "-c", "print(hash('word'))"],
        env={**os.environ, **READ_AT_START},
        stdout=subprocess.PIPE,
        check=True,
    )
    assert told == [int(python.stdout), "ANSI_X3.4-1968", "2"]


def threads_by_library() -> list[tuple[str, int]]:
    import torch
    from threadpoolctl import threadpool_info

    pools = [(pool["internal_api"], pool["num_threads"]) for pool in threadpool_info()]
    return sorted([*pools, ("torch", torch.get_num_threads())])


def test_a_librarys_own_variable_says_how_many_threads_it_has() -> None:
    env = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    zygote = zygote_of(2, env=env)
    assert zygote_of(env={**env, "OMP_NUM_THREADS": "2"}) == zygote
    env["OMP_NUM_THREADS"] = "2"
    told = local(env=env).run(threads_by_library)
    assert told == local(env=env, warm=False).run(threads_by_library)


# Ends


def test_cooling_down_ends_it_and_its_runs_go_on(tmp_path: Path) -> None:
    with held_run(tmp_path / "run", 2) as run:
        cool_down()
        assert_gone([run.zygote])
        second = zygote_of()
        assert alive([run.supervisor, *run.family]) == [run.supervisor, *run.family]
        assert run.let_go() == ["undisturbed"] * 2
    assert_gone([run.supervisor])
    assert alive([second]) == [second]
    cool_down()
    assert_gone([second])


def test_its_death_disturbs_nobody_and_the_next_run_works(tmp_path: Path) -> None:
    with held_run(tmp_path / "run", 2) as run:
        os.kill(run.zygote, signal.SIGKILL)
        assert_gone([run.zygote])
        assert zygote_of(2) != run.zygote
        assert run.let_go() == ["undisturbed"] * 2


def test_a_supervisors_death_is_its_ranks_death_alone(tmp_path: Path) -> None:
    with held_run(tmp_path / "one", 2) as one, held_run(tmp_path / "other") as other:
        os.kill(one.supervisor, signal.SIGKILL)
        assert one.dies().signal == signal.SIGKILL
        assert_gone(one.family)
        assert other.let_go() == ["undisturbed"]
        assert zygote_of() == one.zygote


HOLDING_DRIVER = """
    import os

    from distributor import TorchDistributor


    def hang():
        import os, signal

        child = os.fork()
        if child == 0:
            signal.pause()
        print(f"pid {os.getppid()}\\npid {os.getpid()}\\npid {child}")
        signal.pause()


    TorchDistributor(2, local_mode=True, use_gpu=False, warm=True).run(hang)
"""


def test_the_drivers_death_ends_it_and_all_that_came_of_it(tmp_path: Path) -> None:
    with driver(HOLDING_DRIVER, tmp_path) as (process, mark):
        told = Counter(told_pids(process, 6))
        assert sorted(told.values()) == [1, 1, 1, 1, 2], "both ranks told of one supervisor"
        assert alive(told) == list(told)
        process.kill()
        assert_gone(told)
        until(lambda: not marked(mark), "processes of the driver are left")


LOADING_DRIVER = """
    import signal, sys

    from distributor import TorchDistributor

    sys.path.append(sys.argv[1])
    TorchDistributor(local_mode=True, use_gpu=False, warm=True, preload=["loads_for_ever"])
    signal.pause()
"""


def test_the_drivers_death_ends_it_while_it_loads(tmp_path: Path) -> None:
    begun, never = tmp_path / "begun", tmp_path / "never"
    (tmp_path / "loads_for_ever.py").write_text(waiting(begun, never))
    with driver(LOADING_DRIVER, tmp_path, str(tmp_path)) as (process, mark):
        until(lambda: begun.exists() and begun.read_text(), "it loads", DEADLINE)
        assert {found.pid for found in marked(mark)} == {process.pid, int(begun.read_text())}
        process.kill()
        until(lambda: not marked(mark), "it goes on loading")


# Odd peers


@contextmanager
def dialled() -> Iterator[socket.socket]:
    """A connection to this process's zygote."""
    connection = zygote_client._connect(os.getpid())
    assert connection is not None
    with connection:
        yield connection


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process, so that it finds all that happens meanwhile at once."""
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it has stopped")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "packet",
    [b"garbage", b"", pickle.dumps("of another version"), b"\x80\x04cno_such_module\nThing\n."],
    ids=["garbage", "empty", "unknown", "unknown type"],
)
def test_what_it_does_not_understand_disturbs_nobody(tmp_path: Path, packet: bytes) -> None:
    with held_run(tmp_path / "run") as run:
        with dialled() as peer:
            peer.sendall(packet)
            assert zygote_of() == run.zygote
        assert zygote_of() == run.zygote
        assert run.let_go() == ["undisturbed"]


def test_a_rank_asked_for_without_its_files_disturbs_nobody(tmp_path: Path) -> None:
    worker_spec = WorkerSpec(
        origin=Origin(rank=0, local_rank=0, host="here", attempt=0),
        parent=os.getpid(),
        control=0,
        program=0,
        outcome=0,
        stacks=0,
        progress=0,
        listener=None,
        scratch=new_scratch_path(),
        keep_value=False,
    )
    zygote_spec = ZygoteSpec(owner=os.getpid(), environment=common_environment(1, {}, os.environ))
    with held_run(tmp_path / "run") as run:
        connection, supervisor = zygote_client._request_supervisor(
            zygote_spec, time.monotonic() + DEADLINE
        )
        with connection:
            connection.sendall(pickle.dumps(StartRank(worker_spec, ProcessAttributes.current())))
            assert_gone([supervisor])
        assert zygote_of() == run.zygote
        assert run.let_go() == ["undisturbed"]
        until(lambda: not psutil.Process(run.zygote).children(), "a process is left")


def test_a_silent_peer_disturbs_nobody_and_does_not_keep_it() -> None:
    zygote = zygote_of()
    with dialled():
        assert zygote_of(2) == zygote
        cool_down()
        assert_gone([zygote])


def test_a_peer_that_comes_as_it_retires_disturbs_nobody(tmp_path: Path) -> None:
    """As where one thread cools down, or changes what is read at start, and another runs."""
    with held_run(tmp_path / "run") as run, dialled() as retiring:
        assert zygote_of() == run.zygote, "and so it has accepted that peer"
        with stopped(run.zygote):
            retiring.sendall(pickle.dumps(ShutDown()))
            late = zygote_client._connect(os.getpid())
        assert late is not None
        with late:
            assert zygote_of() != run.zygote
            assert run.let_go() == ["undisturbed"]


def test_a_rank_that_ends_with_its_agent_disturbs_nobody(tmp_path: Path) -> None:
    """As where one of an executor's tasks is killed, and its ranks go in the same moment."""
    identity = {"TORCHELASTIC_RUN_ID": "of this test", "GROUP_RANK": "0"}
    environment = common_environment(1, {}, os.environ) | identity
    zygote_spec = ZygoteSpec(owner=os.getpid(), environment=environment)
    ours, theirs = socket.socketpair()
    with (
        held_run(tmp_path / "run") as run,
        in_file(program_of(signal.pause, (), {})) as program,
        anonymous_file() as outcome,
        tempfile.TemporaryFile() as output,
        zygote_client.open_spawner(zygote_spec, time.monotonic() + DEADLINE) as starter,
        ours,
        theirs,
    ):
        assert isinstance(starter, SupervisedSpawner)
        worker_spec = WorkerSpec(
            origin=Origin(rank=0, local_rank=0, host="here", attempt=0),
            parent=os.getpid(),
            control=theirs.fileno(),
            program=program.fileno(),
            outcome=outcome.fileno(),
            stacks=outcome.fileno(),
            progress=outcome.fileno(),
            listener=None,
            scratch=new_scratch_path(),
            keep_value=False,
        )
        rank = starter.start(worker_spec, environment, output, output, lambda: None)
        with stopped(starter._supervisor_pid):
            starter._connection.shutdown(socket.SHUT_RDWR)
            os.kill(rank.pid, signal.SIGKILL)
            assert_gone([rank.pid])
        assert zygote_of() == run.zygote
        assert run.let_go() == ["undisturbed"]


def test_a_recipe_larger_than_a_packet_disturbs_nobody(tmp_path: Path) -> None:
    with held_run(tmp_path / "run") as run:
        env = {"TORCH_VARIABLE": "x" * 70_000}
        assert local(env=env).run(os.getenv, "TORCH_VARIABLE") == env["TORCH_VARIABLE"]
        assert run.let_go() == ["undisturbed"]


# Without it


def test_ranks_start_fresh_where_the_system_lacks_what_it_takes(run_driver: Any) -> None:
    done = run_driver("""
        import json, os
        from distributor import TorchDistributor

        del os.pidfd_open
        distributor = TorchDistributor(local_mode=True, use_gpu=False, warm=True)
        parent = distributor.run(os.getppid)
        print("FACTS " + json.dumps({"driver": os.getpid(), "parent": parent}))
    """)
    facts = facts_in(done)
    assert facts["parent"] == facts["driver"]
    assert "lacks pidfd_open (unknown to this Python)" in done.stderr
    assert "no warm process" not in done.stderr, "none was tried"


@pytest.mark.parametrize("choice", [None, "0"])
def test_a_variable_chooses_where_the_program_does_not(
    monkeypatch: pytest.MonkeyPatch, choice: str | None
) -> None:
    monkeypatch.delenv("DISTRIBUTOR_WARM", raising=False)
    if choice is not None:
        monkeypatch.setenv("DISTRIBUTOR_WARM", choice)
        await_cold()
    whose = TorchDistributor(local_mode=True, use_gpu=False, timeout=120).run(grandparent)
    assert zygotes() == ([] if choice == "0" else [whose])
    assert (whose == os.getpid()) == (choice == "0")
