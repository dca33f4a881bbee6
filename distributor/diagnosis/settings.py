"""What is examined: the ranks that a run would have, and the ports that they would use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from distributor.core.spelling import Spelling
from distributor.run.settings import Settings
from distributor.settings.defaults import complete
from distributor.settings.fields import setting, setting_fields
from distributor.settings.types import (
    HOST,
    NUMBER,
    PORT,
    PORTS,
    SettingType,
    check_count,
    option,
    optional,
)

_COUNT = SettingType("int", optional(check_count), (NUMBER,))
_OF_RUNS = {field.name: field.metadata["default"] for field in setting_fields(Settings)}


@dataclass(frozen=True)
class Wanted:
    """What a run would need; checked on construction.

    Without a number of ranks, each executor would have one, and this machine two.
    """

    spelling: ClassVar[Spelling] = Spelling("doctor", run_on_cpus="pass gpus=0")

    num_processes: int | None = setting(
        None,
        _COUNT.with_options(option("--nproc", "--{}", type=int, metavar="N")),
        "the number of ranks of a run",
    )
    gpus: int = setting(
        0,
        replace(_COUNT, check=lambda name, count: count == 0 or check_count(name, count)),
        "the number of GPUs of a run (default: 0, CPUs)",
    )
    storage_path: str | None = setting(
        None,
        SettingType("str", lambda name, path: None, (option("--{}", "--storage", metavar="PATH"),)),
        "storage that all hosts share",
    )
    hub_address: str | None = setting(
        None, HOST, "the address of the driver that executors connect to"
    )
    hub_port: int = setting(_OF_RUNS["hub_port"], PORT, "the driver's port for executors")
    rank_ports: str | None = setting(_OF_RUNS["rank_ports"], PORTS, "the ports for rank 0's store")

    def __post_init__(self) -> None:
        complete(self)
        for field in setting_fields(self):
            name, value = self.spelling.of(field.name), getattr(self, field.name)
            field.metadata["type"].check(name, value)
        if self.gpus and self.num_processes not in (None, self.gpus):
            ranks, gpus = self.spelling.of("num_processes"), self.spelling.of("gpus")
            raise ValueError(
                f"Each rank has one GPU, but {ranks} is {self.num_processes} and {gpus} is "
                f"{self.gpus}. Leave one of them out."
            )

    @property
    def ranks(self) -> int | None:
        """The number of ranks; None if any would do."""
        return self.gpus or self.num_processes

    @property
    def run_settings(self) -> dict[str, Any]:
        """The settings of `TorchDistributor` for a run on a cluster."""
        names = ("hub_address", "hub_port", "rank_ports")
        return {name: getattr(self, name) for name in names}
