"""What differs between executors, and what is wrong with the network between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from distributor.core.resources import format_bytes
from distributor.core.text import counted
from distributor.diagnosis.executor import DRIVER, ExaminedExecutor
from distributor.diagnosis.installed import java_major
from distributor.diagnosis.machine import Machine
from distributor.diagnosis.probe import NetworkPath
from distributor.diagnosis.report import (
    Check,
    failure,
    hosts_text,
    not_checked,
    ok,
    warning,
)

MAX_PATHS = 3
"""Network paths that a row names; the others are counted."""
SLOW_ROUND_TRIP = 0.01
"""Seconds of a round trip above which a path is slow."""
SLOW_BANDWIDTH = 12.5e6
"""Bytes per second below which a path is slow: 100 Mbit/s."""
CLOCK_SECONDS = 1.0
"""Seconds by which clocks may differ."""
MUST_BE_EQUAL = ("torch", "cloudpickle", "CUDA", "NCCL")
"""Versions that must be the same on all executors; others are only compared."""
HUB_FIX = (
    "Allow connections from the executors to the driver's port, and set hub_port "
    "(spark.distributor.hub.port) to a port that is open, or hub_address to an address of the "
    "driver that the executors reach."
)
RANKS_FIX = (
    "Allow TCP connections between the hosts of the executors, in both directions: rank_ports "
    "(spark.distributor.rank.ports) limits the port of rank 0's store, and "
    "net.ipv4.ip_local_port_range of the hosts limits the ports of gloo and NCCL."
)


def differences(executors: Sequence[ExaminedExecutor], driver: Machine) -> list[Check]:
    """Compare the versions of executors with one another, and with the driver's."""
    machines = [each.machine for each in executors]
    checks = [
        *(_difference(name, machines) for name in (*MUST_BE_EQUAL, "pyarrow", "Java", "driver")),
        _difference("Python", [driver, *machines]),
        _other_torch(driver, machines),
    ]
    found = [check for check in checks if check is not None]
    return found or [ok("versions", "the same on all executors", _where(executors))]


def _version_of(machine: Machine, name: str) -> str:
    """Return the version that is compared; empty if the machine does not have it."""
    if name == "Java":
        return str(java_major(machine.java)) if machine.java else ""
    if name == "driver":
        return machine.driver.driver if machine.driver else ""
    version = machine.versions.get(name, "")
    return ".".join(version.split(".")[:2]) if name == "Python" else version


def _other_torch(driver: Machine, machines: Sequence[Machine]) -> Check | None:
    ours = driver.versions.get("torch")
    theirs = {m.versions["torch"] for m in machines if "torch" in m.versions}
    if ours is None or not theirs - {ours}:
        return None
    found = f"torch is {ours} on the driver, and {', '.join(sorted(theirs))} on executors."
    fix = "Install the same version: values with tensors may otherwise not load on the driver."
    return warning("versions", found, fix)


_LABELS = {"driver": "the NVIDIA driver"}


def _difference(name: str, machines: Sequence[Machine]) -> Check | None:
    """Return the check of a version that differs between machines that have it."""
    hosts: dict[str, list[str]] = {}
    for machine in machines:
        if version := _version_of(machine, name):
            hosts.setdefault(version, []).append(machine.host)
    if len(hosts) < 2:
        return None
    report = failure if name in (*MUST_BE_EQUAL, "Python") else warning
    found = "; ".join(f"{version} on {hosts_text(hosts[version])}" for version in sorted(hosts))
    return report(
        "versions",
        f"The hosts differ in {_LABELS.get(name, name)}: {found}.",
        "Install the same version everywhere, or name one environment for all (environment=).",
        hosts_text(machine.host for machine in machines),
    )


def network_checks(executors: Sequence[ExaminedExecutor]) -> list[Check]:
    """Return the checks of the network between executors, and from them to the driver."""
    paths = [path for each in executors for path in each.paths]
    to_driver = [path for path in paths if path.target == DRIVER]
    between = [path for path in paths if path.target != DRIVER]
    checks = [
        failure(
            "network between executors",
            f"The executor cannot listen for other ranks: {each.unreachable}.",
            "Have the host's name resolve to an address of this host (/etc/hosts, DNS, or "
            "SPARK_LOCAL_IP), and check rank_ports.",
            each.host,
        )
        for each in executors
        if each.unreachable
    ]
    checks += _reachable("network to the driver", to_driver, HUB_FIX)
    if len(executors) < 2:
        checks.append(not_checked("network between executors", "there is only one executor"))
    checks += _reachable("network between executors", between, RANKS_FIX)
    checks += _speed(paths)
    checks += _interfaces(paths)
    checks += _clocks(to_driver)
    return checks


def _reachable(name: str, paths: Sequence[NetworkPath], fix: str) -> Iterator[Check]:
    blocked = [path for path in paths if path.error and not path.connected]
    broken = [path for path in paths if path.error and path.connected]
    if blocked:
        texts = _listed(blocked, lambda path: f"{_name(path)} at {path.address}: {path.error}")
        yield failure(name, f"No connection from {texts}.", fix, _sources(blocked))
    if broken:
        texts = _listed(broken, lambda path: f"{_name(path)}: {path.error}")
        mtu_fix = (
            "Small packets pass and large ones do not: set the same MTU on all interfaces and "
            "switches of the path, and do not block ICMP (fragmentation needed)."
        )
        yield failure(name, f"From {texts}.", mtu_fix, _sources(broken))
    working = [path for path in paths if not path.error]
    if working and not blocked and not broken:
        trip = max(path.round_trip for path in working)
        speeds = [path.bandwidth for path in working if path.bandwidth is not None]
        speed = f", {format_bytes(median(speeds))}/s" if speeds else ""
        found = f"{counted(len(working), 'path')}, {trip * 1000:.2g} ms{speed}"
        yield ok(name, found, _sources(working))


def _speed(paths: Sequence[NetworkPath]) -> Iterator[Check]:
    def is_slow(path: NetworkPath) -> bool:
        low = path.bandwidth is not None and path.bandwidth < SLOW_BANDWIDTH
        return not path.error and (low or path.round_trip > SLOW_ROUND_TRIP)

    def describe(path: NetworkPath) -> str:
        speed = "" if path.bandwidth is None else f" and {format_bytes(path.bandwidth)}/s"
        return f"{_name(path)}: {path.round_trip * 1000:.3g} ms{speed}"

    if slow := [path for path in paths if is_slow(path)]:
        yield warning(
            "network speed",
            f"Slow from {_listed(slow, describe)}.",
            "Check the link and its load, and the interface that is used (GLOO_SOCKET_IFNAME, "
            "NCCL_SOCKET_IFNAME). Gradients are exchanged in every step.",
            _sources(slow),
        )


def _interfaces(paths: Sequence[NetworkPath]) -> Iterator[Check]:
    hosts: dict[int, set[str]] = {}
    for path in paths:
        if path.mtu is not None and path.interface != "lo":
            hosts.setdefault(path.mtu, set()).add(f"{path.source} ({path.interface})")
    if len(hosts) > 1:
        found = "; ".join(f"{mtu} on {hosts_text(hosts[mtu])}" for mtu in sorted(hosts))
        yield warning(
            "MTU",
            f"The executors' interfaces differ: {found}.",
            "Set the same MTU on all of them and on the switches between them; larger packets "
            "may otherwise be dropped.",
            _sources(paths),
        )
    elif hosts:
        [(mtu, names)] = hosts.items()
        yield ok("MTU", f"{mtu} on {hosts_text(names)}", _sources(paths))


def _clocks(to_driver: Sequence[NetworkPath]) -> Iterator[Check]:
    measured = [path for path in to_driver if path.connected]
    # Half of a round trip is the error of the measurement.
    wrong = [p for p in measured if abs(p.clock_offset) > CLOCK_SECONDS + p.round_trip / 2]
    if wrong:
        texts = _listed(wrong, lambda path: f"{path.source}'s by {-path.clock_offset:+.1f} s")
        yield warning(
            "clock",
            f"Clocks differ from the driver's: {texts}.",
            "Synchronize the clocks (chrony, systemd-timesyncd): times in logs and metrics, the "
            "order of checkpoints, and TLS and Kerberos depend on them.",
            _sources(wrong),
        )
    elif measured:
        most = max(abs(path.clock_offset) for path in measured)
        yield ok("clock", f"within {max(most, 0.001):.3f} s of the driver's", _sources(measured))
    else:
        yield not_checked("clock", "no executor reaches the driver")


def _name(path: NetworkPath) -> str:
    return f"{path.source} to {path.target}"


def _listed(paths: Sequence[NetworkPath], describe: Callable[[NetworkPath], str]) -> str:
    shown = "; ".join(map(describe, paths[:MAX_PATHS]))
    more = len(paths) - MAX_PATHS
    return f"{shown}; and {more} more" if more > 0 else shown


def _sources(paths: Sequence[NetworkPath]) -> str:
    return hosts_text(path.source for path in paths)


def _where(executors: Sequence[ExaminedExecutor]) -> str:
    return hosts_text(each.host for each in executors)
