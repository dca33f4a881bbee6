"""What the driver knows about one attempt on a cluster."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from distributor.core.text import listed
from distributor.launch.hangs.stalls import StallWatch
from distributor.launch.job import Job
from distributor.launch.output.messages import notify, warn
from distributor.launch.spark.monitor.deadlines import Deadlines, StackReports
from distributor.launch.spark.monitor.nodes import Nodes
from distributor.launch.spark.monitor.outcomes import Outcomes
from distributor.launch.spark.monitor.program_distribution import ProgramDistribution
from distributor.launch.spark.monitor.rendezvous import RendezvousDecision
from distributor.launch.spark.monitor.run_state import run_state_machine
from distributor.launch.spark.plan import ClusterPlan
from distributor.node.agent.failure_grace import FailureGracePeriod
from distributor.node.agent.output.sink import Sink
from distributor.wire import messages
from distributor.wire.hub import Hub


class Attempt:
    """The state and the parts of an attempt. Messages change them, and the monitor acts on them.

    Parameters
    ----------
    job : Job
        The run.
    plan : ClusterPlan
        How many nodes it has, and how many ranks each.
    hub : Hub
        Receives the nodes' messages.
    sink : Sink
        Receives the ranks' output.
    start_deadline : float
        When, by ``time.monotonic``, the ranks of all nodes must have started.

    Attributes
    ----------
    machine : StateMachine of RunState
        The state.
    nodes, rendezvous, deadlines, stalls, stacks, outcomes, grace_period, programs
        The parts. None of them knows the others, except that the rendezvous reads the nodes.
    ending : list or BaseException or None
        The job's rows, or the exception that ended it, once it has ended.
    """

    def __init__(
        self, job: Job, plan: ClusterPlan, hub: Hub, sink: Sink, start_deadline: float
    ) -> None:
        self.job = job
        self.plan = plan
        self.hub = hub
        self.sink = sink
        self.machine = run_state_machine()
        self.nodes = Nodes(plan.num_tasks, plan.ranks_per_task)
        self.rendezvous = RendezvousDecision(self.nodes, start_deadline)
        self.deadlines = Deadlines(job.settings, start_deadline)
        self.stalls = StallWatch(job.settings)
        self.stacks = StackReports()
        num_ranks = plan.num_tasks * plan.ranks_per_task
        self.outcomes = Outcomes(plan.num_tasks, num_ranks, hub.secret)
        self.grace_period = FailureGracePeriod(plan.num_tasks)
        self.programs = ProgramDistribution(hub.send)
        self.ending: list[Any] | BaseException | None = None
        self._start_shown = False
        self._warned_of: set[int] = set()

    def show_start(self) -> None:
        """Show, once, that the ranks have started."""
        if not self._start_shown:
            self._start_shown = True
            training = self.plan.training(self.job.num_processes)
            self.job.notify(f"Started {training}", self.job.settings.spelling.logger)

    def stop_nodes(self) -> None:
        """Ask the nodes to stop their ranks, because a rank failed.

        If another attempt can follow, their tasks succeed. A task that fails costs its Python
        worker, and the next one imports everything anew.
        """
        self.nodes.stop()
        all_linked = self.rendezvous.method == "hub" and len(self.nodes.linked) == self.nodes.count
        # Without a cause, the error of a job that fails may have it.
        keeps_workers = all_linked and self.outcomes.has_cause and self.job.may_be_followed
        if keeps_workers:
            self.deadlines.start_stop()
        self.hub.broadcast(messages.Stop("a rank failed", fails_task=not keeps_workers))

    def preempt(self, hosts: Collection[str]) -> None:
        """Note that hosts are about to lose a process, and notify all ranks."""
        self.job.preempted.update(self.nodes.ranks_on(hosts))
        self.hub.broadcast(messages.Preempted(tuple(hosts)))

    def note_reclaimed(self, hosts: Collection[str]) -> None:
        """Note that hosts have lost a process to another application, without a notice."""
        self.job.preempted.update({host: [] for host in hosts} | self.nodes.ranks_on(hosts))

    def warn_about_links(self) -> None:
        """Warn about the nodes that have no link to this process, if there are any."""
        if unlinked := self.nodes.unreported:
            self._warned_of.update(unlinked)
            log = "log_dir there" if self.job.settings.log_dir else "the logs of the executors"
            warn(
                f"{listed('Node', unlinked)} did not reach this process at port {self.hub.port}: "
                f"their output is in {log} and not shown here, and values are sent through Spark. "
                "Open this port to the executors, or set hub_address to an address that they can "
                "reach."
            )

    def withdraw_warning(self, node: int) -> None:
        """Say so if a node was only late that the user was warned about."""
        if node in self._warned_of:
            notify(f"Node {node} was late, and has reached this process: its output is shown.")
