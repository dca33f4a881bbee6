"""Validation of checkpoints on the driver, one at a time, while the training continues."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from distributor.control.future import RunFuture
from distributor.core.rank_variables import CheckpointSettings
from distributor.core.spelling import Spelling
from distributor.errors import RunCancelled, RunTimeout
from distributor.programs import check_runs, program_of
from distributor.rank.messages import Reported
from distributor.screen.messages import notify, warn
from distributor.serialization.pickle_diagnostics import name_of
from distributor.settings import Listener, check_bool, check_timeout, instance_of, must_be
from distributor.spark.plan import GPUS_OF_NESTED_RUNS, driver_gpus
from distributor.spark.session import Session
from distributor.torch_distributor import TorchDistributor, plan
from distributor.train.config import UnsupportedParameter
from distributor.train.storage.checkpoint import Checkpoint, ReportedCheckpointStatus
from distributor.train.storage.checkpoint_manager import json_metrics, remove_surplus
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.files import Manifest, StoredValidation

SOON = 1.0
"""Seconds that the end of the training waits for validations without a message."""
_REMOTE_KWARGS = {"num_gpus": (0, 1), "max_retries": (0,)}
"""The values of options of a Ray task that can be honoured; None changes nothing."""
_OF_THE_TRAINING = ("listeners", "rank_ports", "timeout")
"""Settings of a training that do not apply to its validations."""


class ValidationFn(Protocol):
    """The type of a function that validates a checkpoint.

    Follows ``ray.train.ValidationFn``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.ValidationFn.html

    Examples
    --------
    >>> def validate(checkpoint: Checkpoint, batch_size: int = 32) -> dict[str, float]:
    ...     with checkpoint.as_directory() as folder:
    ...         return {"accuracy": 0.9}
    """

    def __call__(self, checkpoint: Checkpoint, **kwargs: Any) -> dict[str, Any]:
        """Return metrics of a checkpoint."""


@dataclass
class ValidationTaskConfig:
    """One validation, for `distributor.train.report`.

    Follows ``ray.train.ValidationTaskConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.ValidationTaskConfig.html

    Parameters
    ----------
    fn_kwargs : dict of str to object, optional
        Keyword arguments of the function, JSON-serializable; by default none.
    timeout_s : float, optional
        Seconds that the function may take; by default no limit.

    Raises
    ------
    TypeError
        If `fn_kwargs` is no dict, or not JSON-serializable, or `timeout_s` is no number.
    ValueError
        If `timeout_s` is not positive.

    Examples
    --------
    >>> ValidationTaskConfig({"batch_size": 64}, timeout_s=600)
    ValidationTaskConfig(fn_kwargs={'batch_size': 64}, timeout_s=600)
    """

    fn_kwargs: dict[str, Any] | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        self.fn_kwargs = {} if self.fn_kwargs is None else self.fn_kwargs
        self.check()

    def check(self) -> None:
        """Check all fields; raises what the class documents."""
        check_timeout("timeout_s", self.timeout_s)
        must_be("a dict", instance_of(dict), TypeError)("fn_kwargs", self.fn_kwargs)
        try:
            json.dumps(self.fn_kwargs)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"fn_kwargs must be JSON-serializable, but is {self.fn_kwargs!r}: {error}."
            ) from None


class ValidationConfig:
    """The validation of a run's checkpoints.

    Follows ``ray.train.ValidationConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.ValidationConfig.html

    Parameters
    ----------
    fn : ValidationFn
        The function. It takes a checkpoint and returns a dict of metrics, which join those that
        were reported with the checkpoint. It runs in a process of its own, and may start another
        training there.
    task_config : ValidationTaskConfig, optional
        Arguments and time limit, unless a report passes its own; by default none.
    ray_remote_kwargs : dict of str to object, optional
        With ``{"num_gpus": 1}`` the process has a GPU: the last one of this machine. ``num_cpus``
        and ``max_retries=0`` change nothing, and others are not supported.
    local_mode : bool, default True
        True: the process runs on this machine. False: it runs on an executor of the active Spark
        session, which needs a free slot beside those of the training. Not a parameter of Ray's
        class.

    Raises
    ------
    TypeError
        If `fn` is not a function or `task_config` is of another class.
    ValueError
        If a value is not supported.

    Examples
    --------
    >>> def validate(checkpoint, batch_size):
    ...     return {"accuracy": 0.9}
    >>> validation_config = ValidationConfig(
    ...     validate, ValidationTaskConfig({"batch_size": 64}, timeout_s=600)
    ... )
    """

    def __init__(
        self,
        fn: ValidationFn | Callable[..., dict[str, Any]],
        task_config: ValidationTaskConfig | None = None,
        ray_remote_kwargs: dict[str, Any] | None = None,
        *,
        local_mode: bool = True,
    ) -> None:
        self.fn = fn
        self.task_config = ValidationTaskConfig() if task_config is None else task_config
        self.ray_remote_kwargs = {} if ray_remote_kwargs is None else ray_remote_kwargs
        self.local_mode = local_mode
        self.check()

    def check(self) -> None:
        """Check all attributes; raises what the class documents."""
        must_be("a function", callable, TypeError)("ValidationConfig.fn", self.fn)
        check_runs(self.fn)
        is_task = instance_of(ValidationTaskConfig)
        must_be("a ValidationTaskConfig", is_task, TypeError)("task_config", self.task_config)
        self.task_config.check()
        check_bool("local_mode", self.local_mode)
        for name, value in self.ray_remote_kwargs.items():
            if name != "num_cpus" and value not in (None, *_REMOTE_KWARGS.get(name, ())):
                raise UnsupportedParameter(
                    f"ValidationConfig: {name} is {value!r} in ray_remote_kwargs, which is not "
                    "supported on Spark. A validation runs once, in one process with no GPU or "
                    "one: num_gpus may be 0 or 1."
                )

    @property
    def use_gpu(self) -> bool:
        """Whether the function's process has a GPU."""
        return self.ray_remote_kwargs.get("num_gpus") == 1

    def task(self, requested: Mapping[str, Any]) -> ValidationTaskConfig:
        """Return the validation that a report has requested; the default one if it is empty."""
        if not requested:
            return self.task_config
        kwargs = {**(self.task_config.fn_kwargs or {}), **requested["fn_kwargs"]}
        return ValidationTaskConfig(kwargs, requested["timeout_s"])


class ValidationDistributor(TorchDistributor):
    """Runs validations, which have no MLflow runs of their own."""

    is_tracked: ClassVar[bool] = False
    spelling = Spelling(
        "ValidationConfig",
        run_here="leave out local_mode=False",
        run_on_cpus="leave num_gpus out of ray_remote_kwargs",
    )


def validation_distributor(
    config: ValidationConfig, settings: Mapping[str, Any], gpu_type: str | None
) -> TorchDistributor:
    """Return the distributor for the validations of a training with these settings.

    Raises RuntimeError if they cannot run there: there is no GPU, or no active Spark session.
    """
    shared = {name: each for name, each in settings.items() if name not in _OF_THE_TRAINING}
    env = {**_gpu_variables(config), **shared.pop("env", {})}
    if not isinstance(shown := shared.get("show_output", "all"), str):
        shared["show_output"] = [rank for rank in shown if rank == 0]  # a validation has no other
    return ValidationDistributor(
        1,
        local_mode=config.local_mode,
        use_gpu=config.use_gpu,
        gpu_type=gpu_type if config.use_gpu else None,
        env=env,
        rank_ports=None,  # the training may use all of them
        **shared,
    )


def _gpu_variables(config: ValidationConfig) -> dict[str, str]:
    """Return the variables that select GPUs: from the last one on, the training uses the first."""
    gpus = driver_gpus(Session.active()) if config.local_mode else ()
    if not gpus:
        return {}
    own = {"CUDA_VISIBLE_DEVICES": gpus[-1]} if config.use_gpu else {}
    return {GPUS_OF_NESTED_RUNS: ",".join(reversed(gpus)), **own}


@dataclass(frozen=True)
class ValidationCall:
    """The program of a validation: the user's function of a checkpoint, which returns metrics."""

    func: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return name_of(self.func)

    def __call__(self, checkpoint: Checkpoint, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        metrics = self.func(checkpoint, **kwargs)
        if not isinstance(metrics, dict):
            raise TypeError(
                f"{name_of(self.func)} validates a checkpoint, and so must return a dict of "
                f"metrics, but has returned {metrics!r}."
            )
        return json_metrics(metrics)


@dataclass(eq=False)
class ValidationQueue(Listener):
    """Validates checkpoints in the order of their reports; a context manager around a training.

    Each validation is a run with one rank, which can be ended at its time limit, and leaves nothing
    behind. What is still to be done is in storage: the manifest of a checkpoint says that it is to
    be validated, until the result is written beside it. So the next run of the same name continues
    if this process is killed.
    """

    config: ValidationConfig
    storage: Storage
    settings: CheckpointSettings
    distributor: TorchDistributor

    def __post_init__(self) -> None:
        self._names: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._current: RunFuture[dict[str, Any]] | None = None

    def reported(self, report: Reported) -> None:
        if report.checkpoint is not None:
            self._names.put(report.checkpoint.rpartition("/")[2])

    def __enter__(self) -> ValidationQueue:
        program_of(ValidationCall(self.config.fn), (None, {}), {})  # raises before the training
        launcher = plan(self.distributor, 1, 1).launcher
        self._thread = launcher.thread(self._run)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the validations, also if the training has failed; cancel them if it was."""
        if isinstance(error, RunCancelled) or not isinstance(error, (Exception, type(None))):
            self._cancel()  # for example, a KeyboardInterrupt
        self._names.put(None)
        try:
            self._thread.join(SOON)
            if self._thread.is_alive() and not self._is_cancelled:
                how = "ended"
                if error is not None:
                    cause = error.__cause__ or error
                    summary, _, _ = f"{type(cause).__name__}: {cause}".partition("\n")
                    how = f"failed ({summary})"
                notify(f"The training has {how}. Waiting for the validation of its checkpoints.")
            self._thread.join()
        except BaseException:
            self._cancel()
            raise
        if not self._is_cancelled:
            for failure in remove_surplus(self.storage, self.settings):
                warn(failure)

    def _cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            current = self._current
        if current is not None:
            current.cancel()

    def _run(self) -> None:
        self._validate_all()  # of a run of this name whose driver was killed
        for name in iter(self._names.get, None):
            self._validate([name])
        self._validate_all()  # a checkpoint may exist although its report has been lost

    def _validate_all(self) -> None:
        try:
            names = [name for name, _ in self.storage.committed()]
        except Exception as error:
            warn(f"The checkpoints that are to be validated cannot be listed: {error!r}.")
        else:
            self._validate(names)

    def _validate(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                manifest = self.storage.manifest_of(name)
                if manifest is not None and manifest.is_pending:
                    result = self._result_of(name, manifest)
                    if result is not None:
                        self.storage.add_validation(name, result)
            except Exception as error:
                warn(f"The validation of {name} is left to the next run of this name: {error!r}.")

    def _result_of(self, name: str, manifest: Manifest) -> StoredValidation | None:
        """Validate a checkpoint; return None if that is cancelled."""
        task = self.config.task(manifest.validation or {})
        metrics: dict[str, Any] = {}
        try:
            with self._lock:
                if self._is_cancelled:
                    return None
                distributor = replace(self.distributor, timeout=task.timeout_s)
                call, checkpoint = ValidationCall(self.config.fn), self.storage.checkpoint(name)
                running = distributor.submit(call, checkpoint, task.fn_kwargs or {})
                self._current = running
            metrics = running.result()
        except Exception as error:
            if self._is_cancelled:
                return None
            failures = getattr(error, "rank_failures", {})
            status, how = ReportedCheckpointStatus.VALIDATION_FAILED, "failed"
            # A run that the function itself started may have raised RunTimeout, too.
            if isinstance(error, RunTimeout) and not failures:
                status = ReportedCheckpointStatus.VALIDATION_TIMEOUT
                how = f"took longer than timeout_s, {task.timeout_s:g} s"
            tracebacks = "\n".join(failure.text.rstrip() for failure in failures.values())
            text = tracebacks or f"{type(error).__name__}: {error}"
            warn(f"The validation of {name} {how}, so it adds no metrics. {text}")
        else:
            status = ReportedCheckpointStatus.VALIDATED
            notify(f"Validated {name}: {metrics}")
        return StoredValidation(index=manifest.index, status=status.name, metrics=metrics)
