"""The documentation: README.md, ARCHITECTURE.md and the pages of docs/."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs"
PROSE = (
    "README.md",
    "ARCHITECTURE.md",
    "benchmarks/SCALE.md",
    "conf/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    ".github/SECURITY.md",
)
_COMMENT = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)
_END = "--- the end of a block ---"
_BLOCK = re.compile(r"^```([^`\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A block of Python in a page, its first line there, and the text after it, which it prints."""

    source: str
    line: int
    printed: str


def pages() -> list[Path]:
    """Return every Markdown file that users read."""
    built = PAGES / "_build"
    found = sorted(page for page in PAGES.rglob("*.md") if built not in page.parents)
    return [*(ROOT / name for name in PROSE), *found]


def python_blocks(page: Path) -> list[Block]:
    """Return the blocks of Python in a page, in order."""
    text = page.read_text()
    blocks = list(_BLOCK.finditer(text))
    found = []
    for block, following in itertools.zip_longest(blocks, blocks[1:]):
        if block[1] == "python":
            printed = following[2] if following and following[1] == "text" else ""
            found.append(Block(block[2], text.count("\n", 0, block.start(2)) + 1, printed))
    return found


def as_script(page: Path) -> str:
    """Return the blocks of a page as one program for `differences`."""
    return "\n".join(f"{block.source}\nprint({_END!r})" for block in python_blocks(page))


def differences(page: Path, printed: str) -> list[str]:
    """Return what the blocks of a page should have printed, and the script of it has not."""
    parts = printed.split(f"{_END}\n")
    blocks = python_blocks(page)
    assert len(parts) == len(blocks) + 1, printed
    found = [differing(block, part) for block, part in zip(blocks, parts, strict=False)]
    return [f"{missing}, but:\n{printed}" for missing in found if missing]


def differing(block: Block, printed: str) -> str:
    """Return what a block should have printed, and has not; empty if nothing."""
    if block.printed:
        pattern = re.escape(block.printed.strip()).replace("…", ".*")
        return "" if re.fullmatch(pattern, printed.strip(), re.DOTALL) else block.printed
    lines = iter(printed.splitlines())
    return "\n".join(line for line in _COMMENT.findall(block.source) if line not in lines)


def fill_section(text: str, name: str, table: str) -> str:
    """Replace what is between ``<!-- name -->`` and ``<!-- end -->`` by a generated table."""
    section = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)
    return section.sub(lambda _: f"\n{table}\n\n", text, count=1)
