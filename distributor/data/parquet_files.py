"""The data files that paths, folders and patterns name, in an order that all ranks share."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import NamedTuple, NoReturn
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from distributor.core.files import absolute, shown
from distributor.core.text import is_unicode
from distributor.filesystems import resolve_address

# Types that Spark does not have in files, and those with all of their values.
_WIDER = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20),
    pa.null(): pa.int32(),  # as which files store it
    pa.large_string(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.date64(): pa.date32(),
}


def rebuilt(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return a type with other leaves. Its fields may be null, and its arrays have any length."""
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name != "arrow.uuid":
        return rebuilt(kind.storage_type, change)
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, rebuilt(field.type, change)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(rebuilt(kind.key_type, change), rebuilt(kind.item_type, change))
    if not hasattr(kind, "value_type"):
        return change(kind)
    value = rebuilt(kind.value_type, change)
    if pa.types.is_dictionary(kind):
        return value
    return kind if "_view<" in str(kind) else pa.list_(value)  # pyarrow loses what a view has


def leaves(kind: pa.DataType) -> list[pa.DataType]:
    """Return the types without parts that a type consists of: a file has a column for each."""
    found: list[pa.DataType] = []

    def add(leaf: pa.DataType) -> pa.DataType:
        found.append(leaf)
        return leaf

    rebuilt(kind, add)
    return found


def with_instants(kind: pa.DataType, stored: Sequence[str]) -> pa.DataType:
    """Return the type of a column that a file stores as these types; INT96 as Spark reads it.

    For pyarrow, it is a time without a time zone.
    """
    if "INT96" not in stored:
        return kind
    each = iter(stored)
    return rebuilt(kind, lambda leaf: pa.timestamp("us", "UTC") if next(each) == "INT96" else leaf)


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return a type that has all values of two types, as they are; None if there is none."""
    if one == other:
        return one
    kinds = [rebuilt(kind, _mergeable) for kind in (one, other)]
    try:
        schemas = [pa.schema([("", kind)]) for kind in kinds]
        found = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowException, TypeError):  # the latter before pyarrow 14
        return None
    return found if all(_is_alike(kind, found) for kind in kinds) else None


def spark_type(kind: pa.DataType) -> pa.DataType:
    """Return what Spark reads a type as; a type that Spark does not have remains as it is."""
    return rebuilt(kind, _of_spark)


def _mergeable(leaf: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(leaf) and leaf.tz is not None:
        return pa.timestamp(leaf.unit, "UTC")
    return _without_view(leaf)


def _is_alike(kind: pa.DataType, found: pa.DataType) -> bool:
    """Return whether integers do not become floats, nor texts bytes."""
    pairs = list(zip(leaves(kind), leaves(found), strict=False))
    return pa.types.is_null(kind) or (
        len(leaves(kind)) == len(leaves(found))
        and all(pa.types.is_null(one) or _marks(one) == _marks(other) for one, other in pairs)
    )


def _marks(leaf: pa.DataType) -> tuple[bool, bool]:
    return pa.types.is_floating(leaf), "string" in str(leaf)


def _without_view(leaf: pa.DataType) -> pa.DataType:
    return getattr(pa, str(leaf).removesuffix("_view"))() if str(leaf).endswith("_view") else leaf


def _of_spark(leaf: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(leaf):
        return pa.timestamp("us", None if leaf.tz is None else "UTC")
    if pa.types.is_fixed_size_binary(leaf):
        return pa.binary()
    if pa.types.is_duration(leaf):
        return pa.int64()
    if pa.types.is_decimal(leaf) and leaf.precision <= 38:
        return pa.decimal128(leaf.precision, leaf.scale)
    return _WIDER.get(leaf, _without_view(leaf))


PathLike = str | os.PathLike[str]
HIDDEN = ("_", ".")  # files and folders whose names begin so contain no data, as in Spark
NULL = "__HIVE_DEFAULT_PARTITION__"  # a partition's name for a null, in Spark
DELTA_LOG = "_delta_log"
# The types of values in folders' names, and how these look: what Spark reads, in its order.
FOLDER_TYPES = {
    r"-?\d+": (pa.int32(), pa.int64()),
    r"-?(\d{1,9}|\d+\.\d*|\.\d+)(E-?\d+)?|NaN|-?Infinity": (pa.float64(),),
    r"\d{4}-\d\d-\d\d": (pa.date32(),),
    r"\d{4}-\d\d-\d\d( \d\d:\d\d:\d\d(\.\d)?)?": (pa.timestamp("us"),),
}


class DataFiles(NamedTuple):
    filesystem: pafs.FileSystem
    folders: dict[str, list[str]]  # the files by the folder in which they were found


class _Entry(NamedTuple):
    """A file or a folder."""

    path: str
    is_file: bool


def find_files(path: PathLike | Sequence[PathLike]) -> DataFiles:
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    if not paths:
        raise FileNotFoundError("No paths were passed: the list is empty.")
    (filesystem, _), *others = resolved = [_resolve(os.fspath(each)) for each in paths]
    if any(other != filesystem for other, _ in others):
        names = ", ".join(map(shown, paths))
        raise ValueError(f"The paths must be of one file system, but are {names}.")
    folders: dict[str, list[str]] = {}
    reals: dict[str, str] = {}  # by which path each file is read, whatever links lead to it
    for written, (_, inside) in zip(paths, resolved, strict=True):
        found = [
            file for match in _matches(filesystem, inside) for file in _files(filesystem, match)
        ]
        if not found:
            raise FileNotFoundError(f"No data files were found at {shown(written)!r}.")
        for folder, file in found:
            real = os.path.realpath(file) if _is_local(filesystem) else file
            if real not in reals:
                folders.setdefault(folder, []).append(file)
            known = reals.setdefault(real, file)
            if _named_values(known) != _named_values(file):
                raise ValueError(
                    f"{shown(known)} and {shown(file)} are one file, because of a link, but their "
                    "folders' names have other values. Remove the link."
                )
    return DataFiles(filesystem, folders)


def partitions_of(folder: str, paths: Sequence[str]) -> list[dict[str, pa.Scalar]]:
    """Return for each path the values in the names of its subfolders, such as ``label=3``."""
    texts = [_folder_values(folder, path[len(folder) :]) for path in paths]
    names = {name for each in texts for name in each}
    types = {name: _type_of([each.get(name) for each in texts]) for name in names}
    return [
        {name: pa.scalar(text, pa.string()).cast(types[name]) for name, text in each.items()}
        for each in texts
    ]


def _folder_values(folder: str, path: str) -> dict[str, str | None]:
    parts = [part.partition("=") for part in path.split("/")[:-1]]
    if unreadable := [value for _, equals, value in parts if equals and not is_unicode(value)]:
        raise ValueError(
            f"{folder}{path} is in a folder whose name ends in ={unreadable[0]}. This is not "
            "valid Unicode, so it cannot be a column's value. Rename the folder."
        )
    return {
        unquote(name): None if value == NULL else unquote(value)
        for name, equals, value in parts
        if equals
    }


def _named_values(path: str) -> list[str]:
    return [part for part in os.path.dirname(path).split("/") if "=" in part]


def _type_of(texts: Sequence[str | None]) -> pa.DataType:
    """Return the type of a column whose values are in names of folders, which is Spark's."""
    known = [text for text in texts if text is not None]
    for pattern, types in FOLDER_TYPES.items():
        if known and all(re.fullmatch(pattern, text, re.ASCII) for text in known):
            for type in types:
                with contextlib.suppress(pa.ArrowInvalid):
                    pa.array(known).cast(type)
                    return type
    return pa.string()


def _resolve(path: str) -> tuple[pafs.FileSystem, str]:
    address = absolute(path)
    if "://" in address:
        return resolve_address(address)
    return pafs.LocalFileSystem(), os.path.abspath(address)


def _matches(filesystem: pafs.FileSystem, path: str) -> list[_Entry]:
    """Return the files and folders that a path or a pattern names, sorted."""
    if found := _existing(filesystem, [path]):
        return found
    parts = path.split("/")
    names = _expand(filesystem, parts[0], parts[1:]) if _is_pattern(path) else []
    return _existing(filesystem, sorted(set(names)))


def _existing(filesystem: pafs.FileSystem, paths: list[str]) -> list[_Entry]:
    """Return those of the paths that exist."""
    # On this machine, names are bytes, which need not be UTF-8 as pyarrow assumes of a str.
    names = list(map(os.fsencode, paths)) if _is_local(filesystem) else paths
    types = [info.type for info in filesystem.get_file_info(names)]
    return [
        _Entry(path, type == pafs.FileType.File)
        for path, type in zip(paths, types, strict=True)
        if type != pafs.FileType.NotFound
    ]


def _entries(filesystem: pafs.FileSystem, folder: str, recursive: bool) -> list[_Entry]:
    if not _is_local(filesystem):
        selector = pafs.FileSelector(folder, allow_not_found=True, recursive=recursive)
        infos = filesystem.get_file_info(selector)
        return [_Entry(info.path, info.type == pafs.FileType.File) for info in infos]
    if not os.path.isdir(folder):
        return []
    found = []
    # pyarrow cannot list names that are not in UTF-8.
    for parent, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
        folders[:] = [name for name in folders if not _leads_back(parent, name)]
        found += [_Entry(os.path.join(parent, name), False) for name in folders]
        paths = (os.path.join(parent, name) for name in files)
        found += [_Entry(path, True) for path in paths if os.path.isfile(path)]
        if not recursive:
            break
    return found


def _leads_back(parent: str, name: str) -> bool:
    """Return whether a folder is a link to one of the folders that lead to it."""
    link = os.path.join(parent, name)
    if not os.path.islink(link):
        return False
    above = accumulate(parent.split("/"), "{}/{}".format)
    return any(os.path.samefile(link, folder or "/") for folder in above)


def _raise(error: OSError) -> NoReturn:
    raise error


def _is_local(filesystem: pafs.FileSystem) -> bool:
    return isinstance(filesystem, pafs.LocalFileSystem)


def _expand(filesystem: pafs.FileSystem, folder: str, parts: list[str]) -> list[str]:
    """Return paths that match a pattern, of which only the last part may not exist."""
    if not parts:
        return [folder]
    first, *rest = parts
    if not _is_pattern(first):
        return _expand(filesystem, f"{folder}/{first}", rest)
    anywhere = first == "**"
    found = [
        entry.path
        for entry in _entries(filesystem, folder or "/", recursive=anywhere)
        if (anywhere or fnmatchcase(os.path.basename(entry.path), first))
        and not (rest and entry.is_file)
    ]
    return [
        path
        for each in ([folder, *found] if anywhere else found)
        for path in _expand(filesystem, each, rest)
    ]


def _is_pattern(text: str) -> bool:
    return any(character in text for character in "*?[")


def _files(filesystem: pafs.FileSystem, match: _Entry) -> list[tuple[str, str]]:
    """Return pairs of folder and file for what a path names."""
    if match.is_file:
        return [(os.path.dirname(match.path), match.path)]
    entries = _entries(filesystem, match.path, recursive=True)
    if any(os.path.basename(entry.path) == DELTA_LOG for entry in entries):
        raise ValueError(
            f"{match.path} is a Delta table, whose folder also contains files of earlier versions. "
            'Read it with Spark, spark.read.format("delta").load(path), and pass the DataFrame.'
        )
    return sorted(
        (match.path, entry.path)
        for entry in entries
        if entry.is_file and not _is_hidden(entry.path[len(match.path) :])
    )


def _is_hidden(path: str) -> bool:
    # Folders of partitions may begin so: _year=2024.
    return any(part.startswith(HIDDEN) and "=" not in part for part in path.split("/"))
