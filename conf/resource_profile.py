"""Tasks with one GPU each on executors that have several, beside training that uses all of them.

Omit ``spark.task.resource.gpu.amount`` and ``spark.task.cpus`` from the session's properties:
queries then run on all cores, and each run of distributor requests its GPUs for its own job. Other
jobs that need GPUs, such as scoring, request them by a profile::

    scores = frame.mapInArrow(score, "score double", profile=task_profile(gpus=1, cpus=8))

This needs PySpark 4.
"""

from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests


def task_profile(*, gpus: float = 0, cpus: int = 1) -> ResourceProfile:
    """Return a profile for the tasks of one job, on the executors that the session has."""
    requests = TaskResourceRequests().cpus(cpus)
    if gpus:
        requests = requests.resource("gpu", gpus)
    return ResourceProfileBuilder().require(requests).build
