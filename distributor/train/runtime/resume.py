"""The round before the first report: ranks check their storage and agree where to resume."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributor.core.addresses import host_name
from distributor.errors import DistributorError
from distributor.filesystems import describe_error
from distributor.train.runtime.store_channel import StoreChannel
from distributor.train.storage.checkpoint import Checkpoint
from distributor.train.storage.checkpoint_manager import CheckpointManager
from distributor.train.storage.checkpoint_store import Storage, stored_positions
from distributor.train.storage.files import (
    Checksum,
    Damaged,
    break_hardlinks,
    check_parts,
    read_share,
)
from distributor.train.storage.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The state that a training starts from; the same on all ranks."""

    latest: str | None  # the name of the latest checkpoint that is not damaged
    next_index: int  # the number of the next checkpoint
    num_reports: int  # up to the latest checkpoint
    positions: Mapping[str, Any]  # of the data loaders in that checkpoint
    damaged: frozenset[str]  # the names of later checkpoints, which are damaged


def find_resume_point(
    channel: StoreChannel,
    storage: Storage,
    manager: CheckpointManager,
    resume_from: Checkpoint | None,
) -> ResumePoint:
    """Check that all ranks share the storage, and find the checkpoint to resume from.

    All ranks call this together. Each reads its share of the files of the latest checkpoint. If one
    is damaged, the checkpoint before is used. The manager of rank 0 forgets later reports.
    """
    proof = _write_proof(storage)
    channel.set_own("proof", {"host": host_name(), **proof})
    if channel.rank == 0:
        error = _check_shared(channel, storage)
        channel.set("begin", {"error": error} if error else _survey(storage))
    begin = channel.get("begin")
    if "error" in begin:
        with contextlib.suppress(Exception):  # it is where rank 0 does not see it
            storage.remove_files([proof["file"]])
        channel.await_readers("begin")
        raise DistributorError(begin["error"])
    damaged: set[str] = set()
    latest = None
    for name in begin["committed"]:
        if _is_intact(channel, storage, name):
            latest = name
            break
        damaged.add(name)
    if channel.rank == 0:
        positions = stored_positions(storage.checkpoint(latest) if latest else resume_from)
        reports = manager.resume_from(latest, begin["unfinished"])
        channel.set("resume", {"reports": reports, "positions": positions})
    resume = channel.get("resume")
    return ResumePoint(
        latest=latest,
        next_index=begin["next"],
        num_reports=resume["reports"],
        positions=resume["positions"],
        damaged=frozenset(damaged),
    )


def _write_proof(storage: Storage) -> dict[str, str]:
    """Write a file that rank 0 must see if it has the same storage."""
    file = f".proof-{secrets.token_hex(8)}"
    try:
        storage.write(file, b"\n")
    except Exception as error:
        return {"error": describe_error(error)}
    return {"file": file}


def _check_shared(channel: StoreChannel, storage: Storage) -> str | None:
    """Return an error that names the ranks whose proofs rank 0 does not see."""
    proofs = channel.gather("proof")
    written = [proof["file"] for proof in proofs if "file" in proof]
    if "error" in proofs[0]:
        own = proofs[0]
        with contextlib.suppress(Exception):  # it may not be reached
            storage.remove_files(written)
        return f"Rank 0 on {own['host']} cannot write to {storage.path}: {own['error']}"
    seen = storage.remove_files(written)
    failures = [
        f"rank {rank} on {proof['host']}: {proof.get('error', 'its files do not appear there')}"
        for rank, proof in enumerate(proofs)
        if proof.get("file") not in seen
    ]
    if not failures:
        return None
    return (
        f"The ranks do not share the storage that rank 0 on {proofs[0]['host']} sees at "
        f"{storage.path}: {'; '.join(failures)}. storage_path must be a folder that all nodes "
        "mount and can write to, or an address such as s3://bucket/runs."
    )


def _survey(storage: Storage) -> dict[str, Any]:
    """Return the checkpoints that exist, the latest first, and what earlier attempts left."""
    found = storage.survey()
    for name in found.damaged:
        print(f"distributor: {name} is skipped: its manifest is damaged.", flush=True)
    return {
        "committed": [name for name, _ in reversed(found.committed)],
        "unfinished": found.unfinished,
        "next": found.next_index,
    }


def _is_intact(channel: StoreChannel, storage: Storage, name: str) -> bool:
    """Return whether a checkpoint is undamaged: each rank reads its share of the bytes."""
    manifest, checkpoint = storage.manifest_of(name), storage.checkpoint(name)
    channel.set_own(f"check/{name}", _read_share(channel, checkpoint, manifest))
    shares = channel.gather(f"check/{name}")
    damages = [share["damage"] for share in shares if share["damage"]]
    if manifest is not None and not damages:
        parts = [Checksum(*part) for share in shares for part in share["parts"]]
        try:
            check_parts(checkpoint, manifest.files, parts)
        except Damaged as damage:
            damages.append(str(damage))
    if damages and channel.rank == 0:
        print(f"distributor: {name} is skipped: {'; '.join(damages)}.", flush=True)
    return not damages


def _read_share(
    channel: StoreChannel, checkpoint: Checkpoint, manifest: Manifest | None
) -> dict[str, Any]:
    """Read this rank's share of a checkpoint; return its damage or the checksums of its parts."""
    if manifest is None:
        return {"damage": f"rank {channel.rank} cannot read its manifest"}
    try:
        parts = read_share(checkpoint, manifest.files, channel.rank, channel.size)
    except Damaged as damage:
        return {"damage": str(damage)}
    break_hardlinks(checkpoint, manifest.files[channel.rank :: channel.size])
    return {"damage": None, "parts": parts}
