"""Machines for tests: network namespaces on a bridge, or addresses of the loopback."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributor.core.addresses import joined

_numbers, _networks = itertools.count(), itertools.count()
LISTENING = "0A"
"""The state of a socket, as the kernel's table has it."""


@dataclass
class Machine:
    """A loopback address, or one in a network namespace, and variables of what starts there."""

    address: str
    namespace: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    _started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def start(self, command: Sequence[str], **settings: Any) -> subprocess.Popen[Any]:
        """Start a process on this machine; it is killed together with the machine."""
        given = {**self.environment, **settings.pop("env", {})}
        env = {**os.environ, "SPARK_LOCAL_IP": self.address, **given}
        if ":" in self.address:
            options = env.get("JDK_JAVA_OPTIONS", "")
            env["JDK_JAVA_OPTIONS"] = f"{options} -Djava.net.preferIPv6Addresses=true".lstrip()
            env["SPARK_PREFER_IPV6"] = "true"
        process = subprocess.Popen([*self._inside, *command], env=env, **settings)
        self._started.append(process)
        return process

    @property
    def _inside(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace] if self.namespace else []

    def listening_ports(self, *, loopback: bool = True) -> set[int]:
        """Return the ports at which this machine listens, also for itself alone or not."""
        tables = [*self._inside, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
        text = subprocess.run(tables, check=True, capture_output=True, text=True).stdout
        rows = [line.split() for line in text.splitlines()]
        places = [row[1].rpartition(":") for row in rows if row[3] == LISTENING]
        return {int(port, 16) for at, _, port in places if loopback or not at.endswith("0100007F")}

    @property
    def host(self) -> str:
        """The address as part of a URL."""
        return joined(self.address, 0).removesuffix(":0")

    def cut(self) -> None:
        """Take the network link down: packets are lost without an error."""
        _ip("link", "set", self.namespace, "down")

    def mend(self) -> None:
        """Bring the network link up again."""
        _ip("link", "set", self.namespace, "up")

    def lose(self, other: Machine) -> None:
        """Drop the packets that this machine sends to one other machine."""
        nobody = ["lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev", "eth0"]
        _ip("-n", self.namespace, "neigh", "replace", other.address, *nobody)

    def reach(self, other: Machine) -> None:
        """Undo `lose`."""
        _ip("-n", self.namespace, "neigh", "del", other.address, "dev", "eth0")

    def lose_ports(self, other: Machine, *, except_from: int) -> None:
        """Drop packets to one other machine, except those of 256 ports."""
        name = self.namespace
        _ip("-n", name, "link", "add", "nowhere", "type", "veth", "peer", "name", "unused")
        _ip("-n", name, "link", "set", "nowhere", "up")  # its peer is down, so it drops everything
        _tc(name, "qdisc", "add", "dev", "eth0", "clsact")
        on_egress = ["dev", "eth0", "egress", "protocol", "ip"]
        to_other = ["u32", "match", "ip", "dst", f"{other.address}/32"]
        for end in ("sport", "dport"):
            ports = ["match", "ip", end, str(except_from), "0xff00"]
            _tc(name, "filter", "add", *on_egress, "prio", "1", *to_other, *ports, "classid", "1:1")
        to_nowhere = ["action", "mirred", "egress", "redirect", "dev", "nowhere"]
        _tc(name, "filter", "add", *on_egress, "prio", "2", *to_other, *to_nowhere)

    def reach_ports(self) -> None:
        """Undo `lose_ports`."""
        _tc(self.namespace, "qdisc", "del", "dev", "eth0", "clsact")
        _ip("-n", self.namespace, "link", "del", "nowhere")

    def also_elsewhere(self) -> Machine:
        """Add another address to this machine."""
        network, _, number = self.address.rpartition(".")
        other = Machine(f"{network}.{100 + int(number)}", self.namespace)
        _ip("-n", self.namespace, "address", "add", f"{other.address}/24", "dev", "eth0")
        return other

    def end(self) -> None:
        """Kill the processes that were started here."""
        for process in self._started:
            process.kill()
        for process in self._started:
            process.wait()


def why_not_apart() -> str:
    """Return why network namespaces cannot be created here, or an empty string if they can."""
    if not shutil.which("ip"):
        return "iproute2 is not installed"
    probe = f"dp{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return ""


@contextlib.contextmanager
def machines_apart(count: int, *, ipv6: bool = False) -> Iterator[list[Machine]]:
    """Create machines with one network namespace each, joined by a bridge.

    The host's end of each machine's link has the name of its namespace. With ``ipv6`` they have
    only IPv6 addresses, except on the loopback.
    """
    pid = os.getpid()
    bridge, network = f"db{pid}", f"10.{200 + pid % 50}.{pid // 50 % 250}."
    if ipv6:
        network = f"fd00:{pid % 0xFFFF:x}::"
    # The kernel may not yet have removed an earlier machine's namespace.
    names = [f"d{pid}n{next(_numbers)}" for _ in range(count)]
    made = [Machine(f"{network}{number}", name) for number, name in enumerate(names, 1)]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for machine in made:
            _join(machine, bridge)
        yield made
    finally:
        for machine in made:
            machine.end()
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", machine.namespace)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", bridge)


@contextlib.contextmanager
def machines_on_loopback(count: int) -> Iterator[list[Machine]]:
    """Create machines that are loopback addresses; their links cannot be changed."""
    pid = os.getpid()
    # Each process, and each set of machines in this process, has a network of its own.
    network = f"127.{100 + pid % 100}.{(pid // 100 + 83 * next(_networks)) % 250}"
    made = [Machine(f"{network}.{number}") for number in range(1, count + 1)]
    try:
        yield made
    finally:
        for machine in made:
            machine.end()


def _join(machine: Machine, bridge: str) -> None:
    name = machine.namespace
    _ip("netns", "add", name)
    _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", name, "master", bridge, "up")
    _ip("-n", name, "link", "set", "lo", "up")
    size, *options = ["/64", "nodad"] if ":" in machine.address else ["/24"]
    _ip("-n", name, "address", "add", f"{machine.address}{size}", *options, "dev", "eth0")
    _ip("-n", name, "link", "set", "eth0", "up")


def _tc(namespace: str, *arguments: str) -> None:
    subprocess.run(["tc", "-n", namespace, *arguments], check=True, capture_output=True)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def why_not_mounted() -> str:
    """Return why a file system cannot be mounted here, or an empty string if one can."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder), 1):
                return ""
        except (OSError, subprocess.CalledProcessError) as error:
            return f"no file system can be mounted: {error}"


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount a small file system on a folder."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "distributor-test", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)
