"""The manifest of a checkpoint: the file that is written last and makes the checkpoint count."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

MANIFEST = ".manifest.json"
CHECKPOINT_LOG = ".reports.jsonl"
"""The log of the run's reports up to this checkpoint, from which a new attempt continues; see
`report_log`."""
RUN_LOG = "reports.jsonl"
"""The log in the run's folder, for people and for `Result`."""
VALIDATION = ".validation.json"
"""The result of a checkpoint's validation, which the driver writes."""
RESERVED = (MANIFEST, CHECKPOINT_LOG, VALIDATION)
"""The files of a checkpoint that are written for the run, and that no rank saves."""
COMMITTED, PENDING = "COMMITTED", "PENDING_VALIDATION"
"""What a manifest says as long as there is no result of a validation."""


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint."""

    name: str  # its path, relative to the checkpoint's folder
    size: int
    checksum: int  # CRC-32


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a committed checkpoint."""

    index: int  # orders the checkpoints of a run, from 0
    metrics: Mapping[str, Any] = field(default_factory=dict)  # those of rank 0
    world_size: int
    positions: Mapping[str, Any] = field(default_factory=dict)  # of data loaders, by their numbers
    files: tuple[StoredFile, ...]
    validation: Mapping[str, Any] | None = None  # arguments of ValidationTaskConfig, if requested
    status: str = COMMITTED  # the name of a ReportedCheckpointStatus
    retention: Mapping[str, Any] = field(default_factory=dict)  # `CheckpointSettings.retention`

    @property
    def is_pending(self) -> bool:
        """Whether it is yet to be validated."""
        return self.status == PENDING

    def validated(self, result: StoredValidation | None) -> Manifest:
        """Return the manifest with the result of a validation, if it is one of this checkpoint."""
        if result is None or result.index != self.index:
            return self
        return replace(self, status=result.status, metrics={**self.metrics, **result.metrics})

    def to_json(self) -> bytes:
        fields = json.dumps(asdict(self))
        return json.dumps({"checksum": zlib.crc32(fields.encode()), "of": fields}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Parse a manifest; raises ValueError, TypeError or KeyError if it is damaged."""
        envelope = json.loads(text)
        if zlib.crc32(envelope["of"].encode()) != envelope["checksum"]:
            raise ValueError("The manifest's checksum does not match its content.")
        fields = json.loads(envelope["of"])
        return cls(**{**fields, "files": tuple(StoredFile(**file) for file in fields["files"])})


@dataclass(frozen=True, kw_only=True)
class StoredValidation:
    """The result of a checkpoint's validation."""

    index: int  # of the checkpoint: of two with one name, one may have been removed
    status: str
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> StoredValidation | None:
        """Parse a result; return None if it is incomplete."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None
