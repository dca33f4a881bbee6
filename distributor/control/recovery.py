"""How the ranks of an attempt go on without those that are lost, and others join them.

A lost rank is replaced by its node. A lost node leaves with all of its ranks, and its number is
vacant until the launcher has started another node, whose ranks join. The controller passes on what
it learns of ranks and nodes; without ``recovery="in_place"`` nothing is survived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from distributor.control.membership import Membership
from distributor.control.nodes import Nodes
from distributor.control.run import Attempt, Handle, LossExplained, NodeEnded, NodesLeaving
from distributor.core.versions import check_alike, pickling_software
from distributor.errors import DistributorError, RunTimeout, StartTimeout
from distributor.rank.messages import MemberState
from distributor.serialization.outcome import Failure, Origin, loss
from distributor.wire import messages
from distributor.wire.messages import LOST, Lost
from distributor.wire.protocol import NODE_LEASE_SECONDS

SAME_LOSS_SECONDS = 5.0
"""Seconds within which all ranks and nodes of an executor are lost with it."""
FILL_SECONDS = 0.2
"""Seconds between two looks at whether there is room for a node."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds after a node has not started until the next one is asked for, and at most."""

End = Literal["node", "link"]
"""An end of a node: its launcher reports that it has ended, or its link is closed."""


class Vacancies:
    """The nodes that an attempt lacks: those that it goes on without, and further ones.

    Another node can have the number of a lost one once that has ended and its link is closed.

    Parameters
    ----------
    nodes : iterable of int
        Nodes that it may have besides those of its start.
    """

    def __init__(self, nodes: Iterable[int]) -> None:
        self._vacant = set(nodes)
        self._awaited: dict[int, set[End]] = {}
        self._pause = 0.0
        self._next_at = -math.inf

    def is_lost(self, node: int) -> bool:
        """Return whether a node was lost, and has not ended."""
        return node in self._awaited

    def lose(self, node: int, ends: Collection[End]) -> None:
        """Note that a node is lost, of which these ends are not known yet."""
        if ends:
            self._awaited[node] = set(ends)
        else:
            self._vacant.add(node)

    def note_end(self, node: int, end: End) -> bool:
        """Note an end; return whether it was that of a lost node."""
        awaited = self._awaited.get(node)
        if awaited is None:
            return False
        awaited.discard(end)
        if not awaited:
            del self._awaited[node]
            self._vacant.add(node)
        return True

    def note_failed_start(self, now: float) -> None:
        self._pause = min(LONGEST_PAUSE, max(FIRST_PAUSE, 2 * self._pause))
        self._next_at = now + self._pause

    def note_start(self) -> None:
        self._pause = 0.0

    def fill(self, start: Callable[[Collection[int]], Collection[int]], now: float) -> None:
        """Have nodes started, if it is time."""
        if self._vacant and now >= self._next_at:
            self._next_at = now + FILL_SECONDS
            self._vacant -= set(start(sorted(self._vacant)))


class Recovery:
    """Decides what an attempt survives, and has other ranks and nodes take the place of lost ones.

    Parameters
    ----------
    attempt : Attempt
        The attempt.
    handle : Handle
        What its launcher does for it.
    nodes : Nodes
        Its nodes.
    clock : callable
        Returns monotonic seconds.
    runs : callable
        Returns whether all of its ranks run.

    Attributes
    ----------
    members : Membership
        Its members: all ranks, unless it is asked for.
    """

    def __init__(
        self,
        attempt: Attempt,
        handle: Handle,
        nodes: Nodes,
        clock: Callable[[], float],
        runs: Callable[[], bool],
    ) -> None:
        spec = attempt.spec
        self.is_wanted = spec.settings.recovery == "in_place"
        least = spec.min_processes if spec.min_processes < spec.num_processes else 1
        self.members = Membership(attempt.num_ranks, least, spec.keep_all)
        self._attempt, self._handle, self._nodes = attempt, handle, nodes
        self._clock, self._runs = clock, runs
        self._vacancies = Vacancies(range(handle.num_nodes, handle.max_nodes))
        # The failures of lost nodes, and whether they count for max_failures.
        self._unexplained: dict[int, tuple[list[Failure], bool]] = {}
        # Whether each loss that counts was a preemption, since the last group that has formed.
        self._unformed: list[bool] = []

    @property
    def _is_running(self) -> bool:
        return self.is_wanted and self._runs() and not self._attempt.failures

    @property
    def goes_on(self) -> bool:
        """Whether the ranks run, and would go on without a lost one, as far as is known."""
        return self._is_running and self.members.refusal is None

    def is_silenced(self, node: int) -> bool:
        """Return whether a node was lost: what else it sends no longer counts."""
        return self._vacancies.is_lost(node)

    # Lost ranks

    def survive_rank(self, node: int, failure: Failure) -> bool:
        """Go on without a rank, and have its node replace it; return whether that is possible.

        If no rank of the node has joined and one raises, another node may do better, later.
        """
        has_raised = failure.step is not None and self.goes_on
        if has_raised and self.members.give_up(self._nodes.ranks_of(node)):
            self._handle.links.send(node, messages.Stop("its ranks cannot join"))
            self._refuse(node, failure.text.rstrip(), ["node", "link"])
            return True
        what = f"{failure.origin}: {failure.summary.rstrip('.')}"
        if not self._survive(node, [failure], what):
            return False
        if failure.step is not None:
            self._attempt.run.notify(failure.text.rstrip())  # its traceback
        self._attempt.progress.replace(failure.origin.rank)
        members = self.members.current
        if members.change != "end":
            self._handle.links.send(node, messages.ReplaceRank(failure.origin.rank, members))
        self._announce()
        return True

    def note_state(self, rank: int, state: MemberState) -> None:
        """Act on what a rank reports about its membership."""
        if state.state == "unable" and self.members.refusal is None:
            self._attempt.run.warn_once(
                f"recovery='in_place' does not apply: {state.reason}. A failure restarts all ranks "
                "from the latest checkpoint."
            )
        if state.state == "formed":
            self._vacancies.note_start()
        if self.members.note(rank, state):
            self._announce()
        if not self.members.pending:
            self._unformed = []

    def _survive(
        self,
        node: int,
        failures: list[Failure],
        what: str,
        ends: Collection[End] = (),
        leaves: bool = False,
    ) -> bool:
        """Go on without ranks that one event has ended, if that is possible.

        Parameters
        ----------
        node : int
            Their node.
        failures : list of Failure
            A failure of each of them.
        what : str
            The ranks, their host and the cause.
        ends : collection of str
            If their node is lost too, its ends that are not known yet.
        leaves : bool
            Whether the node leaves before it is preempted.
        """
        if not self._is_running:
            return False
        attempt, nodes, now = self._attempt, self._nodes, self._clock()
        has_died = failures[0].step is None
        is_preempted = leaves or (has_died and failures[0].origin.host in attempt.preempted)
        is_member = failures[0].origin.rank in self.members.numbers
        may_be_same = bool(ends) or (has_died and is_member)
        is_counted = may_be_same and now < nodes.lost_beside(node) + SAME_LOSS_SECONDS
        limit = None if is_counted else attempt.limit_reached_by(is_preempted)
        reason = self.members.reason_to_restart(failures) or limit
        if set(nodes.unlinked) - nodes.done - {node}:
            reason = "a node has no link to this process"
        if reason is not None:
            if not leaves:
                attempt.run.notify(f"The other ranks do not go on: {reason}.")
            return False
        if not is_counted:
            nodes.note_loss(node, now)
            attempt.run.failed.survive(is_preempted)
        attempt.survived += failures
        attempt.run.notify(
            f"Lost {what}. The other ranks go on in their processes; replacements join them later."
        )
        for failure in failures:
            attempt.run.events.lose(failure.origin.rank)
        if ends:
            nodes.leave(node)
            self._vacancies.lose(node, ends)
            self._unexplained[node] = failures, not (is_counted or is_preempted)
        self.choose_store()
        self.members.lose(failures)
        if not is_counted and self.members.pending:
            self._unformed.append(is_preempted)
        return True

    def take_back(self) -> list[Failure]:
        """Return the failures after which no group has formed: the attempt ends, which counts."""
        for is_preempted in self._unformed:
            self._attempt.run.failed.take_back(is_preempted)
        pending, self.members.pending, self._unformed = self.members.pending, [], []
        return pending

    def choose_store(self) -> None:
        """Have the next members find each other in the store of a node that is at work."""
        self.members.store = self._nodes.store or self.members.store

    def _announce(self) -> None:
        self._handle.links.broadcast(messages.MembersChanged(self.members.current))

    # Lost nodes

    def note_link_end(self, node: int) -> bool:
        """Note the end of a link; return whether it was that of a lost node."""
        return self._vacancies.note_end(node, "link")

    def lose_link(self, node: int, how: Lost) -> None:
        """Go on without a node whose link is lost, if that is possible."""
        if node not in self._nodes.working:
            return
        if how is LOST:
            self._lose_node(node, "the connection to its node was lost", ["node"])
        else:
            cause = f"its node has been silent for {NODE_LEASE_SECONDS:g} s"
            self._lose_node(node, cause, ["node", "link"])

    def survive_error(self, node: int, error: Exception) -> bool:
        """Go on without a node that an error of its own ends; return whether that is possible."""
        if node in self._nodes.present and _is_late(error):
            return False
        return self._lose_node(node, str(error), ["node", "link"])

    def survive_end(self, message: NodeEnded) -> bool:
        """Return whether the attempt goes on without a node that has ended."""
        node, error = message.node, message.error
        if not self.is_wanted:
            return False
        if node not in self._nodes.present and not self._vacancies.is_lost(node):
            self._refuse(node, str(error or "its node has ended"))
        elif node in self._nodes.linked and error is not None and not _is_late(error):
            if not self._lose_node(node, "its node has ended", ["link"]):
                return False
        elif not self._vacancies.note_end(node, "node"):
            return False
        lost = self._unexplained.pop(node, None)
        if lost is not None and error is not None:
            explain = partial(self._explain, message, error, *lost)
            self._attempt.run.launcher.thread(explain).start()
        return True

    def let_leave(self, leaving: NodesLeaving) -> bool:
        """Go on without the nodes of executors that Spark is about to end, as far as possible."""
        cause = "its executor was about to end, so it has left"
        at_work = self._nodes.present & self._nodes.working
        left = [
            node
            for node in sorted(leaving.nodes & at_work)
            if self._lose_node(node, cause, ["node", "link"], leaves=True)
        ]
        for node in left:
            self._handle.links.send(node, messages.Stop(cause))
        return bool(left) and len(left) == len(leaving.nodes & at_work)

    def _lose_node(
        self, node: int, cause: str, ends: Collection[End], leaves: bool = False
    ) -> bool:
        """Go on without a node and its ranks, if that is possible; the same for one that joins."""
        nodes, attempt = self._nodes, self._attempt
        if node not in nodes.present:
            self._refuse(node, cause, ends)
            return True
        if not self._is_running:
            return False
        ranks = nodes.ranks_of(node)
        origin = partial(Origin, host=nodes.hosts[node], attempt=attempt.number)
        origins = [origin(rank=rank, local_rank=local) for local, rank in enumerate(ranks)]
        failures = [loss(each, cause) for each in origins]
        what = f"{nodes.describe({node})}: {cause.rstrip('.')}"
        if not self._survive(node, failures, what, ends, leaves):
            return False
        attempt.note_end(ranks, "failed")
        for failure in failures:
            attempt.run.events.add_failure(failure)
        self._announce()
        return True

    def _explain(
        self, message: NodeEnded, error: Exception, failures: Sequence[Failure], counts: bool
    ) -> None:
        """Find out why a node was lost, which may take seconds."""
        found = message.explain(error, "")
        is_preemption = counts and bool(getattr(found, "reclaimed", ()))
        explained = LossExplained(message.node, str(found), failures, is_preemption)
        self._handle.links.post(explained)

    def note_explanation(self, message: LossExplained) -> None:
        """Show why a node was lost; a container that was taken back counts as a preemption."""
        attempt, survived = self._attempt, self._attempt.survived
        has_ended_it = message.failures[0] in attempt.failures  # which counts by itself
        attempt.run.failed.num_preempted += message.is_preemption and not has_ended_it
        for failure in message.failures:
            survived[survived.index(failure)] = replace(failure, summary=message.text)
        self._attempt.run.notify(f"The cause of the loss of node {message.node}: {message.text}")

    # Nodes that join

    @property
    def _is_open(self) -> bool:
        """Whether ranks can join."""
        return self.goes_on and not self.members.has_ended

    def fill(self) -> None:
        """Have nodes started that replace lost ones, and further ones, if there is room."""
        if self._is_open:
            self._vacancies.fill(self._handle.replace, self._clock())

    def welcome(self, node: int, message: messages.NodeUp) -> None:
        """Have the ranks of a node join, unless the run ends."""
        links = self._handle.links
        if not self._is_open:
            links.send(node, messages.Stop("no rank can join"))
            return
        try:
            check_alike({message.host: message.software, "the driver": pickling_software()})
        except DistributorError as error:
            links.send(node, messages.Stop("the versions differ"))
            self._refuse(node, str(error), ["node", "link"])
            return
        links.send(node, messages.Rendezvous(*self.members.store))

    def note_start(self, node: int) -> None:
        """Note that the ranks of a node run, and will join if they are none of the start."""
        if node in self._nodes.present:
            return
        if not self._is_open:  # since it was welcome
            self._handle.links.send(node, messages.Stop("no rank can join"))
            return
        self._nodes.present.add(node)
        described = self._nodes.describe({node})
        self._attempt.run.notify(f"Started {described}, to join the other ranks.")

    def _refuse(self, node: int, cause: str, ends: Collection[End] = ()) -> None:
        """Note that a node does not join; another one may later."""
        self._nodes.leave(node)
        self._vacancies.lose(node, ends)
        self._vacancies.note_failed_start(self._clock())
        if self._is_open:
            self._attempt.run.warn_once(f"A node that was to join the others did not: {cause}")


def _is_late(error: Exception) -> bool:
    return isinstance(error, (RunTimeout, StartTimeout))
