"""The tables of settings and options in docs/reference, from their descriptions.

Run as ``PYTHONPATH=tests python -m support.settings_table`` to rewrite them.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from distributor.cli import GROUPS, make_parser
from distributor.run_spec import Settings
from distributor.settings import CACHE_DIR, AdminDefault, admin_defaults, setting_fields
from support.pages import PAGES, fill_section

SETTINGS = PAGES / "reference" / "settings.md"
COMMANDS = PAGES / "reference" / "cli.md"
ADMIN_DEFAULTS = {**admin_defaults(Settings), f'env["{CACHE_DIR.variable}"]': CACHE_DIR}
"""The defaults that administrators can set, by setting; that of the cache is a variable."""
COMMAND_NAMES = ("run", "report", "doctor")


def settings_tables() -> str:
    """Return a table for each group of the command's help; a star marks defaults for all runs."""
    groups: dict[str, list[Any]] = {title: [] for title in (*GROUPS, "in Python only")}
    for field in setting_fields(Settings):
        groups[field.metadata["group"] or "in Python only"].append(field)
    sections = []
    for title, fields in groups.items():
        rows = [
            f"| `{field.name}` | {_default(field)} | {_text(field.metadata['text'])} |"
            for field in fields
        ]
        head = ["| setting | default | description |", "| --- | --- | --- |"]
        if rows:
            sections.append("\n".join([f"## {title[0].upper()}{title[1:]}", "", *head, *rows]))
    return "\n\n".join(sections)


def defaults_table() -> str:
    """Return the defaults that administrators can set as Markdown."""
    rows = [
        f"| `{name}` | `{each.variable}` | `{each.key}` | {each.shown} |"
        for name, each in ADMIN_DEFAULTS.items()
    ]
    head = ["| setting | environment variable | Spark conf | else |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *rows])


def options_table(command: str) -> str:
    """Return the options of a command that do not have the names of settings, as Markdown."""
    [commands] = [
        action.choices
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    settings = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Settings)}
    rows = [
        f"| {_flags(option)} | {_text(_unescaped(option.help or ''))} |"
        for option in commands[command]._actions
        if option.option_strings and option.option_strings[0] not in settings
    ]
    return "\n".join(["| option | description |", "| --- | --- |", *rows])


def _default(field: dataclasses.Field[Any]) -> str:
    if isinstance(default := field.metadata["default"], AdminDefault):
        return f"{default.shown} *"
    if isinstance(field.default, bool):
        return str(field.default)
    if isinstance(field.default, (int, float, str)):
        return f"`{field.default!r}`" if isinstance(field.default, str) else f"{field.default:g}"
    return "none"


def _flags(option: argparse.Action) -> str:
    metavar = "" if option.nargs == 0 else f" {option.metavar or option.dest.upper()}"
    return ", ".join(f"`{flag}{metavar}`" for flag in option.option_strings)


def _unescaped(help_text: str) -> str:
    return help_text.replace("%%", "%").replace("<", "\\<")  # a tag for Markdown


def _text(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


if __name__ == "__main__":
    SETTINGS.write_text(fill_section(SETTINGS.read_text(), "settings", settings_tables()))
    text = COMMANDS.read_text()
    for command in COMMAND_NAMES:
        text = fill_section(text, command, options_table(command))
    COMMANDS.write_text(text)
