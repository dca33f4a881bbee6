"""What of other packages' public APIs this package offers, and what of it deliberately differs.

``api_surface.ini`` lists the differences: a section for each API, and in it a line for each
difference, ``key = kind: sentence``. A key is a name, ``Class.member`` or ``function(parameter)``;
``function(*)`` stands for all parameters that only ours has. `KINDS` has the kinds.

Run as ``PYTHONPATH=tests python -m support.api_surface`` to rewrite its page in docs/migrate.
"""

from __future__ import annotations

import configparser
import json
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from support.api_names import NOT_READ, Surface, bases_in, read_surface
from support.pages import PAGES

LIST = Path(__file__).with_suffix(".ini")
DOCUMENT = PAGES / "migrate" / "api-compatibility.md"


COMPARED = {"pyspark": "pyspark 4.3", "ray": "ray 2.60", "databricks": "databricks-sdk-air 0.1"}
"""The distributions that are compared with, and their versions, by the first part of the title."""
NEEDS = {
    "ray.train.lightning": "lightning",
    "ray.train.huggingface.transformers": "transformers",
}
"""A package that both sides of an API need."""
OF_PYSPARK = ("pyspark.ml.torch.distributor", "pyspark.ml.deepspeed.deepspeed_distributor")


class Api(NamedTuple):
    """An API that this package offers, by its section in the list."""

    title: str

    @property
    def ours(self) -> str:
        """The module that offers it here."""
        if self.title == "pyspark.ml":
            return "distributor"
        return "distributor." + re.sub("^(ray|databricks)\\.", "", self.title)

    @property
    def theirs(self) -> tuple[str, ...]:
        """The modules of the original; none if there is no package to compare with."""
        if self.title == "pyspark.ml":
            return OF_PYSPARK
        return (self.title,) if self.package in COMPARED else ()

    @property
    def package(self) -> str:
        """The first part of the names of the original's modules."""
        return self.title.partition(".")[0]


class Entry(NamedTuple):
    """A line of the list."""

    kind: str
    sentence: str


KINDS = {
    "same": "as in the original",
    "differs": "the signature differs",
    "behaves": "the signature is the same, but it behaves differently",
    "added": "an extension that the original does not have",
    "refused": "an error says what to use instead",
    "absent": "does not exist here",
    "missing": "does not exist here yet",
}
"""What becomes of a name. Only APIs without an original to compare with list what is the same."""

FITTING = {
    "only theirs": {"refused", "absent", "missing"},
    "only ours": {"added"},
    "both": {"differs"},
}
"""The kinds of entries that fit to a difference, by who has the name."""
NO_ORIGINAL = {"only ours": {"same", "differs", "behaves", "added"}}


class Difference(NamedTuple):
    """A key whose descriptions are not equal."""

    where: str
    theirs: str
    ours: str


def read_list() -> dict[str, dict[str, Entry]]:
    """Return the entries by API and key."""
    parser = configparser.RawConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read_string(LIST.read_text())
    found: dict[str, dict[str, Entry]] = {}
    for title in parser.sections():
        found[title] = {}
        for key, value in parser[title].items():
            kind, _, sentence = " ".join(value.split()).partition(": ")
            found[title][key] = Entry(kind, sentence)
    return found


APIS = [Api(title) for title in read_list()]


def compare(theirs: Surface, ours: Surface) -> dict[str, Difference]:
    """Return the differences by key; a name that only one has stands for all of its parts."""
    found: dict[str, Difference] = {}
    for key in sorted(theirs.keys() | ours.keys()):
        their, our = theirs.get(key, ""), ours.get(key, "")
        if key.endswith("()"):
            their, our = _orders(their, our)
        if their == our or (our and their == NOT_READ):
            continue
        where = "both" if their and our else "only theirs" if their else "only ours"
        found[key] = Difference(where, their, our)
    bases = {key: bases_in(text) for key, text in (theirs | ours).items()}
    return {key: each for key, each in found.items() if not _is_part(key, each, found, bases)}


def _orders(theirs: str, ours: str) -> tuple[str, str]:
    """Return what is comparable of the orders of positional parameters."""
    our = ours.split(", ")
    common = [name for name in theirs.split(", ") if name in our]
    return ", ".join(common), ", ".join(our[: len(common)])


def _is_part(
    key: str, difference: Difference, found: dict[str, Difference], bases: dict[str, list[str]]
) -> bool:
    """Return True if a difference follows from one that is reported."""
    cls, _, member = key.partition(".")
    if member and any(found.get(f"{base}.{member}") == difference for base in bases[cls]):
        return True
    wholes = [key.partition("(")[0], cls]
    if member and "(" not in member:
        wholes.append(f"{cls}({member})")  # the attribute of a parameter
    alone = difference.where != "both"
    return alone and any(
        whole != key and whole in found and found[whole].where == difference.where
        for whole in wholes
    )


def check(api: Api, entries: dict[str, Entry]) -> Iterator[str]:
    """Yield a line for each difference that is not listed, and each entry that is not true."""
    theirs = read_surface(api.theirs, api.package)
    ours = read_surface([api.ours], "distributor", theirs)
    differences = compare(theirs, ours)
    for key, each in differences.items():
        entry = entries.get(key) or entries.get(f"{key.partition('(')[0]}(*)", Entry("nothing", ""))
        kinds = (FITTING if api.theirs else NO_ORIGINAL)[each.where]
        if entry.kind not in kinds:
            yield (
                f"{key}: {each.where}, so {' or '.join(sorted(kinds))}, but listed as "
                f"{entry.kind}; {each.theirs!r} there, {each.ours!r} here"
            )
    for key, entry in entries.items():
        if not entry.sentence.endswith(".") or entry.kind not in KINDS:
            yield f"{key}: needs a kind and a sentence"
        elif not _is_true(key, entry.kind, differences, theirs, ours):
            yield f"{key}: is not {entry.kind}"
        elif entry.kind == "refused" and not _is_refused(api, key):
            yield f"{key}: is not refused"


def _is_true(
    key: str, kind: str, differences: dict[str, Difference], theirs: Surface, ours: Surface
) -> bool:
    if not theirs:
        return (key in ours) == (kind in NO_ORIGINAL["only ours"])
    if key.endswith("(*)"):
        return any(other.startswith(key[:-2]) and ours.get(other) for other in differences)
    if kind == "behaves":
        return key in ours and key not in differences
    return key in differences


def _is_refused(api: Api, name: str) -> bool:
    """Return True if a name raises an error of its own, which says what to use."""
    try:
        getattr(import_module(api.ours), name)
    except (ImportError, AttributeError):
        return False
    except Exception:
        return True
    return False


def document() -> str:
    """Return what becomes of the names of all APIs as Markdown."""
    lines = [HEAD]
    for title, entries in read_list().items():
        if section := list(_section(entries)):
            lines += ["", f"## `{title}`: `{Api(title).ours}`", *section]
    return "\n".join(lines) + "\n"


def _section(entries: dict[str, Entry]) -> Iterator[str]:
    """Yield the lines of an API: the names that are added, and a row for each remark."""
    if added := [key for key, entry in entries.items() if entry.kind == "added"]:
        yield from ["", f"Added: {_listed(sorted(added, key=str.lower))}"]
    rows: dict[Entry, list[str]] = {}
    for key, entry in sorted(entries.items(), key=lambda item: item[0].lower()):
        if entry.kind not in ("added", "same"):
            rows.setdefault(entry, []).append(key)
    if rows:
        yield from ["", "| name | here |", "| --- | --- |"]
    for entry, keys in rows.items():
        yield f"| {_listed(keys)} | {entry.kind}: {entry.sentence} |"


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


ORIGINALS = ", ".join(COMPARED.values())
HEAD = f"""\
# API compatibility

What becomes of the public names of the APIs that this package follows: {ORIGINALS},
and serverless_gpu. A name, signature or member that is not listed here is the same, as
`tests/test_api_surface.py` checks with the installed packages.

""" + "\n".join(f"- *{kind}*: {text}" for kind, text in KINDS.items() if kind != "same")


def why_not_compared(api: Api) -> str:
    """Return why an API cannot be compared here, or an empty string if it can."""
    if not api.theirs:
        return ""
    distribution, _, version = COMPARED[api.package].partition(" ")
    try:
        installed = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return f"{distribution} is not installed"
    if not installed.startswith(f"{version}."):
        return f"the list is of {distribution} {version}, but {installed} is installed"
    needed = NEEDS.get(api.title)
    return f"{needed} is not installed" if needed and find_spec(needed) is None else ""


def main() -> None:
    """Write the document, or print what the test needs as JSON."""
    if sys.argv[1:] == ["--check"]:
        listed = read_list()
        compared = [api for api in APIS if not why_not_compared(api)]
        print(json.dumps({api.title: [*check(api, listed[api.title])] for api in compared}))
    else:
        DOCUMENT.write_text(document())


if __name__ == "__main__":
    main()
