"""The manifest of a checkpoint: the file that is written last and makes the checkpoint count."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MANIFEST = ".manifest.json"
CHECKPOINT_LOG = ".reports.jsonl"
"""The log of the run's reports up to this checkpoint; a new attempt continues from it."""
RESERVED = (MANIFEST, CHECKPOINT_LOG)
"""The files of a checkpoint that rank 0 writes for the run, and that no rank saves."""


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint.

    Parameters
    ----------
    name : str
        Its path, relative to the checkpoint's folder.
    size : int
        Its size in bytes.
    checksum : int
        The CRC-32 of its content.
    """

    name: str
    size: int
    checksum: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a committed checkpoint.

    Parameters
    ----------
    index : int
        The checkpoint's number, which orders the checkpoints of a run, from 0.
    metrics : mapping of str to object
        The metrics that rank 0 reported with it.
    world_size : int
        The number of ranks that wrote it.
    positions : mapping of str to object
        The position of each data loader of the ranks, by the loader's number.
    files : tuple of StoredFile
        All its files.
    """

    index: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    world_size: int
    positions: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[StoredFile, ...]

    def to_json(self) -> bytes:
        fields = json.dumps(asdict(self))
        return json.dumps({"checksum": zlib.crc32(fields.encode()), "of": fields}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Parse a manifest.

        Raises
        ------
        ValueError, TypeError, KeyError
            If it is damaged.
        """
        envelope = json.loads(text)
        if zlib.crc32(envelope["of"].encode()) != envelope["checksum"]:
            raise ValueError("The manifest's checksum does not match its content.")
        fields = json.loads(envelope["of"])
        return cls(**{**fields, "files": tuple(StoredFile(**file) for file in fields["files"])})
