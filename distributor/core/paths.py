"""Paths of this machine and addresses of storage, as users write them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

_FILE = re.compile(r"file:(?://(?:localhost)?)?(/(?!/).*)", re.IGNORECASE | re.DOTALL)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):(/*)(.*)", re.IGNORECASE | re.DOTALL)
# Schemes after which not even a slash is needed to see that no folder of this name is meant.
_KNOWN = {"abfs", "abfss", "dbfs", "file", "gs", "hdfs", "s3", "s3a", "s3n", "viewfs", "wasbs"}


def absolute(path: str | os.PathLike[str], name: str = "The path") -> str:
    """Return a path of this machine as an absolute one; an address with a scheme unchanged."""
    text = os.fspath(path)
    is_address = "://" in text and not text.lower().startswith(("file:", "dbfs:"))
    return text if is_address else local_path(text, name)


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path for messages: without the credentials that an address may contain."""
    return re.sub("://[^/@]*@", "://", os.fspath(path))


def local_path(path: str | os.PathLike[str], name: str = "The path") -> str:
    """Return the absolute path of a file or folder of this machine."""
    text = os.fspath(path)
    if found := _FILE.fullmatch(text):
        return unquote(found[1], errors="surrogateescape")
    if (found := _SCHEME.fullmatch(text)) and (found[2] or found[1].lower() in _KNOWN):
        raise ValueError(
            f"{name} is {text!r}, which is no path of this machine. "
            f"{_instead(found[1].lower(), found[2], found[3])}"
        )
    if not os.path.lexists(text):
        _check_shell(text, name)
    return str(Path(os.path.expanduser(text)).absolute())


def _instead(scheme: str, slashes: str, rest: str) -> str:
    """Return what to write for an address that is incomplete, or of no storage that is known."""
    if scheme == "dbfs":
        if rest.startswith("Volumes/"):
            return f"Write '/{rest}'."
        return (
            f"Write '/dbfs/{rest}', the mount of DBFS, or the path of a volume: "
            "'/Volumes/<catalog>/<schema>/<volume>'."
        )
    if scheme == "file":
        return f"Write 'file:///{rest}', or the path alone."
    if len(slashes) > 1:
        return "Write a path, such as that of a mounted folder."
    if scheme in ("hdfs", "viewfs", "webhdfs"):
        return f"Write '{scheme}://HOST:PORT/{rest}', or '{scheme}:///{rest}' for the default host."
    scheme = {"s3a": "s3", "s3n": "s3"}.get(scheme, scheme)
    note = " as a str, because a Path has no double slash" if slashes else ""
    return f"Write '{scheme}://{rest}'{note}."


def _check_shell(text: str, name: str) -> None:
    """Check that a path has nothing that only a shell replaces or removes."""
    if text != text.strip():
        raise ValueError(
            f"{name} is {text!r}, which begins or ends with a blank. Write {text.strip()!r}."
        )
    if text.startswith("$") or os.path.expandvars(text) != text:
        raise ValueError(
            f"{name} is {text!r}, but only a shell replaces variables. Write "
            f"{os.path.expandvars(text)!r}, or pass os.path.expandvars({text!r})."
        )
    if text.startswith("~") and os.path.expanduser(text) == text:
        user = text[1:].partition("/")[0]
        raise ValueError(f"{name} is {text!r}, but there is no user {user!r} on this machine.")
