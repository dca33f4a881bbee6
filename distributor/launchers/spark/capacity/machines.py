"""The machines of a cluster, as its manager reports them, and what executors ask of them."""

from __future__ import annotations

from dataclasses import dataclass

from distributor.core.text import counted


@dataclass(frozen=True)
class Capacity:
    """Cores, memory (MiB) and GPUs of a machine, or those that an executor asks for."""

    cores: int
    memory: int
    gpus: int

    def holds(self, other: Capacity) -> bool:
        """Return whether `other` fits into this."""
        return self.cores >= other.cores and self.memory >= other.memory and self.gpus >= other.gpus

    def less(self, other: Capacity) -> Capacity:
        """Return what is left of this without `other`."""
        return Capacity(
            self.cores - other.cores, self.memory - other.memory, self.gpus - other.gpus
        )

    def __str__(self) -> str:
        gpus = counted(self.gpus, "GPU") if self.gpus else "no GPU"
        return f"{counted(self.cores, 'core')}, {in_mebibytes(self.memory)} of memory and {gpus}"


@dataclass(frozen=True)
class Machines:
    """What a cluster manager reports about its cluster.

    Parameters
    ----------
    total : tuple of Capacity
        The capacity of each machine that is alive.
    free : tuple of Capacity
        The free capacity of each of these machines.
    others : tuple of str
        The other applications that hold cores, with name and id, if they are known.
    own : int
        The cores that executors of this application hold, if that is known.
    """

    total: tuple[Capacity, ...]
    free: tuple[Capacity, ...]
    others: tuple[str, ...] = ()
    own: int = 0


def in_mebibytes(count: int) -> str:
    """Return an amount of memory (MiB) as Spark writes it, such as ``512m`` or ``64g``."""
    return f"{count // 1024}g" if count and count % 1024 == 0 else f"{count}m"
