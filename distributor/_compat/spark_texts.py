"""How Spark's errors read: patterns for causes that Spark reports by no class or code.

The text of a failed job's exception contains the errors of its tasks, with Java and Python stacks.
"""

from __future__ import annotations

# The host of the task that failed.
LOST_TASK = r"Lost task \S+ in stage \S+ \(TID \d+\) \(([^\s)]+)"

# A barrier job has more tasks than the cluster has slots.
TOO_FEW_SLOTS = r"SPARK-24819|BARRIER_STAGE_NOT_ENOUGH_SLOTS"

FULL_DISK = r"([^\n]*No space left on device[^\n]*)"  # the line of an error about a full disk

# The file that an executor could not write.
NOT_WRITABLE = r"(?:FileSystemException: (\S+): Read-only file system|AccessDeniedException: (\S+))"

# The Python versions of a worker and the driver, which differ.
OTHER_PYTHON = r"worker has different version:? \(?(.*?)\)? than that in driver:? (\S+?),"

NO_MODULE = r"No module named '?([\w.]+)"  # a module that a Python worker does not have

# A package that PySpark needs in its Python workers and does not find.
NO_PACKAGE = r"(?:PACKAGE_NOT_INSTALLED\] |ImportError: )(\w+) >= \S+ must be installed"

NO_INTERPRETER = r'Cannot run program "([^"]+)"'  # the path at which there is no Python interpreter

# Why an executor was lost, in Spark's words, which may have several lines.
LOST_EXECUTOR = r"(ExecutorLostFailure .*?)(?=\n\s*(?:(?:Driver|JVM) stacktrace:|at \S+\()|\Z)"

# What Kubernetes reports of a pod that has ended.
CONTAINER_STATUSES = r"The API gave the following container statuses:.*"

POD_ENDED = r"termination reason: (\S+)"  # why the container of a pod has ended, among these

# A container was killed because its processes needed more memory than it has.
OUT_OF_MEMORY = r"exceeding \w+ memory limits|beyond the '\w+' memory limit|OOMKilled|container OOM"

# YARN took a container back for another application, or Spark decommissioned an executor, as when
# its pod is evicted.
RECLAIMED = r"\bwas preempted\b|\bExecutor decommission\b"

# A Python worker ended without an exception.
CRASHED_WORKER = r"(Python worker exited unexpectedly \(crashed\))"

# An executor that a standalone master starts, and its host.
EXECUTOR_ADDED = r"Executor added: (\S+) on \S+ \((.+):\d+\) with"

# An executor that ended by itself, and why, in the master's words.
EXECUTOR_ENDED = r"Executor updated: (\S+) is now (?:EXITED|FAILED) \((.*)\)"

# What follows a Python exception's message: an SQL state, an empty line or Java's stack.
END_OF_ERROR = r"\n(?:\s*SQLSTATE|\s*\n|\s+at )"

# A job whose application has ended, perhaps in a Connect server that still answers.
CONTEXT_STOPPED = r"stopped SparkContext|SparkContext was shut down"

# A Connect server's answer to all calls once its application has ended, and to others that it
# cannot handle.
SERVER_FAILED = r"Application error processing RPC"

# Spark has ended an application because too many of its executors failed.
TOO_MANY_EXECUTOR_FAILURES = r"Max number of executor failures"
