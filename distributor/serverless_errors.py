"""The errors of Databricks' ``serverless_gpu`` and ``databricks.air``.

Those that are raised here are also what this package raises for the same cause elsewhere, so that
handlers for either work. The classes follow https://pypi.org/project/databricks-sdk-air.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from distributor.errors import RunTimeout, UnpicklableError

__all__ = [
    "APIError",
    "CredentialError",
    "CurlDownloadTimeoutError",
    "EnvironmentDownloadError",
    "EnvironmentUploadError",
    "GPUTypeError",
    "GPUValidationError",
    "LocalExecutionTimeoutError",
    "MissingEnvironmentError",
    "NotebookGPULimitExceededError",
    "OutputCollectionError",
    "RayConnectionError",
    "RayInitializationError",
    "RuntimeConfigurationError",
    "SerializationError",
    "ServerlessGpuCustomerError",
    "ServerlessGpuException",
    "ServerlessGpuInternalError",
    "WorkloadCreationError",
    "WorkloadFailureException",
    "WorkloadRateLimitExceededError",
    "WorkloadTerminationError",
    "WorkspaceFileError",
]


class ServerlessGpuException(Exception):
    """Base class of these errors."""


class ServerlessGpuCustomerError(ServerlessGpuException):
    """Base class of errors in what the user has passed."""


class ServerlessGpuInternalError(ServerlessGpuException):
    """Base class of errors of Databricks' service, which this package has no use for."""


class GPUValidationError(ServerlessGpuCustomerError, ValueError, TypeError, RuntimeError):
    """The number of accelerators is invalid, or this machine does not have so many."""


class GPUTypeError(ServerlessGpuCustomerError, ValueError, TypeError, RuntimeError):
    """The type of accelerator is unknown, or not that of this machine."""


class RuntimeConfigurationError(ServerlessGpuCustomerError, ValueError, TypeError):
    """An argument of a decorator is invalid, or contradicts another one."""


class SerializationError(ServerlessGpuCustomerError, UnpicklableError):
    """The function, an argument or a returned value cannot be pickled."""


class LocalExecutionTimeoutError(ServerlessGpuCustomerError, RunTimeout):
    """The run took longer than ``timeout`` seconds, on this machine or on a cluster."""


class WorkloadRateLimitExceededError(ServerlessGpuCustomerError):
    """Never raised here: Spark queues jobs that find no free slots."""


class NotebookGPULimitExceededError(ServerlessGpuCustomerError):
    """Never raised here: a notebook may use all GPUs of its cluster."""


class WorkspaceFileError(ServerlessGpuCustomerError):
    """Never raised here: there is no workspace."""


class WorkloadCreationError(ServerlessGpuInternalError):
    """Never raised here."""


class WorkloadFailureException(ServerlessGpuInternalError):
    """Never raised here: the failed rank's own exception is raised, also for remote runs."""


class WorkloadTerminationError(ServerlessGpuInternalError):
    """Never raised here."""


class OutputCollectionError(ServerlessGpuInternalError):
    """Never raised here."""


class RayInitializationError(ServerlessGpuInternalError):
    """Never raised here."""


class RayConnectionError(ServerlessGpuInternalError):
    """Never raised here."""


class EnvironmentUploadError(ServerlessGpuInternalError):
    """Never raised here."""


class EnvironmentDownloadError(ServerlessGpuInternalError):
    """Never raised here."""


class CurlDownloadTimeoutError(EnvironmentDownloadError):
    """Never raised here."""


class MissingEnvironmentError(ServerlessGpuInternalError):
    """Never raised here."""


class CredentialError(ServerlessGpuInternalError):
    """Never raised here."""


class APIError(ServerlessGpuInternalError):
    """Never raised here."""


IN_PLACE: Mapping[type[BaseException], type[Exception]] = {
    RunTimeout: LocalExecutionTimeoutError,
    UnpicklableError: SerializationError,
}
"""What decorators raise in place of errors of this package."""


@contextlib.contextmanager
def raised_as(kind: type[ServerlessGpuException]) -> Iterator[None]:
    """Raise errors of the block that `kind` includes as errors of this class."""
    try:
        yield
    except Exception as error:
        if not issubclass(kind, type(error)):
            raise
        raise kind(*error.args).with_traceback(error.__traceback__) from error.__cause__
