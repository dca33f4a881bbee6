"""One rank's part in a training: it reports together with all others, or not at all."""

from __future__ import annotations

import enum
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from distributor import runtime
from distributor.errors import DistributorError
from distributor.node.finishing import before_the_end
from distributor.train.checkpoint import Checkpoint
from distributor.train.keeping import superfluous
from distributor.train.storage import PREFIX, Manifest, Storage, Stored
from distributor.wire.keeping import Keeping

WAIT_SECONDS = 1800.0
"""Seconds that a report waits for the other ranks, as torch's collectives do."""


class CheckpointUploadMode(enum.Enum):
    """When a checkpoint is brought to storage."""

    SYNC = "SYNC"
    ASYNC = "ASYNC"
    NO_UPLOAD = "NO_UPLOAD"


@dataclass(frozen=True)
class ReportedCheckpoint:
    """A checkpoint that exists, and what was reported with it."""

    checkpoint: Checkpoint
    metrics: Mapping[str, Any]


class Session:
    """Reports of this rank, one after another on a thread, which alone uses the store.

    Parameters
    ----------
    keeping : Keeping
        What is kept, and where.
    """

    def __init__(self, keeping: Keeping) -> None:
        self._keeping = keeping
        self._storage = Storage(keeping.storage_path, keeping.name)
        self._rank, self._size = runtime.get_global_rank(), runtime.get_world_size()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reports")
        self._pending: list[Future[None]] = []
        self._number = 0
        self._store: Any = None
        self._latest: str | None = None
        self._next = 0
        self._thread.submit(self._begin).result()
        before_the_end(self.finish)

    def report(
        self,
        metrics: Mapping[str, Any],
        checkpoint: Checkpoint | None,
        name: str | None,
        mode: CheckpointUploadMode,
        delete_local: bool,
    ) -> None:
        """Report, as `distributor.train.report` says."""
        told = json.dumps(dict(metrics))  # before others wait for it
        number, self._number = self._number, self._number + 1
        work = self._thread.submit(
            self._report, number, json.loads(told), checkpoint, name, mode, delete_local
        )
        self._pending.append(work)
        if mode is not CheckpointUploadMode.ASYNC:
            self.finish()

    def finish(self) -> None:
        """Wait for the reports that are on their way; raise what one of them came to."""
        while self._pending:
            self._pending.pop(0).result()

    def latest(self) -> Checkpoint | None:
        """Give the latest checkpoint that exists."""
        return None if self._latest is None else self._storage.checkpoint(self._latest)

    def all(self) -> list[ReportedCheckpoint]:
        """List the checkpoints that exist, the oldest first."""
        return [
            ReportedCheckpoint(self._storage.checkpoint(name), manifest.metrics)
            for name, manifest in self._storage.committed()
        ]

    # On the thread

    def _begin(self) -> None:
        """Have all ranks know from where the training goes on."""
        import torch.distributed as dist

        client = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=WAIT_SECONDS),
        )
        self._store = dist.PrefixStore("distributor/train", client)  # type: ignore[attr-defined]
        self._tell(f"proof/{self._rank}", {"host": socket.gethostname(), **self._prove()})
        if self._rank == 0:
            error = self._strangers()
            self._tell("begin", {"error": error} if error else self._found())
        found = self._hear("begin", {0})
        if "error" in found:
            raise DistributorError(found["error"])
        self._latest, self._next = found["latest"], found["next"]

    def _prove(self) -> dict[str, str]:
        """Leave a file for rank 0 to see."""
        proof = f".proof-{secrets.token_hex(8)}"
        try:
            self._storage.leave(proof)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"file": proof}

    def _strangers(self) -> str | None:
        """Say which ranks do not write to the storage that this one sees."""
        told = [self._hear(f"proof/{rank}", {rank}) for rank in range(self._size)]
        seen = self._storage.take_away([each["file"] for each in told if "file" in each])
        lacks = [
            f"rank {rank} on {each['host']}: {each.get('error', 'what it writes is not there')}"
            for rank, each in enumerate(told)
            if each.get("file") not in seen
        ]
        if not lacks:
            return None
        return (
            f"The ranks do not share the storage that rank 0 on {told[0]['host']} sees at "
            f"{self._storage.path}: {'; '.join(lacks)}. storage_path has to be a folder that all "
            "nodes mount and may write, or an address such as s3://bucket/runs."
        )

    def _found(self) -> dict[str, Any]:
        """Find the latest checkpoint that is not damaged."""
        committed = self._storage.committed()
        after = max([self._storage.next_index(), *(1 + each.index for _, each in committed)])
        for name, manifest in reversed(committed):
            damage = self._storage.damage_of(name, manifest)
            if damage is None:
                return {"latest": name, "next": after}
            print(f"distributor: {name} is passed over: {damage}.", flush=True)
        return {"latest": None, "next": after}

    def _report(
        self,
        number: int,
        metrics: dict[str, Any],
        checkpoint: Checkpoint | None,
        name: str | None,
        mode: CheckpointUploadMode,
        delete_local: bool,
    ) -> None:
        target = name or f"{PREFIX}{self._next:06d}"
        mine: dict[str, Any] = {"name": name, "metrics": metrics, "files": None}
        try:
            if checkpoint is not None:
                mine["files"] = self._files(checkpoint, target, mode)
        except Exception as error:
            mine["error"] = f"{type(error).__name__}: {error}"
        self._tell(f"{number}/{self._rank}", mine)
        if self._rank == 0:
            self._tell(f"{number}/verdict", self._judged(number, target, metrics))
        verdict = self._hear(f"{number}/verdict", {0})
        if "error" in verdict:
            raise DistributorError(verdict["error"])
        if verdict["committed"]:
            self._latest, self._next = target, self._next + 1
            if checkpoint is not None and delete_local:
                shutil.rmtree(checkpoint.path, ignore_errors=True)

    def _files(
        self, checkpoint: Checkpoint, target: str, mode: CheckpointUploadMode
    ) -> list[dict[str, Any]]:
        if mode is CheckpointUploadMode.NO_UPLOAD:
            return [asdict(file) for file in self._storage.described(target)]
        with checkpoint.as_directory() as folder:
            return [asdict(file) for file in self._storage.upload(folder, target)]

    def _judged(self, number: int, target: str, metrics: dict[str, Any]) -> dict[str, Any]:
        """Hear all ranks, and commit what they have written; rank 0 alone."""
        try:
            told = [self._hear(f"{number}/{rank}", {rank}) for rank in range(self._size)]
            if error := _disagreement(told):
                return {"error": error}
            given = [files for each in told if (files := each["files"]) is not None]
            if not given:
                return {"committed": False}
            files = _joined(given)
            manifest = Manifest(
                index=self._next, metrics=metrics, world_size=self._size, files=files
            )
            self._storage.commit(target, manifest)
            kept = self._storage.committed()
            for old in (*superfluous(kept, self._keeping), *self._storage.leftovers(target)):
                self._storage.remove(old)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"committed": True}

    def _tell(self, key: str, words: dict[str, Any]) -> None:
        self._store.set(key, json.dumps(words))

    def _hear(self, key: str, ranks: set[int]) -> dict[str, Any]:
        """Wait for words of others.

        Raises
        ------
        DistributorError
            Where they do not come; names who is waited for.
        """
        began = time.monotonic()
        try:
            self._store.wait([key], timedelta(seconds=WAIT_SECONDS))
        except Exception as error:
            waited = time.monotonic() - began
            raise DistributorError(
                f"After {waited:.0f} s, a report of rank {self._rank} still waits for rank(s) "
                f"{sorted(ranks)}. Every rank has to call report as often as the others."
            ) from error
        words: dict[str, Any] = json.loads(self._store.get(key))
        return words


def _disagreement(told: list[dict[str, Any]]) -> str | None:
    """Say what keeps the ranks' reports from being one."""
    for rank, each in enumerate(told):
        if "error" in each:
            return f"Rank {rank} could not bring its checkpoint to storage: {each['error']}"
    names = {each["name"]: rank for rank, each in reversed(list(enumerate(told)))}
    if len(names) > 1:
        listed = ", ".join(f"{name!r} on rank {rank}" for name, rank in names.items())
        return f"Ranks report a checkpoint under different names: {listed}."
    return None


def _joined(given: list[list[dict[str, Any]]]) -> tuple[Stored, ...]:
    """Put together what ranks have written; what several wrote alike is one file."""
    files: dict[str, Stored] = {}
    for file in (Stored(**file) for files in given for file in files):
        if files.setdefault(file.name, file) != file:
            raise DistributorError(
                f"Several ranks report a file {file.name}, and not the same. Name what each rank "
                "saves after its rank, or let one rank report it."
            )
    return tuple(files.values())


_session: list[Session] = []


def current() -> Session:
    """Give this rank's session.

    Raises
    ------
    RuntimeError
        Outside a run, or in one that keeps nothing.
    """
    if not _session:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise RuntimeError(
                "report and get_checkpoint are for the ranks of a run: call them in the function "
                "that TorchTrainer or TorchDistributor runs."
            )
        keeping = Keeping.here()
        if keeping is None:
            raise RuntimeError(
                "This run keeps nothing: give TorchDistributor a storage_path, or TorchTrainer a "
                "RunConfig(storage_path=...)."
            )
        _session.append(Session(keeping))
    return _session[0]
