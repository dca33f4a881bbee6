"""The documentation: its links, its programs, and that it leaves nothing out."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pages import PAGES, ROOT, pages, python_blocks
from support.settings_table import COMMAND_NAMES, COMMANDS, options_table

import distributor
from distributor.rank.step_clock import FIELDS, NUM_REPORTED

pytestmark = pytest.mark.repository

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
PYTHON_FENCE = re.compile(r"^\s*(?:`{3,}|~{3,}|:{3,})\s*\{?(?:py|ipy|code).*", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
SOURCE = Path(distributor.__file__).parent
DATABRICKS = "serverless_errors.py"
VARIABLE = re.compile(r"\"(DISTRIBUTOR_[A-Z_]+)\"")


def links_in(page: Path) -> list[str]:
    found: list[str] = LINK.findall(FENCED.sub("", page.read_text()))
    return [link for link in found if "://" not in link]


def anchors_in(page: Path) -> set[str]:
    titles = HEADING.findall(FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken(page: Path) -> Iterator[str]:
    for link in links_in(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            yield f"{link}: there is no {target}"
        elif anchor and anchor not in anchors_in(target):
            yield f"{link}: {target.name} has no such heading"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


def test_no_block_of_python_escapes() -> None:
    """A fence of another form would not run in test_pages.py."""
    for page in pages():
        fences = [fence.strip() for fence in PYTHON_FENCE.findall(page.read_text())]
        assert fences == ["```python"] * len(python_blocks(page)), page


def test_every_variable_is_documented() -> None:
    text = (PAGES / "reference" / "environment-variables.md").read_text()
    source = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    variables = set(VARIABLE.findall(source))
    assert "DISTRIBUTOR_WARM" in variables
    assert {name for name in variables if f"`{name}`" not in text} == set()


def test_every_event_and_figure_of_a_log_is_documented(tmp_path: Path) -> None:
    page = (PAGES / "reference" / "event-log.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    source = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    kinds = set(re.findall(r"(?:self|events)\.add\(\s*\"(\w+)\"", source))
    assert {"run", "use", "failure", "preempted"} <= kinds
    assert (kinds | {"rank", "age", *FIELDS[:NUM_REPORTED]}) - rows == set()
    log = tmp_path / "events.jsonl"
    log.write_text('{"at": 1, "event": "run", "version": 1, "run": "20261124-174012-0123abcd"}\n')
    summary = distributor.save_page(log, tmp_path / "page.html").summary
    assert {key for key in summary if f"`{key}`" not in page} == set()


def error_names() -> set[str]:
    """Return the public exceptions of the package; Databricks' are listed with its API."""
    sources = [path.read_text() for path in SOURCE.rglob("*.py") if path.name != DATABRICKS]
    classes = re.findall(r"^class (\w+)\((.*)\):", "\n".join(sources), re.MULTILINE)
    things = [thing for thing in vars(builtins).values() if isinstance(thing, type)]
    errors = {thing.__name__ for thing in things if issubclass(thing, BaseException)}
    for _ in range(4):  # more than a class has ancestors here
        errors |= {name for name, bases in classes if errors & set(re.findall(r"\w+", bases))}
    return {name for name, _ in classes if name in errors and not name.startswith("_")}


def test_every_error_is_on_the_troubleshooting_page() -> None:
    page = (PAGES / "troubleshooting.md").read_text()
    names = error_names() - {
        "NodeStopped",
        "RanksFailed",
        "RefusedError",
        "Resized",
    }  # they are handled inside
    assert {"WorkerDied", "RunTimeout"} <= names
    documented = set(re.findall(r"^\| `(\w+)` \| [^|]*`", page, re.MULTILINE))
    assert names - documented == set()


@pytest.mark.parametrize("command", COMMAND_NAMES)
def test_the_options_are_those_of_the_command_line(command: str) -> None:
    message = "run: PYTHONPATH=tests python -m support.settings_table"
    assert options_table(command) in COMMANDS.read_text(), message


def test_every_option_of_torchrun_is_documented() -> None:
    from torch.distributed.run import get_args_parser

    page = (PAGES / "migrate" / "torchrun.md").read_text()
    options = [each.option_strings for each in get_args_parser()._actions if each.dest != "help"]
    long = {next(name for name in names if name.startswith("--")) for names in options if names}
    assert "--rdzv-endpoint" in long
    assert {option for option in long if f"`{option}`" not in page} == set()
