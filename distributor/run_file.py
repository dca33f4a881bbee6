"""``distributor run -f run.yaml``: a file in the place of a command line.

A field is an option of ``distributor run`` without its dashes, or a field of Databricks' run files
that means the same here:
https://docs.databricks.com/aws/en/machine-learning/ai-runtime/connecting/cli/yaml-config.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributor.core.extras import install_command
from distributor.core.gpus import split_accelerator
from distributor.core.spelling import suggestion

PARAMETERS = "DISTRIBUTOR_PARAMETERS"
"""The variable in which ranks find ``parameters``, as JSON."""
EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"
REFUSED = {
    "secrets": "Databricks' secrets are not here: set the variables, and pass --forward-env NAME.",
    "idempotency_token": "Nothing is submitted to a service.",
    "mlflow_run_name": "The MLflow run has the name of the program.",
    "mlflow_experiment_directory": "There is no workspace: experiment_name may be a path.",
    "permissions": "There is no workspace.",
    "usage_policy_name": "There is no workspace.",
    "usage_policy_id": "There is no workspace.",
    "compute.pool_id": "Use pool: the name of a pool of Spark's fair scheduler.",
    "compute.priority_class": "Use pool: the name of a pool of Spark's fair scheduler.",
    "environment.version": "The ranks have this machine's Python.",
    "environment.docker_image": "Spark's own configuration says which image its executors have.",
    "code_source.git": "The folder is used as it is.",
    "code_source.include_paths": "The folder is used as it is.",
    "code_source.remote_volume": "The folder is used as it is.",
}
"""What belongs to Databricks' service."""
SECTIONS = {
    "compute": {"num_accelerators", "accelerator_type"},
    "environment": {"dependencies"},
    "code_source": {"type", "root_path", "snapshot"},
}
ONE_PROGRAM = (
    "it has to start one program of Python, such as 'torchrun $CODE_SOURCE_PATH/train.py', without "
    "pipes or further commands"
)
_TORCHRUN_SWITCHES = {"--standalone", "--no-python", "--no_python", "--run-path", "--run_path"}
_PYTHON = re.compile(r"python[0-9.]*")


@dataclass(frozen=True)
class Item:
    """A value of the file, and its place.

    Parameters
    ----------
    where : str
        The file and the line, or the option that has it.
    value : object
        A dict or a list of items, or a scalar.
    text : str
        A scalar as it was written.
    """

    where: str
    value: Any
    text: str = ""

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.where}: {message}")

    def must(self, name: str, expected: str) -> ValueError:
        return self.error(f"{name} must {expected}, but is {self.text or _plain(self)!r}.")


@dataclass(frozen=True)
class Part:
    """Tokens of a command line, and the field that they are made of."""

    name: str
    item: Item
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class RunFile:
    """What a file has, as tokens of a command line.

    Parameters
    ----------
    options : tuple of Part
        The options.
    program : tuple of str
        The script, or ``-m`` and a module, and after ``--`` its arguments; empty if there is none.
    environ : dict of str to str
        Variables of the driver.
    """

    options: tuple[Part, ...]
    program: tuple[str, ...]
    environ: dict[str, str]


def read_run_file(path: str, overrides: Sequence[str], options: Mapping[str, bool]) -> RunFile:
    """Read a file.

    Parameters
    ----------
    path : str
        The file.
    overrides : sequence of str
        Fields that replace those of the file, as ``KEY=VALUE``; the key of a nested field has dots.
    options : mapping of str to bool
        The options of ``distributor run``, and whether each has a value.

    Raises
    ------
    ImportError
        If PyYAML is not installed.
    OSError, ValueError
        If the file cannot be read, or is invalid; the message names the line.
    """
    fields = _loaded(path)
    for override in overrides:
        _put(fields, override)
    folder = Path(path).expanduser().parent
    parts: list[Part] = []
    special: dict[str, Item] = {}
    for name, item in fields.items():
        _check_known(name, item, options)
        if name in _SPECIAL:
            special[name] = item
        else:
            parts += _option(name, item, options)
    for name, item in special.items():
        parts += _SPECIAL[name](item, folder)
    program, ranks = _program(special, folder)
    if ranks and not any(part.tokens[0] == "--nproc" for part in parts):
        parts.append(Part("command", special["command"], _tokens("--nproc", ranks)))
    environ = {}
    if experiment := special.get("experiment_name"):
        environ[EXPERIMENT] = _text("experiment_name", experiment)
    return RunFile(tuple(parts), program, environ)


# The file


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise ModuleNotFoundError(
            f"distributor run -f needs PyYAML: {install_command('yaml')}.", name="yaml"
        ) from None
    return yaml


def _loaded(path: str) -> dict[str, Item]:
    yaml = _yaml()
    loader = yaml.SafeLoader(Path(path).expanduser().read_text(encoding="utf-8"))
    try:
        root = loader.get_single_node()
        item = Item(path, {}) if root is None else _item(loader, root, path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ValueError(f"{path}:{mark.line + 1}: invalid YAML: {error.problem}.") from None
    return _section("the file", item)


def _item(loader: Any, node: Any, path: str, where: str = "") -> Item:
    yaml = _yaml()
    where = where or f"{path}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.SequenceNode):
        return Item(
            where, [_item(loader, each, path, "" if path else where) for each in node.value]
        )
    if not isinstance(node, yaml.MappingNode):
        return Item(where, loader.construct_object(node), node.value)
    found: dict[str, Item] = {}
    for key, value in node.value:
        item = _item(loader, value, path, f"{path}:{key.start_mark.line + 1}" if path else where)
        if key.value in found:
            raise item.error(f"{key.value} is there twice.")
        found[str(key.value)] = item
    return Item(where, found)


def _put(fields: dict[str, Item], override: str) -> None:
    """Put the field of an ``--override`` into those of the file."""
    key, equals, text = override.partition("=")
    where = f"--override {override}"
    if not (key and equals):
        raise ValueError(f"{where}: expected KEY=VALUE, such as compute.num_accelerators=8.")
    *sections, name = key.split(".")
    for section in sections:
        inner = fields.get(section)
        if inner is None or not isinstance(inner.value, dict):
            fields[section] = inner = Item(where, {})
        fields = inner.value
    loader = _yaml().SafeLoader(text)
    node = loader.get_single_node()
    fields[name] = Item(where, None) if node is None else _item(loader, node, "", where)


def _check_known(name: str, item: Item, options: Mapping[str, bool]) -> None:
    if name in REFUSED:
        raise item.error(f"{name} belongs to Databricks' service. {REFUSED[name]}")
    known = [*_SPECIAL, *(option.lstrip("-") for option in options if option.startswith("--"))]
    if name.replace("_", "-") not in {each.replace("_", "-") for each in known}:
        raise item.error(f"{name} is no field of a run. {suggestion(name, known)}".strip())
    for inner, value in _inner(name, item):
        if f"{name}.{inner}" in REFUSED:
            refused = REFUSED[f"{name}.{inner}"]
            raise value.error(f"{name}.{inner} belongs to Databricks' service. {refused}")
        if inner not in SECTIONS[name]:
            raise value.error(f"{name}.{inner} is no field. {suggestion(inner, SECTIONS[name])}")


def _inner(name: str, item: Item) -> Iterator[tuple[str, Item]]:
    """Yield the fields of a section of Databricks' files."""
    if name not in SECTIONS or not isinstance(item.value, dict):
        return
    yield from item.value.items()
    if "snapshot" in item.value:
        yield from _section("code_source.snapshot", item.value["snapshot"]).items()


# The options


def _tokens(option: str, value: str) -> tuple[str, ...]:
    return (f"{option}={value}",) if value.startswith("-") else (option, value)


def _option(name: str, item: Item, options: Mapping[str, bool]) -> Iterator[Part]:
    """Yield an option with each of its values."""
    option = f"--{name.replace('_', '-')}"
    if not options.get(option, True):  # a switch
        if not isinstance(item.value, bool):
            raise item.must(name, "be true or false")
        opposite = f"--no-{option[2:]}"
        if item.value or opposite in options:
            yield Part(name, item, (option if item.value else opposite,))
    elif isinstance(item.value, dict):
        for key, value in item.value.items():
            yield Part(name, value, _tokens(option, f"{key}={_text(f'{name}.{key}', value)}"))
    elif isinstance(item.value, list) and option in ("--nproc", "--num-processes", "--show-output"):
        yield Part(name, item, _tokens(option, ",".join(_texts(name, item))))
    elif isinstance(item.value, list):
        for text in _texts(name, item):
            yield Part(name, item, _tokens(option, text))
    elif item.value is not None:
        yield Part(name, item, _tokens(option, _text(name, item)))


def _compute(item: Item, folder: Path) -> Iterator[Part]:
    fields = _section("compute", item)
    if number := fields.get("num_accelerators"):
        yield Part(
            "compute.num_accelerators",
            number,
            _tokens("--nproc", _text("compute.num_accelerators", number)),
        )
    if kind := fields.get("accelerator_type"):
        text = _text("compute.accelerator_type", kind)
        _, gpu_type = split_accelerator(text)
        yield Part("compute.accelerator_type", kind, _tokens("--gpu-type", gpu_type))


def _environment(item: Item, folder: Path) -> Iterator[Part]:
    """Yield requirements, or the file of a packed environment."""
    name = "environment"
    if isinstance(item.value, dict):
        name, item = "environment.dependencies", item.value.get("dependencies", Item("", []))
        if not isinstance(item.value, list):
            path = folder / Path(_text(name, item)).expanduser()
            item = _loaded(str(path)).get("dependencies", Item(str(path), None))
            name = "dependencies"
        _texts(name, item)
    if isinstance(item.value, list):
        for text in _texts(name, item):
            yield Part(name, item, _tokens("--requirement", text))
    else:
        yield Part(name, item, _tokens("--environment", _text(name, item)))


def _env_variables(item: Item, folder: Path) -> Iterator[Part]:
    for key, value in _section("env_variables", item).items():
        pair = f"{key}={_text(f'env_variables.{key}', value)}"
        yield Part("env_variables", value, _tokens("--env", pair))


def _parameters(item: Item, folder: Path) -> Iterator[Part]:
    values = json.dumps(_plain(item))
    yield Part("parameters", item, _tokens("--env", f"{PARAMETERS}={values}"))


def _max_retries(item: Item, folder: Path) -> Iterator[Part]:
    yield Part("max_retries", item, _tokens("--max-failures", _text("max_retries", item)))


def _timeout_minutes(item: Item, folder: Path) -> Iterator[Part]:
    if isinstance(item.value, bool) or not isinstance(item.value, (int, float)):
        raise item.must("timeout_minutes", "be a number")
    yield Part("timeout_minutes", item, _tokens("--timeout", f"{item.value * 60:g}"))


def _of_program(item: Item, folder: Path) -> Iterator[Part]:
    """Yield nothing: `_program` has it."""
    yield from ()


_SPECIAL: dict[str, Callable[[Item, Path], Iterator[Part]]] = {
    **dict.fromkeys(
        ("script", "module", "args", "command", "code_source", "experiment_name"), _of_program
    ),
    "compute": _compute,
    "environment": _environment,
    "env_variables": _env_variables,
    "parameters": _parameters,
    "max_retries": _max_retries,
    "timeout_minutes": _timeout_minutes,
}


# The program


def _program(fields: Mapping[str, Item], folder: Path) -> tuple[tuple[str, ...], str | None]:
    """Return the tokens of the program, and the number of ranks that its command asks for."""
    given = [name for name in ("script", "module", "command") if name in fields]
    if len(given) > 1:
        raise fields[given[1]].error(f"{given[1]} and {given[0]} both say what runs: keep one.")
    if not given:
        return (), None
    [kind] = given
    item = fields[kind]
    text = _text(kind, item)
    if kind == "command":
        return _of_command(item, _code_folder(fields, folder), fields.get("compute"))
    args = _texts("args", fields["args"]) if "args" in fields else ()
    start = ("-m", text) if kind == "module" else (str(folder / Path(text).expanduser()),)
    return _with_arguments(start, args), None


def _with_arguments(start: Sequence[str], args: Sequence[str]) -> tuple[str, ...]:
    return (*start, "--", *args) if args else tuple(start)


def _code_folder(fields: Mapping[str, Item], folder: Path) -> Path:
    if (source := fields.get("code_source")) is None:
        return folder
    section = _section("code_source", source)
    section = (
        _section("code_source.snapshot", section["snapshot"]) if "snapshot" in section else section
    )
    if "root_path" not in section:
        raise source.error("code_source has no root_path: set the folder of the program.")
    return folder / Path(_text("code_source.root_path", section["root_path"])).expanduser()


def _of_command(
    item: Item, folder: Path, compute: Item | None
) -> tuple[tuple[str, ...], str | None]:
    """Return the program that a shell's command starts."""
    text = re.sub(r"\$(CODE_SOURCE_PATH\b|\{CODE_SOURCE_PATH\})", str(folder), item.text.strip())
    try:
        lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="|&;<>()\n")
        lexer.whitespace, lexer.whitespace_split = " \t", True
        tokens = list(lexer)
    except ValueError as error:
        raise item.error(f"command cannot be read: {error}.") from None
    if not tokens or any(set(token) <= set("|&;<>()\n") for token in tokens):
        raise item.error(f"command is {item.text.strip()!r}, but {ONE_PROGRAM}.")
    first = Path(tokens[0]).name
    ranks = None
    if first == "torchrun":
        count, ranks = _torchrun_options(tokens)
        program = tokens[count:]
    elif _PYTHON.fullmatch(first):
        program = tokens[2:] if tokens[1:2] == ["-u"] else tokens[1:]
        number = _section("compute", compute).get("num_accelerators") if compute else None
        if number is not None and number.value != 1:
            raise item.error(
                f"command starts one process for {number.text} accelerators: start it with "
                "torchrun in the place of python."
            )
    else:
        raise item.error(f"command starts {tokens[0]!r}, but {ONE_PROGRAM}.")
    start = 2 if program[:1] == ["-m"] else 1
    if len(program) < start or (start == 1 and program[0].startswith("-")):
        raise item.error(f"command is {item.text.strip()!r}, but {ONE_PROGRAM}.")
    if start == 1:
        program[0] = str(folder / program[0])
    return _with_arguments(program[:start], program[start:]), ranks


def _torchrun_options(tokens: Sequence[str]) -> tuple[int, str | None]:
    """Return the number of tokens before torchrun's program, and the ranks of a node."""
    ranks = None
    number = 1
    while number < len(tokens) and tokens[number].startswith("-") and tokens[number] != "-m":
        option, equals, value = tokens[number].partition("=")
        follows = not equals and option not in _TORCHRUN_SWITCHES
        value = tokens[number + 1] if follows and number + 1 < len(tokens) else value
        if option.replace("_", "-") == "--nproc-per-node" and value.isdecimal():
            ranks = value
        number += 2 if follows else 1
    return number, ranks


# Values


def _section(name: str, item: Item) -> dict[str, Item]:
    if not isinstance(item.value, dict):
        raise item.must(name, "have fields")
    found: dict[str, Item] = item.value
    return found


def _texts(name: str, item: Item) -> tuple[str, ...]:
    if not isinstance(item.value, list):
        raise item.must(name, "be a list")
    return tuple(_text(f"{name}[{number}]", each) for number, each in enumerate(item.value))


def _text(name: str, item: Item) -> str:
    if isinstance(item.value, (dict, list)) or item.value is None:
        raise item.must(name, "be a single value")
    return item.text


def _plain(item: Item) -> Any:
    if isinstance(item.value, dict):
        return {name: _plain(each) for name, each in item.value.items()}
    if isinstance(item.value, list):
        return [_plain(each) for each in item.value]
    return item.value
