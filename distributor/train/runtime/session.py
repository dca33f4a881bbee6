"""The training state of this process, if it is a rank: one object, which owns all of it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from distributor.core.addresses import host_name
from distributor.core.rank_variables import CheckpointSettings
from distributor.core.resources import format_bytes
from distributor.errors import DistributorError, OtherRankFailed
from distributor.filesystems import UnknownScheme
from distributor.rank.context import worker_context
from distributor.rank.store_channel import StoreChannel
from distributor.serialization import oob_pickle
from distributor.train.runtime.reporter import Reporter
from distributor.train.storage.checkpoint import Checkpoint, ReportedCheckpoint
from distributor.train.storage.checkpoint_manager import json_metrics

if TYPE_CHECKING:
    from distributor.data.shard import DatasetShard

LIMIT = 64 * 1000**2
"""Bytes that an object may have: each rank reads it from rank 0's store."""


class Collectives:
    """The collectives of this rank, one at a time, over a connection of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # That of reports may be busy with an upload for hours.
        self._channel: StoreChannel | None = None
        self.num_collectives = 0

    def barrier(self) -> None:
        if not is_apart():
            self._agree(lambda _: None)

    def broadcast(self, data: Any) -> Any:
        """Return the object of rank 0, once every rank has called this."""
        members = worker_context().membership
        is_first = members is None or members.joins or members.rank == 0
        if (apart := is_apart()) and (is_first or data is not None):
            return data
        failed: Exception | None = None

        def offer(_: object) -> dict[str, str]:
            nonlocal failed
            if members is not None and not is_first and data is None:  # rank 0 alone had it
                members.refuse("rank 0 was lost before it had broadcast its object")
                raise DistributorError("Rank 0 was lost before it had broadcast its object.")
            try:
                return _packed(data)
            except Exception as error:
                failed = error
                return {"failed": f"{type(error).__name__}: {error}"}

        found = offer(None) if apart else self._agree(offer)
        if failed is not None:
            raise failed
        if "failed" in found:
            raise OtherRankFailed(f"Rank 0 could not broadcast its object: {found['failed']}")
        if "too_large" in found:
            raise ValueError(found["too_large"])
        return pickle.loads(base64.b64decode(found["pickled"]))

    def _agree(self, decide: Callable[[object], Any]) -> Any:
        """Return what rank 0 decides once all ranks have called this."""
        members = worker_context().membership
        with self._lock:
            if self._channel is None or (members and members.party != self._channel.party):
                self._channel = StoreChannel.connect()
            counter = members or self  # a replacement goes on counting
            try:
                key = f"collective/{counter.num_collectives}"
                return self._channel.agree(key, None, decide)
            finally:
                self._channel.delete_keys()
                counter.num_collectives += 1


def is_apart(reports: bool = False) -> bool:
    """Return whether this rank makes no collective, or report, now; see `Membership.is_apart`."""
    members = worker_context().membership
    return members is not None and members.is_apart(reports)


def _packed(data: Any) -> dict[str, str]:
    pickled = oob_pickle.dumps(data)
    if len(pickled) > LIMIT:
        size, limit = format_bytes(len(pickled)), format_bytes(LIMIT)
        return {
            "too_large": f"Rank 0 broadcasts {size}, but at most {limit} are possible: write a "
            "file that all ranks can read, or use torch.distributed."
        }
    return {"pickled": base64.b64encode(pickled).decode()}


AGREEMENT_TIMEOUT_SECONDS = 30.0
"""Seconds for all ranks to agree on a call; if they do not, the notice is ignored."""


@dataclass(frozen=True)
class Agreement:
    """What all ranks agree on for a notice."""

    call: int  # at which it is due, from 1; 0 for none
    ranks: Mapping[str, list[int]] = field(default_factory=dict)  # of hosts that lose a process


Agree = Callable[[int, int, bool], Agreement]
"""Takes a notice's number, the number of calls that this rank has begun, and whether its host is
about to lose a process."""


class NoticeTracker:
    """Determines the call at which each notice is due, the same in all ranks.

    Until a notice comes, a call costs a lock and an addition. Then each rank publishes, on a thread
    of its own, how many calls it has begun, and waits at its next call for the numbers of the
    others. The notice is due at the first call that no rank had begun, so that a rank that is ahead
    never waits for a rank that waits for it.
    """

    def __init__(self, agree: Agree) -> None:
        self._agree = agree
        self._lock = threading.Lock()
        self._calls = 0
        self._notices: list[Future[Agreement]] = []
        self.was_due = False  # whether a notice has been due at a call by now

    def receive(self, here: bool) -> None:
        """Receive a notice on any thread; `here`: whether this host is about to lose a process."""
        agreement: Future[Agreement] = Future()
        with self._lock:
            number, calls = len(self._notices), self._calls

            def settle() -> None:
                agreement.set_result(self._agree(number, calls, here))

            threading.Thread(target=settle, name="notice", daemon=True).start()
            self._notices.append(agreement)

    def is_due(self) -> bool:
        """Count a call, and return whether a notice is due at it."""
        call, agreements = self._count_call()
        return call in [each.call for each in agreements]

    def preempted_ranks(self) -> dict[str, list[int]] | None:
        """Count a call, and return the hosts and ranks of all notices due by now; None if none."""
        call, agreements = self._count_call()
        due = [each.ranks for each in agreements if 0 < each.call <= call]
        return {host: list(ranks[host]) for ranks in due for host in ranks} if due else None

    def _count_call(self) -> tuple[int, list[Agreement]]:
        with self._lock:
            self._calls += 1
            call, notices = self._calls, list(self._notices)
        agreements = [each.result() for each in notices]
        self.was_due = self.was_due or any(0 < each.call <= call for each in agreements)
        return call, agreements


def agree(name: str, number: int, calls: int, here: bool) -> Agreement:
    """Agree with all ranks on the call of the function `name` at which a notice is due.

    All ranks adopt the first recorded decision. A rank that has waited in vain for a late one
    records that there is none, and has not gone beyond the call at which the notice would otherwise
    be due.
    """
    key = f"{name}/{number}"
    try:
        channel = StoreChannel.connect(AGREEMENT_TIMEOUT_SECONDS)
        channel.set_own(key, {"calls": calls, "host": host_name() if here else None})
        decision = json.dumps(asdict(_gather_calls(channel, key, name)))
        return Agreement(**json.loads(channel.set_first(f"{key}/decision", decision)))
    except Exception as error:
        _warn(name, error)
        return Agreement(0)


def _gather_calls(channel: StoreChannel, key: str, name: str) -> Agreement:
    try:
        answers = channel.gather(key, AGREEMENT_TIMEOUT_SECONDS)
    except DistributorError as error:
        _warn(name, error)
        return Agreement(0)
    ranks: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        if answer["host"] is not None:
            ranks.setdefault(answer["host"], []).append(rank)
    return Agreement(1 + max(answer["calls"] for answer in answers), ranks)


def _warn(name: str, error: Exception) -> None:
    problem = f"this run is about to lose a process, but {name} cannot report it"
    print(f"distributor: {problem} at the same call in all ranks: {error}", flush=True)


_TORCHRUN_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class InProcessRun:
    """Remembers the last report of a training function that runs in the process of ``fit``.

    Takes the place of a `Reporter` and `Collectives`, without storage and other processes.
    """

    custom_filesystem = False

    def __init__(self, name: str, resume_from: Checkpoint | None) -> None:
        self.name = name
        self.metrics: dict[str, Any] | None = None
        self.checkpoint: Checkpoint | None = None
        self._resume_from = resume_from

    @property
    def storage(self) -> NoReturn:
        raise NotImplementedError("With num_workers=0 a run has no storage.")

    def report(
        self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None, *options: object
    ) -> None:
        """Remember a report. Nothing is uploaded, deleted or validated."""
        validation = options[-1]
        if validation is not None and checkpoint is None:
            raise ValueError("validation needs a checkpoint, but None is reported.")
        self.metrics = json_metrics(metrics)
        self.checkpoint = checkpoint or self.checkpoint

    def latest(self) -> Checkpoint | None:
        """Return the checkpoint that was reported last, or the one to start from."""
        return self.checkpoint or self._resume_from

    def all(self, validated: bool, timeout: float | None) -> list[ReportedCheckpoint]:
        return []

    def register_loader(self, position: Callable[[], Any], name: str | None = None) -> None:
        """Do nothing: no checkpoint has the position of a data loader."""

    def barrier(self) -> None:
        """Wait for the other processes that torchrun has started, if it has."""
        self.broadcast(None)

    def broadcast(self, data: Any) -> Any:
        if not _was_started_by_torchrun():
            return data
        import torch.distributed as dist

        objects = [data]
        dist.broadcast_object_list(objects)
        dist.barrier()
        return objects[0]


class RankSession:
    """The reporter, the preemption notices and the trainer's datasets of this process.

    The parts are created when they are first needed, and live until the process ends: a rank is one
    process of one attempt, so that nothing is ever reset.
    """

    def __init__(self) -> None:
        self.dataset_shards: Mapping[str, DatasetShard] = {}
        self._reporter: Reporter | None = None
        self._notices: dict[str, NoticeTracker] = {}
        self._collectives = Collectives()
        self._in_process: InProcessRun | None = None

    @contextlib.contextmanager
    def run_in_process(self, name: str, resume_from: Checkpoint | None) -> Iterator[InProcessRun]:
        """Make this process the only rank of a run, for the duration of the context."""
        outer, self._in_process = self._in_process, InProcessRun(name, resume_from)
        try:
            yield self._in_process
        finally:
            self._in_process = outer

    @property
    def run_name(self) -> str:
        """The name of the run; its id if it has none, and empty outside a run."""
        if self._in_process is not None:
            return self._in_process.name
        settings = CheckpointSettings.from_env()
        return settings.name if settings else os.environ.get("TORCHELASTIC_RUN_ID", "")

    @property
    def collectives(self) -> Collectives | InProcessRun:
        self.require_rank("The functions of distributor.train.collective")
        return self._in_process or self._collectives

    @property
    def reporter(self) -> Reporter | InProcessRun:
        """The reporter; started first if necessary."""
        return self._in_process or self._reporter or self.start_reporter()

    def start_reporter(
        self, filesystem: Any = None, resume_from: Checkpoint | None = None
    ) -> Reporter:
        """Start this rank's reporter, together with all other ranks; see `Reporter`.

        Raises RuntimeError if this process is not a rank of a run, or the run has no storage, and
        DistributorError if the ranks do not share the storage, or one of them does not call this.
        """
        self.require_rank("report and get_checkpoint")
        settings = CheckpointSettings.from_env()
        if settings is None:
            raise RuntimeError(
                "This run has no storage: pass a storage_path to TorchDistributor, or a "
                "RunConfig(storage_path=...) to TorchTrainer."
            )
        self._reporter = Reporter(settings, filesystem, resume_from, self.was_preempted)
        return self._reporter

    def is_preempted(self) -> bool:
        """Return, at the same call in all ranks, whether the run is about to lose a process."""
        return worker_context().is_rank and self._notices_of("is_preempted").is_due()

    def preempted_ranks(self) -> dict[str, list[int]] | None:
        """Return the hosts that will lose a process, from the same call on in all ranks."""
        self.require_rank("get_preemption_info")
        if not worker_context().is_rank:  # a subprocess of a rank, or the process of `fit`
            return None
        return self._notices_of("get_preemption_info").preempted_ranks()

    def _notices_of(self, function: str) -> NoticeTracker:
        """Return the notices of a function, whose calls are counted separately."""
        if function not in self._notices:
            if members := worker_context().membership:
                members.refuse(f"the program calls {function}")
            tracker = self._notices[function] = NoticeTracker(partial(agree, function))
            worker_context().preemption_notices.subscribe(tracker.receive)
        return self._notices[function]

    def was_preempted(self) -> bool:
        return any(notices.was_due for notices in self._notices.values())

    def require_rank(self, what: str) -> None:
        """Raise RuntimeError if this process is not a rank of a run; says what cannot be called."""
        if self._in_process is None and not _is_rank():
            raise RuntimeError(
                f"{what} can only be called by the ranks of a run: call them in the function that "
                "TorchTrainer or TorchDistributor runs."
            )


session = RankSession()
"""The session of this process."""


def has_storage() -> bool:
    """Return whether this process is a rank of a run with storage."""
    return _is_rank() and CheckpointSettings.from_env() is not None


def check_storage() -> None:
    """Start the reporter before the rank's program, which may run for days before it reports."""
    with contextlib.suppress(UnknownScheme):  # the program may register the scheme
        session.start_reporter()


def _is_rank() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def needs_process_group() -> bool:
    """Return whether torchrun has started this process among others, which have no group yet."""
    if not _was_started_by_torchrun():
        return False
    import torch.distributed as dist

    return not dist.is_initialized()


def _was_started_by_torchrun() -> bool:
    return all(name in os.environ for name in _TORCHRUN_VARIABLES)
