"""Refuse words that the field does not use, in names, docstrings, comments and messages.

Run as ``python tests/support/vocabulary.py [PATH ...]``; `make lint` does.
"""

from __future__ import annotations

import io
import keyword
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PATHS = (
    *("distributor", "benchmarks", "tests", "conf", "docs", ".github"),
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile"),
)

TEXTS = (".py", ".ini", ".md")
"""The files of a folder that are read."""

IN_NAMES = {
    "keeper": "supervisor",
    "leash": "control channel",
    "heed": "subscribe",
    "told": "reported, sent",
    "tell": "report, send, set",
    "hear": "receive, get",
    "heard": "received",
    "words": "messages",
    "meet": "barrier, rendezvous",
    "brought": "received, uploaded",
    "deaf": "ignores_sigterm",
}
"""A part of a name (``snake_case`` or ``CamelCase``), and what the field says instead."""

IN_PROSE = {
    r"keepers?|leash": "supervisor; control channel",
    r"heed(s|ed|ing)?": "act on, subscribe to",
    r"(tells?|told|telling)(?! apart)": "report, send, show, warn",
    r"hear(s|d|ing)?": "receive, learn",
    r"words? (from|of|to|that|arrives?|comes?|came)|(first|last|no|its|their) words?": "message",
    r"lest|whence|whither|thereof|hitherto": "plain English: so that ... not",
    r"the way (there|between|back)": "the network path",
    r"meets?|met": "rendezvous, synchronize; satisfy for a condition",
    r"where (there|none|nothing|nobody|it (can|cannot)|no|that|this|some|one|all|both)":
        "if (keep `where` for places)",
    r"(None|empty|only|even|also|except|but|and) where": "if (keep `where` for places)",
    r"(?<=[.;:,] )where": "if; otherwise `in which`",
    r"gives?(?= (None|the|a|an|what|whether|how|where|all|this|its|each|True|False|up to)\b)":
        "return",
}  # fmt: skip
"""A pattern, and what plain technical English says instead."""

ALLOWED = re.compile(r"give(s)? (the|a|an|its|this|all) .{0,40}\bto\b|https?://|`[^`]*`|'[^']*'")

_NAME_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PROSE = re.compile(
    "|".join(rf"(?P<p{i}>(?<!\w)(?:{p})(?!\w))" for i, p in enumerate(IN_PROSE)), re.IGNORECASE
)
_SUGGESTIONS = list(IN_PROSE.values())


def findings(path: Path) -> Iterator[str]:
    """Yield a line for each word of a file that the field does not use."""
    text = path.read_text()
    if path.suffix != ".py":
        yield from _in_prose(path, enumerate(text.splitlines(), 1))
        return
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for before, token in zip(tokens[-1:] + tokens, tokens, strict=False):
        if (before.string, token.string) == (".", "tell"):  # Python's own method of files
            continue
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
            for part in _NAME_PARTS.findall(token.string):
                if instead := IN_NAMES.get(part.lower()):
                    yield f"{path}:{token.start[0]}: name {token.string}: instead, {instead}"
        elif token.type in _TEXTS:
            yield from _in_prose(path, enumerate(token.string.splitlines(), token.start[0]))


_TEXTS = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)}


def _in_prose(path: Path, lines: Iterator[tuple[int, str]] | enumerate[str]) -> Iterator[str]:
    for number, line in lines:
        text = ALLOWED.sub("", line.strip().strip("\"'#f ").strip())
        for match in _PROSE.finditer(text):
            instead = _SUGGESTIONS[int((match.lastgroup or "p0")[1:])]
            yield f"{path}:{number}: {match.group()!r}: instead, {instead}"


def main(paths: list[str]) -> int:
    """Print what is found in the paths, and return 1 if that is anything."""
    files: list[Path] = []
    for path in map(Path, paths or PATHS):
        inside = sorted(each for each in path.rglob("*") if each.suffix in TEXTS)
        files += inside if path.is_dir() else [path]
    files = [file for file in files if file.resolve() != Path(__file__).resolve()]
    found = [line for file in files for line in findings(file)]
    print("\n".join(found) or f"{len(files)} files: no word that the field does not use")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
