"""The command line: exit codes, options and the demo.

Most commands are run by `main` in this process, whose runs share a warm process and so import
torch once; others have a process of their own.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.waiting import DEADLINE

from distributor import TorchDistributor, __version__
from distributor.cli import main, make_parser

Done = subprocess.CompletedProcess
Cli = Callable[..., "Done[str]"]

EXITS = """
import os, signal, sys
print("I am", __name__, sys.argv)
how = sys.argv[1]
if how == "exception":
    raise KeyError("lost")
if how == "SIGKILL" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if how.isdigit() and os.environ["RANK"] == "1":
    sys.exit(int(how))
"""


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Return a function that runs the command line in ``tmp_path``."""

    def run(
        *args: str, env: dict[str, str | None] | None = None, timeout: float = DEADLINE
    ) -> Done[str]:
        merged = {**os.environ, **(env or {})}
        return subprocess.run(
            [sys.executable, "-m", "distributor", *args],
            env={name: value for name, value in merged.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=tmp_path,
        )

    return run


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Cli]:
    """Return a function that runs the command line in this process, in ``tmp_path``."""
    of_sigquit = signal.getsignal(signal.SIGQUIT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # the same for all tests, or the warm process would be replaced

    def run(*args: str, env: dict[str, str | None] | None = None) -> Done[str]:
        for name, value in (env or {}).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        try:
            code = main(args)
        except SystemExit as exited:  # of argparse
            code = int(exited.code or 0)
        return Done(args, code, *capsys.readouterr())

    yield run
    signal.signal(signal.SIGQUIT, of_sigquit)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that writes a script and returns its path."""

    def write(source: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(source)
        return str(path)

    return write


def test_version_and_help(cli: Cli) -> None:
    assert cli("--version").stdout == f"distributor {__version__}\n"
    done = cli()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == cli("--help").stdout
    assert "run a script or module on several ranks" in done.stderr
    shown = cli("run", "--help").stdout
    for flags, _ in FLAGS.values():
        # The flag, and on the same or the next line its description.
        assert re.search(rf"{flags[0]}[ ,\n].*?[a-z]{{3}}", shown, re.DOTALL), flags[0]


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("0", 0, "Finished local training with 2 processes"),
        ("3", 3, "rank 1 .* exited with code 3"),
        ("exception", 1, "KeyError: 'lost'"),
        ("SIGKILL", 137, "rank 1 .* was killed by SIGKILL"),
    ],
)
def test_the_exit_code_is_that_of_the_script(
    here: Cli, script: Any, how: str, code: int, message: str
) -> None:
    done = here("run", "--nproc", "2", "--cpu", script(EXITS), "--", how)
    assert done.returncode == code, done.stderr
    assert re.search(message, done.stderr)
    assert "[0] I am __main__" in done.stdout
    assert ("distributor: " in done.stderr) == (code != 0)
    assert done.stderr.count("raise KeyError") == (how == "exception"), "it is shown once"
    assert "/launch/" not in done.stderr, "the launcher's own frames are not shown"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["no-such-script.py"], "no script no-such-script.py"),
        (["-m", "no.such"], "no module no .looked in"),
        (["--nproc", "two", "train.py"], "--nproc.*expected a number of ranks, or .* found 'two'"),
        (["--master", "local[2]", "train.py"], "--master .* add --cluster"),
        (["--timeout", "-1", "train.py"], "--timeout must be a positive"),
        (["--env", "RANK", "train.py"], "expected NAME=VALUE, found 'RANK'"),
        (["--show-output", "loud", "train.py"], "expected 'all', 'none' or ranks"),
        (
            ["train.py", "--lr", "1", "--nproc", "2", "--", "x"],
            "--nproc is an option of distributor run, and --lr is not: put .* train.py after --",
        ),
        (["--num-workers=2", "train.py"], "--num-workers. Did you mean '--nproc'?"),
        (["--epochs", "2", "train.py"], "--epochs is an option of train.py: put it after the sc"),
        (
            ["--standalone", "--nnodes", "2", "--nproc_per_node=2", "--rdzv-id", "1", "train.py"],
            "torchrun's --standalone is the default here, --nnodes is not needed, "
            "--nproc_per_node is --nproc here, .* ranks, --rdzv-id is not needed",
        ),
        (["torchrun", "x.py"], "torchrun is a command; .* pass the script itself"),
        ([], "required: script$"),
    ],
)
def test_bad_input_is_2_and_launches_nothing(
    here: Cli, script: Any, options: list[str], message: str
) -> None:
    script("print('launched')")
    done = here("run", "--cpu", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(message, done.stderr), done.stderr
    assert "Started" not in done.stderr
    assert "Traceback" not in done.stderr


NO_SPARK = {"JAVA_HOME": "/there/is/no/java"}
"""With this Java, any attempt to start Spark fails."""


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["no-such-script.py"], 2, "no script no-such-script.py"),
        (["--master", "sprak://here:7077", "train.py"], 2, "--master is 'sprak://here:7077', .*"),
        (["--master", "yarn", "train.py"], 2, "neither HADOOP_CONF_DIR nor YARN_CONF_DIR"),
        (["--master", "spark://127.0.0.1:9", "train.py"], 1, "No Spark master answers .*refused"),
        (
            ["--master", "local[2]", "train.py"],
            1,
            "/there/is/no/java/bin/java does not run.* apt-get install openjdk-17-jre-headless",
        ),
    ],
)
def test_input_is_checked_before_spark_starts(
    here: Cli, script: Any, options: list[str], code: int, message: str
) -> None:
    script("print('launched')")
    environment: dict[str, str | None] = {**NO_SPARK, "HADOOP_CONF_DIR": None}
    done = here("run", "--cpu", "--cluster", *options, env=environment)
    assert (done.returncode, done.stdout) == (code, "")
    assert re.search(message, done.stderr), done.stderr
    assert len(done.stderr.splitlines()) == 1


MODULE = """
import os
import sys
import helper
print(__name__, __package__, helper.VALUE, sys.argv[1:], os.environ.get("COLOUR", "grey"))
if sys.argv[1:] == ["fail"]:
    raise KeyError("lost")
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    """Write a module in a package and another module that it imports, and return its name."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(MODULE)
    (tmp_path / "helper.py").write_text("VALUE = 7")
    return "package.train"


def test_a_module_runs_on_a_range_of_ranks(here: Cli, module: str) -> None:
    done = here("run", "--cpu", "--nproc", "1,2", "-m", module, "--", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    expected = [f"[{rank}] __main__ package 7 ['--lr', '0.1'] grey" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == expected


@pytest.mark.slow(ci=True)
@pytest.mark.spark
def test_a_cluster_without_a_master_and_with_its_own_python(
    cli: Cli, module: str, tmp_path: Path
) -> None:
    """The default master is shown, and executors run the interpreter of --conf."""
    used, python = tmp_path / "used", tmp_path / "python"
    python.write_text(f'#!/bin/sh\ntouch {used}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    options = ["--cluster", "--cpu", "--conf", "spark.ui.enabled=false"]
    options += ["--conf", f"spark.pyspark.python={python}", "--env", "COLOUR=blue"]
    done = cli("run", *options, "-m", module, "--", "fail")
    assert done.returncode == 1
    assert used.exists()
    assert "No --master was given: Spark runs on local[*]" in done.stderr
    assert done.stdout == "[0] __main__ package 7 ['fail'] blue\n"
    assert done.stderr.count('raise KeyError("lost")') == 1
    for noise in ("[Stage", "Lost task", "distributor-report", "FutureWarning", "\tat "):
        assert noise not in done.stderr


def test_ranks_without_gpus_are_bad_input(here: Cli, script: Any) -> None:
    done = here("run", script("print('launched')"), env={"CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "For CPUs pass --cpu." in done.stderr


def test_timeout_is_124(here: Cli, script: Any) -> None:
    done = here("run", "--cpu", "--timeout", "3", script("import threading as t; t.Event().wait()"))
    assert done.returncode == 124
    assert re.search(r"distributor: The run took longer than .*rank 0", done.stderr)


def test_arguments_environment_and_output(here: Cli, script: Any, tmp_path: Path) -> None:
    source = """
import os, sys
print(sys.argv[1:], os.environ["COLOUR"], os.environ["EMPTY"], os.environ["EQUALS"])
print("to stderr", file=sys.stderr)
"""
    logs = tmp_path / "logs"
    options = ["--env", "COLOUR=blue", "--env", "EMPTY=", "--env", "EQUALS=a=b"]
    options += ["--show-output", "1", "--log-dir", str(logs), "--num-processes", "3", "--cpu"]
    arguments = ["--lr", "0.1", "-x", "--", "--timeout", "text", "-"]
    done = here("run", *options, script(source), "--", *arguments)
    assert done.returncode == 0, done.stderr
    line = f"{arguments} blue  a=b\n"
    assert done.stdout == f"[1] {line}"
    assert [text for text in done.stderr.splitlines() if "to stderr" in text] == ["[1] to stderr"]
    (run,) = logs.iterdir()
    assert {path.name: path.read_text() for path in (run / "attempt_0").iterdir()} == {
        **{f"rank{rank}.stdout": line for rank in range(3)},
        **{f"rank{rank}.stderr": "to stderr\n" for rank in range(3)},
    }


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        (["train.py", "--lr", "0.1", "--", "-x"], ["--lr", "0.1", "--", "-x"]),
        (["train.py", "--nproc", "1", "--cpu", "--", "--nproc", "5"], ["--nproc", "5"]),
        (["train.py", "--", "--help"], ["--help"]),
    ],
)
def test_options_may_follow_the_script_and_take_none_of_its_own(
    here: Cli, script: Any, given: list[str], arguments: list[str]
) -> None:
    script("import sys; print(sys.argv[1:])")
    done = here("run", "--cpu", *given)
    assert (done.returncode, done.stdout) == (0, f"[0] {arguments}\n"), done.stderr
    assert "Started local training with 1 process\n" in done.stderr


FLAGS: dict[str, tuple[list[str], object]] = {
    "num_processes": (["--nproc", "2,4"], (2, 4)),
    "local_mode": (["--cluster"], False),
    "use_gpu": (["--cpu"], False),
    "env": (["--env", "A=1", "--env", "B="], [("A", "1"), ("B", "")]),
    "forward_env": (["--forward-env", "HF_*", "--forward-env", "A"], ["HF_*", "A"]),
    "timeout": (["--timeout", "1.5"], 1.5),
    "start_timeout": (["--start-timeout", "2"], 2.0),
    "stall_warning": (["--no-stall-warning"], None),
    "stall_timeout": (["--stall-timeout", "60"], 60.0),
    "log_dir": (["--log-dir", "logs"], "logs"),
    "event_log": (["--no-event-log"], False),
    "step_times": (["--no-step-times"], False),
    "py_modules": (["--py-modules", "a", "--py-modules", "b.py"], ["a", "b.py"]),
    "show_output": (["--show-output", "0,2"], (0, 2)),
    "hub_address": (["--hub-address", "here:1"], "here:1"),
    "hub_port": (["--hub-port", "7077"], 7077),
    "rank_ports": (["--rank-ports", "29500-29599"], "29500-29599"),
    "warm": (["--no-warm"], False),
    "preload": (["--preload", "json", "--preload", "csv"], ["json", "csv"]),
    "numa_binding": (["--numa-binding"], True),
    "gpu_type": (["--gpu-type", "a10"], "a10"),
    "pool": (["--pool", "reserved"], "reserved"),
    "mlflow_ranks": (["--mlflow-ranks", "all"], "all"),
    "storage_path": (["--storage-path", "s3://bucket/runs"], "s3://bucket/runs"),
    "name": (["--name", "mine"], "mine"),
    "max_failures": (["--max-failures", "2"], 2),
    "recovery": (["--recovery", "in_place"], "in_place"),
    "max_preemption_failures": (["--max-preemption-failures", "-1"], -1),
    "environment": (["--environment", "env.tar.gz"], "env.tar.gz"),
    "barrier": (["--no-barrier"], False),
    "gpu_sharing": (["--gpu-sharing"], True),
    "executor_resources": (
        ["--executor-resource", "spark.executor.cores=4"],
        [("spark.executor.cores", "4")],
    ),
}
NOT_ON_COMMAND_LINE = {"listeners"}
"""Settings that are Python objects."""


@pytest.mark.parametrize(
    "field", sorted({f.name for f in dataclasses.fields(TorchDistributor)} - NOT_ON_COMMAND_LINE)
)
def test_every_field_has_a_flag(field: str) -> None:
    flags, value = FLAGS[field]
    options = vars(make_parser().parse_args(["run", *flags, "train.py", "--", "-x"]))
    assert options[field] == value
    assert set(options) & set(FLAGS) == {field}, "options that were not passed have no value"
    assert (options["script"], options["args"][-1]) == ("train.py", "-x")


def test_ctrl_backslash_shows_stacks_and_ctrl_c_is_130(script: Any, tmp_path: Path) -> None:
    source = "import os, threading; print('pid', os.getpid()); threading.Event().wait()"
    process = subprocess.Popen(
        [sys.executable, "-m", "distributor", "run", "--nproc", "2", "--cpu", script(source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    watchdog = threading.Timer(DEADLINE, process.kill)
    watchdog.start()
    try:
        assert process.stdout
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        process.send_signal(signal.SIGQUIT)
        assert process.stderr
        shown = iter(process.stderr.readline, "")
        assert any(line.startswith("Run ") and "continues" in line for line in shown)
        assert any(line == "ranks 0, 1:\n" for line in shown)
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=20)
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert message.endswith("distributor: interrupted: the run has ended, and no rank is left.\n")
    assert "Traceback" not in message
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def accuracies(done: Done[str]) -> list[float]:
    assert done.returncode == 0, done.stderr
    table = done.stdout.partition("test accuracy  time\n")[2].partition("\n\n")[0]
    return [float(text) for text in re.findall(r"  (0\.\d{4}|1\.0000)  +\d+\.\d s$", table, re.M)]


@pytest.mark.slow(ci=True)
@pytest.mark.spark
@pytest.mark.timeout(500)
def test_demo(cli: Cli) -> None:
    pytest.importorskip("sklearn")
    done = cli("demo", timeout=480)
    here, there = accuracies(done)
    assert min(here, there) > 0.95
    assert "Spark needs Java" not in done.stdout
    assert "What to try next" in done.stdout
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    assert len(lines) < 60
    assert [line for line in lines if re.search("warn|log4j|log level", line, re.IGNORECASE)] == []
    assert [line for line in lines if "\r" in line or "[Stage" in line] == []
