"""``distributor run -f``: the fields of a file, those of Databricks, and what is wrong with one."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import needs_java

from distributor.cli import main
from distributor.run_file import PARAMETERS, REFUSED

ROOT = Path(__file__).parents[1]
PROGRAM = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "GREETING", "DISTRIBUTOR_PARAMETERS")
print(json.dumps([sys.argv[1:], *(os.environ.get(name) for name in names)]), flush=True)
"""
OURS = """
nproc: 2
cpu: true
script: code/train.py
args: [--lr, 0.10, two words]
env: {GREETING: 0010}
max-failures: 1
timeout: 120
"""
DATABRICKS = """
experiment_name: my-training
compute: {num_accelerators: 2, accelerator_type: GPU_8xH100}
code_source:
  type: snapshot
  snapshot: {root_path: code}
command: |
  torchrun --standalone --nproc_per_node=8 \\
    $CODE_SOURCE_PATH/train.py --lr 0.10 'two words'
env_variables:
  GREETING: yes
parameters: {lr: 0.1, layers: [1, 2]}
max_retries: 2
timeout_minutes: 1.5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(PROGRAM)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dry_run(folder: Path, text: str, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Return the command line that stands for a file, relative to the folder, or the error."""
    file = folder / "run.yaml"
    file.write_text(text)
    code = main(["run", "-f", str(file), "--dry-run", *options])
    out, err = capsys.readouterr()
    assert code == (2 if err else 0), err
    return (err or out).strip().replace(f"{folder}/", "")


def test_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(folder, OURS, capsys) == (
        "distributor run --nproc 2 --cpu --env GREETING=0010 --max-failures 1 --timeout 120 "
        "code/train.py -- --lr 0.10 'two words'"
    )


def test_fields_of_databricks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parameters = json.dumps({"lr": 0.1, "layers": [1, 2]})
    assert dry_run(folder, DATABRICKS, capsys) == (
        "MLFLOW_EXPERIMENT_NAME=my-training distributor run --nproc 2 --gpu-type H100 "
        f"--env GREETING=yes --env '{PARAMETERS}={parameters}' --max-failures 2 --timeout 90 "
        "code/train.py -- --lr 0.10 'two words'"
    )


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("nproc: [1, 2]", "--nproc 1,2 "),
        ("show_output: [0, 1]\nnproc: 2", "--show-output 0,1 --nproc 2 "),
        ("warm: false", "--no-warm "),
        ("cpu: false", ""),
        (
            "requirement: [0010, yes, '1.10']",
            "--requirement 0010 --requirement yes --requirement 1.10 ",
        ),
        ("preload: [json, numpy]", "--preload json --preload numpy "),
        ("max_failures: -1", "--max-failures=-1 "),
        (
            "cluster: true\nmaster: local[2]\nconf: {a.b: 1, c: x y}",
            "--cluster --master 'local[2]' --conf a.b=1 --conf 'c=x y' ",
        ),
        ("environment: [a, 'b>=1']", "--requirement a --requirement 'b>=1' "),
        ("environment: {dependencies: [a]}", "--requirement a "),
        ("environment: {dependencies: packages.yaml}", "--requirement c "),
        ("compute: {accelerator_type: GPU_1xA10}", "--gpu-type A10 "),
        ("storage_path: null", ""),
        ("", ""),
    ],
)
def test_kinds_of_fields(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, tokens: str
) -> None:
    (folder / "packages.yaml").write_text("version: 6\ndependencies: [c]")
    found = dry_run(folder, f"script: code/train.py\n{text}", capsys)
    assert found == f"distributor run {tokens}code/train.py"


@pytest.mark.parametrize(
    ("command", "tokens"),
    [
        ("torchrun train.py", "train.py"),
        ("torchrun --nproc-per-node 4 --nnodes=1 train.py -x", "--nproc 4 train.py -- -x"),
        ("torchrun --standalone -m package.train a", "-m package.train -- a"),
        ("python -u ${CODE_SOURCE_PATH}/code/train.py", "code/train.py"),
        ("/usr/bin/python3.12 -m package.train --lr=1", "-m package.train -- --lr=1"),
    ],
)
def test_commands(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, tokens: str
) -> None:
    (folder / "train.py").touch()
    (folder / "package").mkdir()
    (folder / "package" / "train.py").touch()
    assert dry_run(folder, f"command: {command}", capsys) == f"distributor run {tokens}"


def test_fields_are_overridden(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        *("--override", "compute.num_accelerators=4", "--override", "env_variables.NEW=1"),
        *("--override", "command=torchrun code/train.py", "--override=max_retries=0", "--cpu"),
    ]
    assert dry_run(folder, "env_variables: {OLD: 1}\nmax_retries: 3", capsys, *options) == (
        "distributor run --env OLD=1 --env NEW=1 --max-failures 0 --nproc 4 --cpu code/train.py"
    )


def test_options_of_the_command_line_come_last(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = dry_run(folder, "nproc: 2\nscript: code/train.py", capsys, "--nproc", "3")
    assert found == "distributor run --nproc 2 --nproc 3 code/train.py"
    (folder / "run.yaml").write_text("nproc: 2\ncpu: true")
    script = str(folder / "code/train.py")
    assert main(["run", "--dry-run", "-f", str(folder / "run.yaml"), script, "--lr", "1"]) == 0
    out = capsys.readouterr().out
    assert out == f"distributor run --nproc 2 --cpu {script} --lr 1\n"


ERRORS = [
    ("nproc: two", "run.yaml:2: nproc: expected a number of ranks, or minimum and maximum such"),
    ("nproc: 0", "run.yaml:2: nproc has to be a positive integer, but is 0"),
    ("nporc: 2", "run.yaml:2: nporc is no field of a run. Did you mean 'nproc'?"),
    ("max_failures: many", "run.yaml:2: max_failures: invalid int value: 'many'"),
    ("max_retries: -2", "run.yaml:2: max_retries must be"),
    ("cpu: 1", "run.yaml:2: cpu must be true or false, but is '1'"),
    ("timeout: {a: 1}", "run.yaml:2: timeout"),
    ("timeout_minutes: soon", "run.yaml:2: timeout_minutes must be a number, but is 'soon'"),
    ("timeout_minutes: 0", "run.yaml:2: timeout_minutes must be a positive"),
    ("compute: 8", "run.yaml:2: compute must have fields, but is '8'"),
    ("compute:\n  num_accelerators: a", "run.yaml:3: compute.num_accelerators: expected a number"),
    ("compute:\n  accelerator_type: Z80", "run.yaml:3: compute.accelerator_type must be one of"),
    ("compute:\n  gpus: 8", "run.yaml:3: compute.gpus is no field. Did you mean 'num_acceler"),
    ("env_variables: [A]", "run.yaml:2: env_variables must have fields"),
    ("env_variables:\n  A: [1]", "run.yaml:3: env_variables.A must be a single value, but is [1]"),
    (
        "environment: {dependencies: {a: 1}}",
        "run.yaml:2: environment.dependencies must be a single",
    ),
    ("environment: x.tar.gz", "There is no packed environment"),
    ("environment: {dependencies: no.yaml}", "No such file"),
    ("experiment_name: []", "run.yaml:2: experiment_name must be a single value, but is []"),
    ("args: [[1]]", "run.yaml:2: args[0] must be a single value, but is [1]"),
    ("args: 3", "run.yaml:2: args must be a list, but is '3'"),
    ("code_source: {type: snapshot}\ncommand: python a.py", "script both say what runs"),
    ("nproc: 1\nnproc: 2", "run.yaml:3: nproc is there twice"),
    ("nproc: [1", "invalid YAML: expected ',' or ']'"),
    ("nproc: 2\n\t", "invalid YAML"),
]


@pytest.mark.parametrize(("text", "says"), ERRORS)
def test_errors_name_the_line(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    found = dry_run(folder, f"script: code/train.py\n{text}", capsys)
    assert found.startswith("distributor: ")
    assert says in found


@pytest.mark.parametrize("name", REFUSED)
def test_what_belongs_to_a_service_is_refused_by_name(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    section, dot, field = name.partition(".")
    text = f"{section}:\n  {field}: x" if dot else f"{name}: x"
    line = 2 if dot else 1
    assert dry_run(folder, text, capsys) == (
        f"distributor: run.yaml:{line}: {name} belongs to Databricks' service. {REFUSED[name]}"
    )


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("echo hello", "command starts 'echo', but it has to start one program of Python"),
        ("python a.py | tee log", "command is 'python a.py | tee log', but it has to start one"),
        ("pip install x && python a.py", "but it has to start one program of Python"),
        ("python -c pass", "but it has to start one program of Python"),
        ("torchrun --standalone", "but it has to start one program of Python"),
        ("python 'a.py", "command cannot be read: No closing quotation"),
        ('""', "command is '', but it has to start one program of Python"),
    ],
)
def test_commands_that_are_more_than_a_program(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, says: str
) -> None:
    found = dry_run(folder, f"command: {command}", capsys)
    assert found.startswith("distributor: run.yaml:1: ")
    assert says in found


def test_other_errors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = "compute: {num_accelerators: 8}\ncommand: python code/train.py"
    assert "one process for 8 accelerators: start it with torchrun" in dry_run(
        folder, started, capsys
    )
    assert "code_source has no root_path" in dry_run(
        folder, "code_source: {type: snapshot}\ncommand: python a.py", capsys
    )
    assert "--override nproc: expected KEY=VALUE" in dry_run(
        folder, "script: code/train.py", capsys, "--override", "nproc"
    )
    assert "--override nproc=x: nproc: expected a number" in dry_run(
        folder, "script: code/train.py", capsys, "--override", "nproc=x"
    )
    assert "code/missing.py" in dry_run(folder, "script: code/missing.py", capsys)
    assert "run.yaml:1: the file must have fields, but is ['a', 'b']." in dry_run(
        folder, "- a\n- b", capsys
    )
    assert main(["run", "--override", "a=b", "train.py"]) == 2
    assert "--override replaces a field of a file, but -f is missing" in capsys.readouterr().err
    assert main(["run", "-f", str(folder / "no.yaml")]) == 2
    assert "no.yaml" in capsys.readouterr().err
    (folder / "run.yaml").write_text("script: code/train.py")
    assert main(["run", "-f", str(folder / "run.yaml"), "other.py"]) == 2
    assert "says what to run, and so does 'other.py'" in capsys.readouterr().err


def run(folder: Path, text: str, *options: str) -> list[Any]:
    (folder / "run.yaml").write_text(text)
    command = [sys.executable, "-m", "distributor", "run", "-f", str(folder / "run.yaml")]
    found = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=180, cwd=folder
    )
    assert found.returncode == 0, found.stderr
    lines = (line.partition("] ")[2] for line in found.stdout.splitlines())
    return sorted((json.loads(line) for line in lines if line.startswith("[")), key=lambda x: x[1])


def test_the_file_of_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/reference/cli.md").read_text()
    [(command, printed)] = re.findall(r"\$ distributor (run -f .*)\n(.*)", page)
    shutil.copy(ROOT / "conf/run.yaml", folder)
    shutil.copy(folder / "code/train.py", folder)

    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == f"{printed}\n"


def test_a_file_runs(folder: Path) -> None:
    args = ["--lr", "0.10", "two words"]
    assert run(folder, OURS) == [[args, str(rank), "2", "0010", None] for rank in range(2)]


@pytest.mark.slow(ci=True)
@pytest.mark.spark
@needs_java
def test_a_file_of_databricks_runs_on_a_cluster(folder: Path) -> None:
    options = ["--cluster", "--master", "local-cluster[2,1,1024]", "--cpu"]
    text = DATABRICKS.replace(", accelerator_type: GPU_8xH100", "")
    parameters = json.dumps({"lr": 0.1, "layers": [1, 2]})
    args = ["--lr", "0.10", "two words"]
    assert run(folder, text, *options) == [
        [args, str(rank), "2", "yes", parameters] for rank in range(2)
    ]
