"""A rank's reports, each made together with all other ranks or not at all."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import secrets
import shutil
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from distributor.core.checkpoint_config import CheckpointSettings, check_name
from distributor.core.host import host_name
from distributor.core.telemetry import Reported
from distributor.errors import DistributorError
from distributor.node.worker.worker_context import worker_context
from distributor.train.checkpoint import Checkpoint
from distributor.train.runtime import preemption
from distributor.train.runtime.store_channel import UPLOAD_SECONDS, StoreChannel
from distributor.train.storage.checkpoint_manager import History
from distributor.train.storage.checkpoint_store import PREFIX, Storage
from distributor.train.storage.filesystems import UnknownScheme, is_local
from distributor.train.storage.report_log import Report
from distributor.train.storage.upload_shares import shared


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
    checkpoint_settings : CheckpointSettings
        What is kept, and where.
    filesystem : FileSystem, optional
        Where that is, if the address does not say so.
    resume_from : Checkpoint, optional
        Where the training begins, as long as it has no checkpoint of its own.
    """

    def __init__(
        self,
        checkpoint_settings: CheckpointSettings,
        filesystem: Any = None,
        resume_from: Checkpoint | None = None,
    ) -> None:
        self.storage = Storage(
            checkpoint_settings.storage_path, checkpoint_settings.name, filesystem
        )
        self._resume_from = resume_from
        self._history = History(self.storage, checkpoint_settings)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reports")
        self._pending: list[Future[None]] = []
        self._number = 0
        self._next = 0
        self._latest: str | None = None
        self._positions: Mapping[str, Any] = {}
        self._loaders: list[weakref.WeakMethod[Callable[[], Any]]] = []
        self._passed_over: set[str] = set()
        self._channel: StoreChannel
        self._thread.submit(self._begin).result()
        worker_context().add_final_step(self.finish)

    def report(
        self,
        metrics: Mapping[str, Any],
        checkpoint: Checkpoint | None,
        name: str | None,
        mode: CheckpointUploadMode,
        delete_local: bool,
    ) -> None:
        """Report, as `distributor.train.report` says."""
        if name is not None:
            check_name("checkpoint_dir_name", name)
        if mode is CheckpointUploadMode.NO_UPLOAD and checkpoint is not None:
            name = self._name_in_storage(checkpoint, name)
        self._raise_what_failed()
        copied = json.loads(json.dumps(dict(metrics), default=_number))  # before others wait
        part = {
            "name": name,
            "metrics": copied,
            "files": None,
            "positions": self._told_positions(),
            "preempted": preemption.was_told(),
        }
        work = self._thread.submit(self._report, self._number, checkpoint, part, mode, delete_local)
        self._number += 1
        self._pending.append(work)
        if mode is not CheckpointUploadMode.ASYNC:
            self._settle()
        worker_context().completed_steps = self._number

    def finish(self) -> None:
        """Wait for the reports that are on their way; raise what one of them came to."""
        self._settle()
        if self._channel.rank == 0:
            self._thread.submit(self._history.record).result()

    def latest(self) -> Checkpoint | None:
        """Give the latest checkpoint that exists."""
        if self._latest is None:
            return self._resume_from
        return self.storage.checkpoint(self._latest)

    def all(self) -> list[ReportedCheckpoint]:
        """List the checkpoints that exist, the oldest first."""
        return [
            ReportedCheckpoint(self.storage.checkpoint(name), manifest.metrics)
            for name, manifest in self.storage.committed()
        ]

    def follow(self, position: Callable[[], Any]) -> Any:
        """Keep a loader's position with each checkpoint; give where it was in the latest."""
        self._loaders.append(weakref.WeakMethod(position))
        return self._positions.get(str(len(self._loaders) - 1))

    def _told_positions(self) -> dict[str, Any]:
        """Give the positions of the loaders that are still there, in the order of their making."""
        living = [position for loader in self._loaders if (position := loader()) is not None]
        told = {str(number): position() for number, position in enumerate(living)}
        made = len(self._loaders)  # the others are yet to go on
        return {n: at for n, at in self._positions.items() if int(n) >= made} | told

    def _name_in_storage(self, checkpoint: Checkpoint, name: str | None) -> str:
        """Tell the name of a checkpoint that is to lie in the run's folder already."""
        found = name or os.path.basename(checkpoint.path)
        if not self.storage.holds(checkpoint, found):
            raise ValueError(
                f"With NO_UPLOAD a checkpoint lies in a folder of {self.storage.path} already, "
                f"which checkpoint_dir_name may name, but it is at {checkpoint.path}"
                f"{f' and the name is {name!r}' if name else ''}."
            )
        return found

    def _raise_what_failed(self) -> None:
        """Raise what reports in the background have come to."""
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()

    def _settle(self) -> None:
        while self._pending:
            self._pending.pop(0).result()

    # On the thread

    def _begin(self) -> None:
        """Have all ranks know from where the training goes on."""
        self._channel = StoreChannel.here()
        self._channel.set_own("proof", {"host": host_name(), **self._prove()})
        if self._channel.rank == 0:
            error = self._strangers()
            self._channel.set("begin", {"error": error} if error else self._there())
        begin = self._channel.get("begin")
        if "error" in begin:
            raise DistributorError(begin["error"])
        self._next = begin["next"]
        self._latest = next(filter(self._is_whole, begin["committed"]), None)
        if self._channel.rank == 0:
            reports = self._history.go_on_from(self._latest)
            self._channel.set("go on", {"reports": reports, "positions": self._stored_positions()})
        go_on = self._channel.get("go on")
        self._number, self._positions = go_on["reports"], go_on["positions"]
        worker_context().completed_steps = self._number

    def _stored_positions(self) -> Mapping[str, Any]:
        """Read how far loaders were in the checkpoint from which the training goes on."""
        begun = self.latest()
        if begun is None:
            return {}
        root, _, name = begun.path.rpartition("/")
        manifest = Storage.at(begun.filesystem, root).manifest_of(name)
        return manifest.positions if manifest else {}

    def _prove(self) -> dict[str, str]:
        """Leave a file for rank 0 to see."""
        proof = f".proof-{secrets.token_hex(8)}"
        try:
            self.storage.write(proof, b"\n")
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"file": proof}

    def _strangers(self) -> str | None:
        """Say which ranks do not write to the storage that this one sees."""
        told = self._channel.gather("proof")
        seen = self.storage.take_away([each["file"] for each in told if "file" in each])
        lacks = [
            f"rank {rank} on {each['host']}: {each.get('error', 'what it writes is not there')}"
            for rank, each in enumerate(told)
            if each.get("file") not in seen
        ]
        if not lacks:
            return None
        return (
            f"The ranks do not share the storage that rank 0 on {told[0]['host']} sees at "
            f"{self.storage.path}: {'; '.join(lacks)}. storage_path has to be a folder that all "
            "nodes mount and may write, or an address such as s3://bucket/runs."
        )

    def _there(self) -> dict[str, Any]:
        """Say what there is, the latest first."""
        committed, damaged = self.storage.survey()
        for name in damaged:
            print(f"distributor: {name} is passed over: its manifest is damaged.", flush=True)
        numbers = [self.storage.next_index(), *(1 + each.index for _, each in committed)]
        return {"committed": [name for name, _ in reversed(committed)], "next": max(numbers)}

    def _is_whole(self, name: str) -> bool:
        """Tell whether a checkpoint is not damaged: each rank reads its share of the files."""
        about = f"look/{name}"
        manifest = self.storage.manifest_of(name)
        if manifest is None:
            damage: str | None = f"rank {self._channel.rank} cannot read its manifest"
        else:
            mine = manifest.files[self._channel.rank :: self._channel.size]
            damage = self.storage.damage_of(name, mine)
            if damage is None:
                self.storage.break_hardlink(name, mine)
        self._channel.set_own(about, damage)
        damages = [damage for damage in self._channel.gather(about) if damage]
        if damages:
            self._passed_over.add(name)
        if damages and self._channel.rank == 0:
            print(f"distributor: {name} is passed over: {'; '.join(damages)}.", flush=True)
        return not damages

    def _report(
        self,
        number: int,
        checkpoint: Checkpoint | None,
        part: dict[str, Any],
        mode: CheckpointUploadMode,
        delete_local: bool,
    ) -> None:
        target = part["name"] or f"{PREFIX}{self._next:06d}"
        about = f"report/{number}"
        if target in self._passed_over and self._channel.rank == 0:
            self.storage.remove(target)  # or its name could never be used again
        self._passed_over.discard(target)
        self._channel.barrier(f"{about}/come")  # until then, others may be saving
        keep = not delete_local or checkpoint is None or not self._is_to_go(checkpoint, mode)
        try:
            if checkpoint is not None:
                part["name"] = target
                part["files"] = self._files(about, checkpoint, target, mode, keep)
        except Exception as error:
            part["error"] = f"{type(error).__name__}: {error}"
        self._channel.set_own(about, part)
        if self._channel.rank == 0:
            self._channel.set(about, self._judged(about, number))
        verdict = self._channel.get(about, UPLOAD_SECONDS)
        self._channel.delete_keys()
        if "error" in verdict:
            raise DistributorError(verdict["error"])
        if verdict["committed"]:
            self._latest, self._next = verdict["committed"], self._next + 1
            if checkpoint is not None and not keep:
                shutil.rmtree(checkpoint.path, ignore_errors=True)

    def _is_to_go(self, checkpoint: Checkpoint, mode: CheckpointUploadMode) -> bool:
        """Tell whether a folder is this machine's, and not in storage."""
        uploaded = mode is not CheckpointUploadMode.NO_UPLOAD
        return uploaded and is_local(checkpoint.filesystem) and not self.storage.holds(checkpoint)

    def _files(
        self,
        about: str,
        checkpoint: Checkpoint,
        target: str,
        mode: CheckpointUploadMode,
        keep: bool,
    ) -> list[dict[str, Any]]:
        share = shared(self._channel, f"{about}/files")
        if mode is CheckpointUploadMode.NO_UPLOAD or self.storage.holds(checkpoint, target):
            return [asdict(file) for file in self.storage.described(target, share)]
        with checkpoint.as_directory() as folder:
            files = self.storage.upload(folder, target, share, keep=keep)
            return [asdict(file) for file in files]

    def _judged(self, about: str, number: int) -> dict[str, Any]:
        """Hear all ranks, and commit what they have written; rank 0 alone."""
        try:
            told = self._channel.gather(about, UPLOAD_SECONDS)
            metrics = [each["metrics"] for each in told]
            named = (each["name"] for each in told if each["files"] is not None)
            report = Report(
                number=number,
                metrics=metrics[0],
                checkpoint=next(named, None),
                world_size=self._channel.size,
                attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            )
            committed = report.checkpoint
            self._history.take(report, self._next, told)
            where = self.storage.checkpoint(committed).path if committed else None
            worker_context().send(Reported(metrics, where, told[0]["preempted"]))
            return {"committed": committed}
        except DistributorError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


def _number(value: Any) -> Any:
    """Make a plain number of a tensor's or numpy's."""
    try:
        return value.item()
    except (AttributeError, RuntimeError, ValueError):
        raise TypeError(
            f"Metrics are what JSON can hold, and numbers of tensors, but one is {value!r}."
        ) from None


_session: list[Session] = []


def is_kept() -> bool:
    """Tell whether this is a rank of a run that keeps something."""
    return "TORCHELASTIC_RUN_ID" in os.environ and CheckpointSettings.here() is not None


def begin(filesystem: Any = None, resume_from: Checkpoint | None = None) -> Session:
    """Begin this rank's session, which all ranks do together.

    Raises
    ------
    RuntimeError
        Outside a run, or in one that keeps nothing.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise RuntimeError(
            "report and get_checkpoint are for the ranks of a run: call them in the function "
            "that TorchTrainer or TorchDistributor runs."
        )
    checkpoint_settings = CheckpointSettings.here()
    if checkpoint_settings is None:
        raise RuntimeError(
            "This run keeps nothing: give TorchDistributor a storage_path, or TorchTrainer a "
            "RunConfig(storage_path=...)."
        )
    _session.append(Session(checkpoint_settings, filesystem, resume_from))
    return _session[0]


def look_at_storage() -> None:
    """Begin before the rank's program does, for that may take days until it reports."""
    with contextlib.suppress(UnknownScheme):  # which the program is then to make known
        begin()


def current() -> Session:
    """Give this rank's session; it begins where it has not."""
    return _session[0] if _session else begin()
