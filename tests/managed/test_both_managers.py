"""What runs promise, on YARN and on Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.managed import Failed, ManagedSession, Manager, manager, why_missing

pytestmark = [pytest.mark.slow, pytest.mark.spark]


@pytest.fixture(scope="module", params=["yarn", "kubernetes"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Manager:
    if why := why_missing(request.param):
        pytest.skip(why)
    return manager(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def session(cluster: Manager) -> Iterator[ManagedSession]:
    with cluster.session() as session:
        yield session


def test_values_and_output(session: ManagedSession) -> None:
    result = session.run("""
        def train(factor):
            import os
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            total = torch.ones(()) * (dist.get_rank() + 1)
            dist.all_reduce(total)
            return [dist.get_rank(), factor * total.item()]

        result = ranks(2).run_all(train, 2)
    """)
    assert result == [[0, 6], [1, 6]]


def test_a_later_run_has_the_same_warm_processes(session: ManagedSession) -> None:
    first, second = session.run("""
        def zygote():
            import psutil
            return psutil.Process().parent().ppid()

        result = [sorted(ranks(2).run_all(zygote)) for _ in range(2)]
    """)
    assert first == second


def test_large_arguments_and_values(session: ManagedSession) -> None:
    result = session.run("""
        import torch

        def train(weights):
            return weights + 1

        weights = torch.arange(5_000_000)
        result = bool((ranks(2).run(train, weights) == weights + 1).all())
    """)
    assert result is True


def test_the_error_of_a_rank(session: ManagedSession) -> None:
    with pytest.raises(Failed, match="ValueError: on purpose"):
        session.run("""
            def train():
                raise ValueError("on purpose")

            ranks(2).run(train)
        """)


def test_a_killed_rank(session: ManagedSession) -> None:
    with pytest.raises(Failed, match=r"WorkerDied: .*SIGKILL"):
        session.run("""
            def train():
                import os, signal, threading
                if os.environ["RANK"] == "1":
                    os.kill(os.getpid(), signal.SIGKILL)
                threading.Event().wait()

            ranks(2).run(train)
        """)


def test_a_killed_executor_is_replaced(session: ManagedSession) -> None:
    result = session.run("""
        def train():
            import os, threading
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                if os.environ["RANK"] == "1":
                    executor_of_rank().kill()
                threading.Event().wait()
            return int(os.environ["TORCHELASTIC_RESTART_COUNT"])

        result = ranks(2, max_failures=1).run(train)
    """)
    assert result == 1


def test_a_container_without_memory_says_so(session: ManagedSession) -> None:
    with pytest.raises(Failed) as caught:
        session.run("""
            def train():
                import os, threading
                kept = []
                while os.environ["RANK"] == "0" and len(kept) < 60:  # 3 GB: more than it has
                    kept.append(bytearray(b"x" * 50_000_000))
                threading.Event().wait()

            ranks(2).run(train)
        """)
    # A pod's kernel may end the rank alone.
    assert caught.value.kind in ("NodeLost", "WorkerDied"), caught.value
    assert "spark.executor.memoryOverhead" in caught.value.message


def test_more_ranks_than_slots_are_refused_at_once(session: ManagedSession) -> None:
    with pytest.raises(Failed, match="never have room for more than 2") as caught:
        session.run("ranks(3).run(print)")
    assert "spark.cores.max" not in caught.value.message
    assert caught.value.seconds < 30


def test_doctor_knows_what_ends_an_application(session: ManagedSession) -> None:
    statuses = session.run("""
        import distributor
        report = distributor.doctor(2, local_mode=False)
        result = {check.name: check.status.value for check in report.checks}
    """)
    assert statuses["executor failures"] == "warning"
    assert statuses["all-reduce"] == "ok", statuses
    assert "failure" not in statuses.values(), statuses
