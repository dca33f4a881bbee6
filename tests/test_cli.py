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
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.packages import wheel

from distributor import TorchDistributor, __version__
from distributor.cli import GROUPS, main, make_parser

DEADLINE = 120
"""Seconds for one command, on a loaded machine."""
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


def test_version(cli: Cli) -> None:
    done = cli("--version")
    assert (done.returncode, done.stdout) == (0, f"distributor {__version__}\n")


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
    assert "/launch/" not in done.stderr, "the launcher's own frames are not shown"


def install(site: Path) -> None:
    """Install packages with console scripts."""
    files = {
        "toolbox/__main__.py": "",
        "toolbox/scripts/x.py": 'if __name__ == "__main__": pass',
        "bare_tools.py": "def main(): pass",
        "tools-1.0.dist-info/entry_points.txt": "[console_scripts]\n"
        "toolbox = toolbox.cli:main\ntoolbox-cli = bare_tools:main\n",
    }
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["no-such-script.py"], "no script no-such-script.py"),
        (["--nproc", "0", "train.py"], "--nproc has to be a positive integer, but is 0"),
        (["--nproc", "two", "train.py"], "--nproc.*expected a number of ranks, or .* found 'two'"),
        (["--nproc", "1,2,3", "train.py"], "--nproc.* such as 2,4; found '1,2,3'"),
        (["--nproc", "4,2", "train.py"], "minimum is greater than the maximum"),
        (["-m", "no.such"], "no module no .looked in"),
        (["--master", "local[2]", "train.py"], "--master .* add --cluster"),
        (["--conf", "spark.x=1", "train.py"], "--conf .* add --cluster"),
        (["--timeout", "-1", "train.py"], "--timeout must be a positive"),
        (["--name", "a", "train.py"], "--name is 'a', but --storage-path is not set"),
        (["--gpu-type", "Z80", "train.py"], "--gpu-type must be one of"),
        (["--env", "RANK=3", "train.py"], "--env must not set RANK"),
        (["--env", "RANK", "train.py"], "expected NAME=VALUE, found 'RANK'"),
        (["--show-output", "loud", "train.py"], "expected 'all', 'none' or ranks"),
        (
            ["--nproc", "2", "--show-output", "0,2", "train.py"],
            "^distributor: --show-output has rank 2, but --nproc is 2: ranks .* from 0 to 1",
        ),
        (["--show", "0", "train.py"], "--show. Did you mean '--show-output'?"),
        (
            ["train.py", "--lr", "1", "--nproc", "2", "--", "x"],
            "--nproc is an option of distributor run, and --lr is not: put .* train.py after --",
        ),
        (["train.py", "--nproc", "2", "--verbose"], "--nproc is .* and --verbose is not"),
        (["train.py", "--nproc", "2", "data"], "--nproc is .* and data is not"),
        (["--hub-address", "host:abc", "train.py"], "--hub-address must be 'host' or 'host:port'"),
        (["--log-dir", "train.py", "train.py"], "--log-dir must be the path of a folder"),
        (["--no-such-option", "train.py"], "no-such-option"),
        (["--nprocs=2", "train.py"], "--nprocs. Did you mean '--nproc'?"),
        (["--num-workers=2", "train.py"], "--num-workers. Did you mean '--nproc'?"),
        (["--gpus", "2", "train.py"], "--gpus. Did you mean '--nproc'?"),
        (["--remote", "train.py"], "--remote. Did you mean '--cluster'?"),
        (["--epochs", "2", "train.py"], "--epochs is an option of train.py: put it after the sc"),
        (["--epochs", "2", "-m", "a.b"], "--epochs is an option of a.b: put it after the script"),
        (["--model=x", "train.py"], "'--module'. If not: --model is an option of train.py: put it"),
        (["--epochs"], "--epochs. It takes --barrier, --cluster, "),
        (
            ["--standalone", "--nnodes", "2", "--nproc_per_node=2", "--rdzv-id", "1", "train.py"],
            "torchrun's --standalone is the default here, --nnodes is not needed, "
            "--nproc_per_node is --nproc here, .* ranks, --rdzv-id is not needed",
        ),
        (["--log-dir", "/proc/no", "train.py"], "--log-dir is '/proc/no', which cannot be created"),
        (["--", "toolbox", "x"], "toolbox is a command; its module is toolbox.scripts.x: pass -m"),
        (["toolbox"], "toolbox is a command; its module is toolbox: pass -m toolbox, and"),
        (["toolbox-cli"], "toolbox-cli is a command; pass the path of its script: toolbox-cli"),
        (["torchrun", "x.py"], "torchrun is a command; .* pass the script itself"),
        ([], "required: script$"),
    ],
)
def test_bad_input_is_2_and_launches_nothing(
    here: Cli, script: Any, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    script("print('launched')")
    install(Path("site"))
    monkeypatch.syspath_prepend("site")
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
        (["-m", "no_such.module"], 2, "no module no_such"),
        (["--nproc", "0", "train.py"], 2, "--nproc has to be a positive integer"),
        (["--timeout", "-1", "train.py"], 2, "--timeout must be a positive"),
        (["--master", "sprak://here:7077", "train.py"], 2, "--master is 'sprak://here:7077', .*"),
        (["--master", "spark://here", "train.py"], 2, "--master is 'spark://here', .*HOST:PORT"),
        (["--conf", "spark.master=local[x]", "train.py"], 2, r"--master is 'local\[x\]'"),
        (["--master", "yarn", "train.py"], 2, "neither HADOOP_CONF_DIR nor YARN_CONF_DIR"),
        (["--master", "spark://127.0.0.1:9", "train.py"], 1, "No Spark master answers .*refused"),
        (
            ["--conf", "spark.pyspark.driver.python=python2", "train.py"],
            2,
            "spark.pyspark.driver.python is 'python2', but the driver is this process",
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


def test_the_drivers_python_may_be_configured_to_be_this_one(here: Cli, script: Any) -> None:
    option = f"spark.pyspark.driver.python={sys.executable}"
    script("")
    done = here("run", "--cpu", "--cluster", "--conf", option, "--master", "no", "train.py")
    assert "--master is 'no'" in done.stderr


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


NAMED_MODULE = "print(__name__, __package__)"
EDITABLE = """
import sys
from importlib.util import spec_from_file_location

class Editable:
    "Finds a package as setuptools' finders of editable installations do."
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "edited":
            return spec_from_file_location(name, "{0}/__init__.py")
        if name.startswith("edited."):
            return spec_from_file_location(name, "{0}/" + name[7:] + ".py")

sys.meta_path.append(Editable)
"""


@pytest.mark.parametrize("name", ["package.inner.train", "package.inner"])
def test_a_module_of_a_namespace_in_a_package_runs(
    here: Cli, module: str, tmp_path: Path, name: str
) -> None:
    inner = tmp_path / "package" / "inner"
    inner.mkdir()
    for file in ("train.py", "__main__.py"):
        (inner / file).write_text(NAMED_MODULE)

    done = here("run", "--cpu", "-m", name)
    assert (done.returncode, done.stdout) == (0, "[0] __main__ package.inner\n"), done.stderr


def test_a_module_of_an_editable_installation_runs(cli: Cli, tmp_path: Path) -> None:
    project, start = tmp_path / "project", tmp_path / "start"
    for folder in (project, start):
        folder.mkdir()
    (project / "__init__.py").touch()
    (project / "train.py").write_text(NAMED_MODULE)
    (start / "sitecustomize.py").write_text(EDITABLE.format(project))

    python_path = os.pathsep.join(filter(None, [str(start), os.environ.get("PYTHONPATH")]))
    done = cli("run", "--cpu", "-m", "edited.train", env={"PYTHONPATH": python_path})
    assert (done.returncode, done.stdout) == (0, "[0] __main__ edited\n"), done.stderr


def test_a_module_may_be_one_that_only_the_ranks_have(here: Cli, tmp_path: Path) -> None:
    name = "gadget_of_ranks"
    with zipfile.ZipFile(wheel(tmp_path / "wheels", "1.0", name), "a") as packed:
        packed.writestr(f"{name}_train.py", "import sys; print(__name__, sys.argv[1:])")
    env = {"DISTRIBUTOR_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1"}
    env["PIP_FIND_LINKS"] = str(tmp_path / "wheels")
    options = ["--requirement", f"{name}==1.0", "-m", f"{name}_train", "--", "-x"]
    done = here("run", "--cpu", *options, env={**env})
    assert (done.returncode, done.stdout) == (0, "[0] __main__ ['-x']\n"), done.stderr


def test_a_package_without_a_main_module_is_bad_input(here: Cli, module: str) -> None:
    done = here("run", "--cpu", "-m", "package")
    assert done.returncode == 2
    assert "no module package.__main__" in done.stderr


def test_a_failure_is_shown_once(here: Cli, module: str) -> None:
    done = here("run", "--cpu", "--nproc", "2", "-m", module, "--", "fail")
    assert done.returncode == 1
    assert done.stderr.count('raise KeyError("lost")') == 1
    assert len(re.findall("^Run .* of package.train$", done.stderr, re.MULTILINE)) == 1
    assert done.stderr.count("attempt 0") == 1


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


@pytest.mark.spark
def test_the_cause_of_a_failed_spark_start_is_one_line(cli: Cli, script: Any) -> None:
    options = ["--cluster", "--master", "local[2]", "--conf", "spark.driver.port=x"]
    done = cli("run", "--cpu", *options, script("print('launched')"))
    assert (done.returncode, done.stdout) == (1, "")
    [message] = [line for line in done.stderr.splitlines() if line.startswith("distributor: ")]
    assert "Spark could not start on local[2]" in message
    causes = '"spark.driver.port" is invalid', "spark.driver.port should be int"  # of PySpark 4.0
    assert any(cause in message for cause in causes)
    assert "\tat " not in done.stderr


@pytest.mark.spark
def test_spark_without_java_is_one_line(here: Cli, script: Any) -> None:
    options = ["--cluster", "--cpu", "--master", "local[2]"]
    done = here("run", *options, script("print('launched')"), env={**NO_SPARK})
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert "/there/is/no/java/bin/java does not run" in line
    assert "apt-get install openjdk-17-jre-headless" in line


def test_a_syntax_error_of_the_script_is_shown_without_frames_of_the_package(
    here: Cli, script: Any
) -> None:
    done = here("run", "--cpu", script("def train(:\n    pass\n"))
    assert (done.returncode, done.stdout) == (2, "")
    first, *_, last = done.stderr.splitlines()
    assert first.endswith('train.py", line 1')
    assert last == "SyntaxError: invalid syntax"


def test_no_command_shows_the_help(cli: Cli) -> None:
    done = cli()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == cli("--help").stdout
    assert "run a script or module on several ranks" in done.stderr


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
        (["train.py", "--n", "5"], ["--n", "5"]),
        (["train.py", "--lr", "0.1", "--", "-x"], ["--lr", "0.1", "--", "-x"]),
        (["train.py", "--nproc", "1", "--cpu", "--", "--nproc", "5"], ["--nproc", "5"]),
        (["train.py", "--nproc=1"], []),
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
    "max_preemption_failures": (["--max-preemption-failures", "-1"], -1),
    "environment": (["--environment", "env.tar.gz"], "env.tar.gz"),
    "barrier": (["--no-barrier"], False),
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


def test_help_describes_every_flag(cli: Cli) -> None:
    done = cli("run", "--help")
    assert done.returncode == 0
    for flags, _ in FLAGS.values():
        # The flag, and on the same or the next line its description.
        assert re.search(rf"{flags[0]}[ ,\n].*?[a-z]{{3}}", done.stdout, re.DOTALL), flags[0]
    text = " ".join(done.stdout.split())
    assert "seconds that an attempt may take once its ranks have started" in text
    assert "unless --hub-address has one" in text, "settings have the names of options"
    groups = re.findall(r"^(\w[\w ]*):$", done.stdout, re.MULTILINE)
    assert groups == ["options", "program", *GROUPS, "examples"]
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(FLAGS)


@pytest.mark.parametrize("command", [["--help"], ["run", "--help"], ["doctor", "--help"]])
def test_it_works_without_docstrings_and_assertions(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-OO", "-m", "distributor", *command],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: distributor" in done.stdout
    if "run" in command:
        assert "seconds until all ranks must have started" in " ".join(done.stdout.split())


def test_a_run_works_without_docstrings_and_assertions(script: Any, tmp_path: Path) -> None:
    """In a process of its own, which exits with the code of the script."""
    command = [sys.executable, "-OO", "-m", "distributor", "run", "--cpu", "--nproc", "2"]
    command += [script(EXITS), "--", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    lines = [line for line in done.stdout.splitlines() if "I am __main__" in line]
    assert sorted(line[:4] for line in lines) == ["[0] ", "[1] "]
    assert re.search("rank 1 .* exited with code 3", done.stderr)
    assert "/launch/" not in done.stderr, "the launcher's own frames are not shown"


@pytest.mark.slow(ci=True)
@pytest.mark.spark
def test_cluster(cli: Cli, script: Any) -> None:
    source = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(())
dist.all_reduce(total)
print("rank", dist.get_rank(), "total", total.item(), sys.argv[1:], os.environ["COLOUR"])
dist.destroy_process_group()
"""
    options = ["--cluster", "--master", "local[2]", "--nproc", "2", "--cpu"]
    options += ["--conf", "spark.ui.enabled=false", "--env", "COLOUR=blue"]
    done = cli("run", *options, script(source), "--", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert sorted(lines) == [
        f"[{rank}] rank {rank} total 2.0 ['--lr', '0.1'] blue" for rank in range(2)
    ]


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
def test_the_demo_without_java_names_the_package_to_install(here: Cli, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    empty = tmp_path / "empty"
    empty.mkdir()
    done = here("demo", env={"PATH": str(empty), "JAVA_HOME": None})
    (accuracy,) = accuracies(done)
    assert accuracy > 0.95
    assert "What to try next" in done.stdout
    assert "Spark needs Java 17 or later. There is no Java: JAVA_HOME is unset" in done.stdout
    assert "apt-get install openjdk-17-jre-headless" in done.stdout
    assert "[0] rank 0 of 2" in done.stdout


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
