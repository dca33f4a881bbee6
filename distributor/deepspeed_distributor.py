"""`DeepspeedTorchDistributor`: PySpark's class for training with DeepSpeed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from distributor.core.spelling import Spelling, check_names
from distributor.programs import instead_of_keywords
from distributor.run_spec import Settings
from distributor.serialization.program import Argument, FileArgument, Program
from distributor.settings import check_bool, check_count, documented
from distributor.torch_distributor import TorchDistributor


@documented(Settings)
@dataclass(frozen=True, init=False, repr=False)
class DeepspeedTorchDistributor(TorchDistributor):
    """Runs a function or script that uses DeepSpeed on several ranks.

    A drop-in replacement for `pyspark.ml.deepspeed.deepspeed_distributor.DeepspeedTorchDistributor
    <https://spark.apache.org/docs/latest/api/python/reference/api/pyspark.ml.deepspeed.deepspeed_distributor.DeepspeedTorchDistributor.html>`_.
    It does what `TorchDistributor` does, under the names of DeepSpeed's launcher, and passes
    ``--deepspeed --deepspeed_config PATH`` on the command line of every rank, which functions
    find in ``sys.argv`` too: after ``deepspeed.add_config_arguments(parser)`` the result of
    ``parser.parse_args()`` is what ``deepspeed.initialize(args=...)`` expects. Only the ranks
    need DeepSpeed.

    Parameters
    ----------
    numGpus : int, default 1
        Number of ranks of each node, each with a GPU. With ``useGpu=False`` the number of ranks.
    nnodes : int, default 1
        Number of nodes: there are ``numGpus * nnodes`` ranks, in local mode too.
    localMode : bool, default True
        Whether ranks run on this machine: ``local_mode`` of `TorchDistributor`.
    useGpu : bool, default True
        Whether each rank has a GPU: ``use_gpu`` of `TorchDistributor`.
    deepspeedConfig : mapping or path, optional
        DeepSpeed's configuration, or the JSON file that contains it. A file is read on the driver
        at each run, and ``~`` is the driver's home. Each rank gets a file of its own with the same
        content, which is removed with the rank. Without it there is no ``--deepspeed_config``.
    **settings
        Settings of `TorchDistributor`, listed below.

    Other Parameters
    ----------------
    {settings}

    Raises
    ------
    TypeError, ValueError, OSError
        If a parameter is invalid. The message names the parameter and its value.
    FileNotFoundError
        If there is no configuration file of this name.
    RuntimeError
        If there are no GPUs or too few, or if distributed mode finds no active Spark session.

    Examples
    --------
    >>> def train():
    ...     import sys
    ...     return sys.argv[1:]
    >>> DeepspeedTorchDistributor(numGpus=2, useGpu=False).run(train)
    ['--deepspeed']
    """

    spelling = Spelling(
        "DeepspeedTorchDistributor",
        num_processes="numGpus * nnodes",
        run_here="pass localMode=True",
        run_on_cpus="pass useGpu=False",
        logger="DeepspeedTorchDistributor",
        ignore_ssl="deepspeed.spark.distributor.ignoreSsl",
        hides_gpus=False,
    )

    deepspeed_config: Any = None

    def __init__(
        self,
        numGpus: int = 1,
        nnodes: int = 1,
        localMode: bool = True,
        useGpu: bool = True,
        deepspeedConfig: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        own = ("numGpus", "nnodes", "localMode", "useGpu", "deepspeedConfig")
        known = (field.name for field in fields(Settings))
        check_names("DeepspeedTorchDistributor()", settings, {*own, *known})
        for name, count in (("numGpus", numGpus), ("nnodes", nnodes)):
            check_count(name, 1 if count is True else count)  # PySpark's class takes True as 1
        check_bool("localMode", localMode)
        check_bool("useGpu", useGpu)
        _config_arguments(deepspeedConfig)
        if settings.get("recovery", "restart") != "restart":
            raise ValueError(
                "recovery must be 'restart' with DeepSpeed, whose ranks each have a part of the "
                f"model's state, but is {settings['recovery']!r}."
            )
        object.__setattr__(self, "deepspeed_config", deepspeedConfig)
        super().__init__(numGpus * nnodes, local_mode=localMode, use_gpu=useGpu, **settings)

    @property
    def input_params(self) -> dict[str, Any]:
        """A new dict with the names and values that PySpark's class keeps in its own."""
        return {**super().input_params, "deepspeed_config": self.deepspeed_config}

    def _program_of(
        self, train_object: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Program:
        """Return what ranks run, with DeepSpeed's arguments last on its command line."""
        if kwargs and isinstance(train_object, (str, os.PathLike)):
            raise ValueError(
                "DeepspeedTorchDistributor with pytorch file doesn't support keyword arguments. "
                f"{instead_of_keywords(kwargs)}"
            )
        program = super()._program_of(train_object, args, kwargs)
        own = ("--deepspeed", *_config_arguments(self.deepspeed_config))
        return replace(program, args=(*program.args, *own))


def _config_arguments(config: Any) -> tuple[Argument, ...]:
    """Return the arguments that pass a configuration: none if there is none."""
    if config is None or config == "":
        return ()
    if isinstance(config, Mapping):
        try:
            content = json.dumps(dict(config))
        except (TypeError, ValueError) as error:
            raise TypeError(f"deepspeedConfig cannot be written as JSON: {error}.") from None
    elif isinstance(config, (str, os.PathLike)):
        content = _checked_content(Path(config).expanduser())
    else:
        raise TypeError(
            "deepspeedConfig must be a dict, the path of a JSON file or None, but is "
            f"{config!r} of type {type(config).__name__}."
        )
    return "--deepspeed_config", FileArgument("deepspeed_config.json", content)


def _checked_content(path: Path) -> str:
    if path.is_dir():
        raise IsADirectoryError(f"deepspeedConfig must be a JSON file, but {path} is a folder.")
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no file {path} for deepspeedConfig (looked in {Path.cwd()}). It is read on "
            "the driver, and its content is sent to the ranks."
        )
    try:
        content = path.read_text(encoding="utf-8")
        config = _parsed(content)
    except ValueError as error:
        raise ValueError(f"deepspeedConfig: {path} is not JSON: {error}.") from None
    if not isinstance(config, Mapping):
        raise ValueError(f"deepspeedConfig: {path} must contain a JSON object, as {{...}}.")
    return content


def _parsed(content: str) -> Any:
    """Parse JSON or, if the driver has its parser, the JSON with comments that DeepSpeed reads."""
    try:
        return json.loads(content)
    except ValueError:
        with contextlib.suppress(ImportError):
            import hjson

            with contextlib.suppress(ValueError):
                return hjson.loads(content)
        raise
