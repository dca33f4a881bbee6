"""What ranks return, raise, print and leave behind, and what the driver makes of it.

Over both launchers. What the ranks run stands in this module and travels by value, as the code of a
notebook does: no rank can import this file.
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import collections
import contextlib
import ctypes
import enum
import faulthandler
import inspect
import json
import linecache
import logging
import math
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from distributor import (
    DistributorError,
    RemoteError,
    RunTimeout,
    TorchDistributor,
    UnpicklableError,
    WorkerDied,
)
from distributor.launch.job import Job, program_of
from distributor.node.agent import failure_grace
from distributor.serialization.outcome import Failure
from distributor.wire.protocol import MAX_FRAME

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Distribute = Callable[..., TorchDistributor]
DEADLINE = 90.0
"""Seconds after which a rank that waits for another gives up, and the test fails."""
MIB = 2**20
on_cluster = pytest.mark.spark


def my_rank() -> int:
    return int(os.environ["RANK"])


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Poll until something holds; it is an error if it never does."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {DEADLINE:g} s until {what}")
        time.sleep(0.01)


def failures_of(error: BaseException) -> dict[int, Failure]:
    failures = vars(error)["rank_failures"]
    assert isinstance(failures, dict)
    return failures


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# Values


@dataclass
class Metrics:
    loss: float
    history: list[float]


class Phase(enum.Enum):
    WARM_UP = 1
    STEADY = 2


Point = collections.namedtuple("Point", "x y")


def make_large_tensors() -> dict[str, Any]:
    import torch

    return {f"layer{i}": torch.arange(5 * MIB, dtype=torch.float32) * (i + 1) for i in range(5)}


def make_odd_tensors() -> dict[str, Any]:
    import torch

    return {
        "bfloat16": torch.arange(4, dtype=torch.bfloat16),
        "complex": torch.tensor([1 + 2j]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def make_module() -> Any:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)
            self.register_buffer("scale", torch.tensor([2.0]))

        def forward(self, inputs: Any) -> Any:
            return self.linear(inputs) * self.scale

    torch.manual_seed(11)
    return Net().eval()


CUDA_LIKE_BYTES = 13 * 4
"""Only storages of this size are tagged as a GPU's; all tensors of a run meet the same tagger."""


def tag_as_cuda() -> None:
    """Have this process pickle some tensors as if they were on a GPU."""
    import torch

    def tag(storage: Any) -> str | None:
        return "cuda:0" if storage.nbytes() == CUDA_LIKE_BYTES else None

    torch.serialization.register_package(0, tag, lambda storage, location: None)


def make_cuda_like() -> tuple[Any, bytes]:
    """Give a tensor that is tagged as a GPU's, and its plain pickle."""
    import torch

    tensor = torch.arange(13, dtype=torch.float32)
    return tensor, pickle.dumps(tensor)


def make_closure() -> Callable[[int], int]:
    offset = 40
    return lambda number: number + offset


def make_failing_value() -> Exception:
    return KeyError("returned, not raised", 3)


def same_tensors(value: Any, made: Any) -> None:
    import torch

    assert list(value) == list(made)
    for name, tensor in made.items():
        assert torch.equal(value[name], tensor), name
        assert (value[name].dtype, type(value[name])) == (tensor.dtype, type(tensor)), name
        assert value[name].requires_grad == tensor.requires_grad, name


def same_arrays(value: Any, made: Any) -> None:
    import numpy as np

    assert list(value) == list(made)
    for name, array in made.items():
        assert value[name].dtype == array.dtype, name
        assert np.array_equal(value[name], array), name


def same_outputs(value: Any, made: Any) -> None:
    import torch

    inputs = torch.ones(4, 3)
    assert isinstance(value, torch.nn.Module)
    assert torch.equal(value(inputs), made(inputs))
    assert list(value.state_dict()) == ["scale", "linear.weight", "linear.bias"]
    assert not value.training


def now_on_cpu(value: Any, made: Any) -> None:
    import torch

    tensor, pickled = value
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):  # so it is tagged as the GPU's
            pickle.loads(pickled)
    assert tensor.device.type == "cpu"
    assert tensor.tolist() == list(range(13))


def same_object(value: Any, made: Any) -> None:
    assert value is made


def same_error(value: Any, made: Any) -> None:
    assert type(value) is type(made)
    assert value.args == made.args


def same_function(value: Any, made: Any) -> None:
    assert isinstance(value, types.FunctionType)
    assert value(2) == made(2) == 42


def equal(value: Any, made: Any) -> None:
    assert type(value) is type(made)
    assert value == made


def make_arrays() -> dict[str, Any]:
    import numpy as np

    return {
        "plain": np.arange(1_000_000, dtype=np.float64).reshape(1000, 1000),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "structured": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
        "strings": np.array(["a", "bc"]),
    }


def make_nested() -> dict[Any, Any]:
    rows = [{"step": i, "loss": 1 / (i + 1), "tags": ("a", {i, i + 1})} for i in range(50_000)]
    return {"rows": rows, "deep": [[[[[["bottom"]]]]]], 3: {None: frozenset({b"x"})}}


Same = Callable[[Any, Any], None]
VALUES: dict[str, tuple[Callable[[], Any], Same]] = {
    "none": (lambda: None, same_object),
    "true": (lambda: True, same_object),
    "int": (lambda: -(7**300), equal),
    "float": (lambda: 0.1 + 0.2, equal),
    "infinity": (lambda: -math.inf, equal),
    "complex": (lambda: 1 - 2j, equal),
    "str": (lambda: "naïve 日本 🚀 \ud800\0", equal),
    "bytes": (lambda: bytes(range(256)) * 20_000, equal),
    "nested": (make_nested, equal),
    "generated_list": (lambda: [i * i for i in (j for j in range(1000))], equal),
    "arrays": (make_arrays, same_arrays),
    "large_tensors": (make_large_tensors, same_tensors),
    "odd_tensors": (make_odd_tensors, same_tensors),
    "cuda_like_tensor": (make_cuda_like, now_on_cpu),
    "module": (make_module, same_outputs),
    "own_instance": (lambda: Metrics(0.5, [1.0, 0.5]), equal),
    "own_class": (lambda: Metrics, same_object),
    "own_enum": (lambda: Phase.STEADY, same_object),
    "namedtuple": (lambda: Point(1, y=[2]), equal),
    "closure": (make_closure, same_function),
    "lambda": (lambda: lambda number: number * 21, same_function),
    "exception": (make_failing_value, same_error),
}


@pytest.fixture(scope="module", params=["local", pytest.param("cluster", marks=on_cluster)])
def returned(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every kind of value, all returned by rank 0 of one run."""
    if request.param == "cluster":
        request.getfixturevalue("spark")
    makers = {name: make for name, (make, _) in VALUES.items()}

    def program() -> Any:
        if my_rank() == 1:
            return "rank 1's"
        tag_as_cuda()
        return {name: make() for name, make in makers.items()}

    distributor = TorchDistributor(
        2, local_mode=request.param == "local", use_gpu=False, timeout=180
    )
    return distributor.run(program)


@pytest.mark.parametrize("kind", VALUES)
def test_value_arrives_whole(returned: dict[str, Any], kind: str) -> None:
    make, same = VALUES[kind]
    same(returned[kind], make())


def test_class_of_the_calling_function_is_the_same_here_and_there(distribute: Distribute) -> None:
    class Model:
        def __init__(self, weight: int) -> None:
            self.weight = weight

    def train(start: Model) -> Model:
        assert isinstance(start, Model)
        return Model(start.weight + 1)

    trained = distribute(1).run(train, Model(41))
    assert type(trained) is Model
    assert trained.weight == 42


@pytest.mark.parametrize(
    ("distribute", "order"),
    [
        ("local", (2, 1, 0)),
        ("local", (0, 2, 1)),
        pytest.param("cluster", (1, 2, 0), marks=on_cluster),
    ],
    indirect=["distribute"],
    ids=str,
)
def test_run_all_gives_each_ranks_value_whatever_the_order_of_their_ends(
    distribute: Distribute, tmp_path: Path, order: tuple[int, ...]
) -> None:
    def end_in_order() -> tuple[int, int]:
        rank = my_rank()
        place = order.index(rank)
        if place:
            before = tmp_path / f"rank{order[place - 1]}"
            wait_until(before.exists, f"{before.name} ends")
            pid = int(before.read_text())
            if before.name != "rank0":  # which stays, to serve the others
                wait_until(lambda: not is_alive(pid), f"{before.name} is gone")
        aside = tmp_path / f"aside{rank}"
        aside.write_text(str(os.getpid()))
        aside.rename(tmp_path / f"rank{rank}")
        return rank, place

    values = distribute(3).run_all(end_in_order)
    assert values == [(rank, order.index(rank)) for rank in range(3)]


def test_leaving_with_code_0_is_success_and_gives_none(distribute: Distribute) -> None:
    def leave() -> str:
        if my_rank() == 2:
            return "stayed"
        sys.exit(0 if my_rank() == 0 else None)

    assert distribute(3).run_all(leave) == [None, None, "stayed"]


def test_large_arguments_travel_once_and_are_each_ranks_own(
    distribute: Distribute, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch

    weights = torch.arange(2.0 * MIB)

    def program(given: dict[str, Any], *, sign: int) -> float:
        given["weights"] *= sign * (my_rank() + 1)
        return float(given["weights"][-1])

    last = 2.0 * MIB - 1
    distributor = distribute(2)
    for sign in (1, 1, -1):
        found = distributor.run_all(program, {"weights": weights, "small": 1}, sign=sign)
        assert found == [sign * last, sign * 2 * last]
    assert weights[-1] == last, "the driver's own is as it was"
    told = capfd.readouterr().err
    if distributor.local_mode:
        assert "'program' takes" not in told
        return
    named = "'program' takes 8.39 MB to the ranks, 8.39 MB of it in argument 0['weights']."
    assert told.count(named) == 3
    spark = request.getfixturevalue("spark")
    files = [name for name in spark.sparkContext.listFiles if "distributor-program" in name]
    assert len(files) == 2, "one for each sign"


def test_value_that_nobody_asked_for_need_not_be_picklable(distribute: Distribute) -> None:
    def locks() -> object:
        return "fine" if my_rank() == 0 else threading.Lock()

    assert distribute(2).run(locks) == "fine"


def test_value_whose_module_the_driver_lacks_names_it(
    distribute: Distribute, tmp_path: Path
) -> None:
    (tmp_path / "only_in_ranks.py").write_text("class Result:\n    pass\n")

    def make() -> object:
        sys.path.insert(0, str(tmp_path))
        return __import__("only_in_ranks").Result()

    with pytest.raises(DistributorError, match=r"Rank 0 .* cannot be loaded here.*only_in_ranks"):
        distribute(1).run(make)


# Failures. The line of each function that fails says "fails": it has to be seen in the traceback.


class Tagged(Exception):
    pass


class Diverged(Exception):
    """Pickles badly: its constructor does not take what it keeps as arguments."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"diverged at step {step}")
        self.step = step
        self.loss = loss


class Doubled(Exception):
    """Pickles worse: each reconstruction changes it, and nothing complains."""

    def __init__(self, what: str) -> None:
        super().__init__(f"twice {what}")


@dataclass(frozen=True)
class Halted(Exception):
    step: int
    reason: str


class Opaque:
    """What it looks like tells where it lies in memory."""


def key_error() -> None:
    raise KeyError("x", 3)  # fails


def own_type() -> None:
    error = Tagged("tagged\nin two lines")
    vars(error).update(step=7, metrics=Metrics(0.5, []))
    raise error  # fails


def two_arguments() -> None:
    raise Diverged(3, math.inf)  # fails


def doubled() -> None:
    raise Doubled("ouch")  # fails


def frozen() -> None:
    raise Halted(4, "no progress")  # fails


def with_a_lock() -> None:
    error = ValueError("locked", 1)
    vars(error).update(lock=threading.Lock(), step=5)
    raise error  # fails


def opaque_argument() -> None:
    raise ValueError("opaque", Opaque())  # fails


def chained() -> None:
    try:
        json.loads("{}")["missing"]  # fails first
    except KeyError as error:
        raise ValueError("chained") from error  # fails


def without_streams() -> None:
    sys.stdout.close()
    sys.stderr.close()
    raise ValueError("not to be printed")  # fails


def module_of_the_rank_only() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "rank_only.py").write_text("class Broken(Exception):\n    pass\n")
        sys.path.insert(0, folder)
        broken = __import__("rank_only").Broken
        raise broken("all of its text", 12)  # fails


def keyboard_interrupt() -> None:
    raise KeyboardInterrupt("in the rank")  # fails


def cancelled() -> None:
    raise asyncio.CancelledError  # fails


def endless_recursion() -> None:
    endless_recursion()  # fails


def exception_group() -> None:
    group = vars(builtins)["ExceptionGroup"]
    raise group("several", [KeyError("a"), ValueError("b", 2)])  # fails


def long_message() -> None:
    raise ValueError("m" * MIB, "end")  # fails


def unpicklable_value() -> object:
    return {"fine": 1, "a": [threading.Lock()]}


def exit_3() -> None:
    print("about to leave")
    sys.exit(3)


def exit_with_text() -> None:
    sys.exit("no data found")


def hard_exit() -> None:
    print("about to leave")
    sys.stdout.flush()
    os._exit(5)


def killed() -> None:
    print("about to be killed")
    os.kill(os.getpid(), signal.SIGKILL)


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def segmentation_fault() -> None:
    ctypes.string_at(0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a rank fails, and what the driver then raises."""

    fail: Callable[[], object]
    kind: type[BaseException]
    args: tuple[object, ...] | None = None
    attributes: Mapping[str, object] | None = None
    says: tuple[str, ...] = ()
    """What the error's text or its remote traceback contains, besides the line that failed."""

    @property
    def lines(self) -> list[str]:
        """The source lines that a traceback of the failure shows."""
        source = inspect.getsource(self.fail).splitlines()
        return [line.strip() for line in source if "# fails" in line]


def died(fail: Callable[[], object], *says: str, **how: int) -> Case:
    attributes = {"exit_code": None, "signal": None, **how}
    return Case(fail=fail, kind=WorkerDied, attributes=attributes, says=says)


OUT_OF_MEMORY = "out-of-memory killer"
CASES = [
    Case(fail=key_error, kind=KeyError, args=("x", 3)),
    Case(
        fail=own_type,
        kind=Tagged,
        args=("tagged\nin two lines",),
        attributes={"step": 7, "metrics": Metrics(0.5, [])},
    ),
    Case(
        fail=two_arguments,
        kind=Diverged,
        args=("diverged at step 3",),
        attributes={"step": 3, "loss": math.inf},
    ),
    Case(fail=doubled, kind=Doubled, args=("twice ouch",)),
    Case(
        fail=frozen,
        kind=Halted,
        args=(4, "no progress"),
        attributes={"step": 4, "reason": "no progress"},
    ),
    Case(fail=with_a_lock, kind=ValueError, args=("locked", 1), attributes={"step": 5}),
    Case(fail=opaque_argument, kind=ValueError, says=("ValueError: ('opaque', <",)),
    Case(
        fail=chained,
        kind=ValueError,
        args=("chained",),
        says=("KeyError: 'missing'", "direct cause of the following exception"),
    ),
    Case(fail=without_streams, kind=ValueError, args=("not to be printed",)),
    Case(
        fail=module_of_the_rank_only,
        kind=RemoteError,
        says=("rank_only.Broken: ('all of its text', 12)",),
    ),
    Case(fail=keyboard_interrupt, kind=RemoteError, says=("KeyboardInterrupt: in the rank",)),
    Case(fail=cancelled, kind=RemoteError, says=("CancelledError",)),
    Case(fail=endless_recursion, kind=RecursionError, says=("Previous line repeated",)),
    Case(fail=long_message, kind=ValueError, args=("m" * MIB, "end")),
    Case(
        fail=unpicklable_value,
        kind=UnpicklableError,
        says=("returned a value that cannot be pickled: value['a'][0] is a lock",),
    ),
    died(exit_3, "exited with code 3", "about to leave", exit_code=3),
    died(exit_with_text, "no data found", exit_code=1),
    died(hard_exit, "exited with code 5", "about to leave", exit_code=5),
    died(killed, "SIGKILL", OUT_OF_MEMORY, "about to be killed", signal=9),
    died(terminated, "SIGTERM", signal=15),
    died(
        segmentation_fault,
        "SIGSEGV",
        "Fatal Python error: Segmentation fault",
        "in segmentation_fault",
        signal=11,
    ),
]
if sys.version_info >= (3, 11):
    CASES.append(
        Case(
            fail=exception_group,
            kind=vars(builtins)["ExceptionGroup"],
            says=("several (2 sub-exceptions)", "KeyError: 'a'", "ValueError: ('b', 2)"),
        )
    )

PLACES: dict[str, tuple[int, ...]] = {"first": (0,), "last": (1,), "all": (0, 1)}


def failing_runs() -> Iterator[Any]:
    """Each case at each place of a local run, and in turn at one place of a cluster's."""
    for number, case in enumerate(CASES):
        name = case.fail.__name__
        for place in PLACES:
            yield pytest.param("local", place, case, id=f"local-{place}-{name}")
        place = list(PLACES)[number % len(PLACES)]
        yield pytest.param("cluster", place, case, id=f"cluster-{place}-{name}", marks=on_cluster)


@pytest.mark.parametrize(
    ("distribute", "place", "case"), [*failing_runs()], indirect=["distribute"]
)
def test_failure_is_raised_here_as_it_was_there(
    distribute: Distribute,
    place: str,
    case: Case,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail, failing = case.fail, PLACES[place]
    if place == "all":  # on a busy machine the second may fail well after the first
        monkeypatch.setattr(failure_grace, "CAUSE_SECONDS", 20.0)

    def program() -> object:
        if my_rank() in failing:
            (tmp_path / str(my_rank())).touch()
            wait_until(lambda: len(list(tmp_path.iterdir())) == len(failing), "all are here")
            return fail()
        if my_rank() == 0:
            return "done"  # it stays, to serve the others
        wait_until(lambda: False, "another rank's failure stops this one")
        return "never"

    distributor = distribute(2)
    with pytest.raises(case.kind) as caught:
        distributor.run_all(program)

    error = caught.value
    assert type(error) is case.kind
    check_error(error, case)
    failures = failures_of(error)
    assert sorted(failures) == list(failing)
    first = next(iter(failures))
    check_told(error, case, first, failures[first].origin.host, distributor.local_mode)
    also = vars(error)["__notes__"][-1].partition("\n")[2]
    assert also == "\n".join(
        f"Also failed: rank {rank}: {failures[rank].summary}" for rank in list(failures)[1:]
    )
    for rank, failure in failures.items():
        assert failure.origin.rank == rank
        assert not failure.collateral
        if case.kind is not RemoteError:
            assert failure.summary.partition(":")[0].endswith(case.kind.__name__)
        assert type(failure.exception()) is case.kind
        assert all(line in failure.text for line in case.lines)


def test_message_larger_than_any_frame_is_cut_in_its_middle(distribute: Distribute) -> None:
    def program() -> None:
        raise ValueError("begin" + "m" * MAX_FRAME + "end")  # in the traceback

    with pytest.raises(RemoteError, match="ValueError: beginmmm") as caught:
        distribute(1).run(program)
    told = str(caught.value)
    assert "# in the traceback" in told
    assert told.rstrip().endswith("mmmend")
    assert len(told) < MAX_FRAME


def check_error(error: Any, case: Case) -> None:
    if case.args is not None:
        assert error.args == case.args
    for name, expected in (case.attributes or {}).items():
        assert getattr(error, name) == expected, name
    if case.fail is opaque_argument:
        assert [type(arg) for arg in error.args] == [str, Opaque]
    if case.fail is exception_group:
        parts = error.exceptions
        assert [(type(part), part.args) for part in parts] == [
            (KeyError, ("a",)),
            (ValueError, ("b", 2)),
        ]


def check_told(error: BaseException, case: Case, rank: int, host: str, local_mode: bool) -> None:
    """See that the error tells where it comes from: the remote frame, the rank and its host."""
    told = str(error) if case.kind is WorkerDied else str(error.__cause__)
    if case.kind in (RemoteError, UnpicklableError):
        assert all(text in str(error) for text in case.says)
    for text in (*case.says, *case.lines):
        assert text in told
    local_rank = rank if local_mode else 0
    origin = f"rank {rank} (local rank {local_rank}) on {host}, attempt 0"
    assert origin in told
    assert vars(error)["__notes__"][-1].startswith(f"Raised by {origin}.")
    if case.kind is RemoteError:
        assert origin in str(error)
    assert host == socket.gethostname() if local_mode else is_this_machine(host)


def is_this_machine(host: str) -> bool:
    """Tell whether this machine can listen at that address."""
    socket.create_server((host, 0)).close()
    return True


def test_functions_of_a_notebook_show_their_source(
    distribute: Distribute, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = {
        "<ipython-input-1>": "def scale(by):\n    return 1 / (by - by)  # deep in the notebook\n",
        "/tmp/ipykernel_0/1.py": textwrap.dedent(
            """
            import inspect
            def train(by):
                try:
                    return scale(by)  # in the cell
                except ZeroDivisionError as error:
                    raise ValueError(inspect.getsource(train), inspect.getsource(scale)) from error
            """
        ),
    }
    names: dict[str, Any] = {"__name__": "__main__"}
    for filename, source in cells.items():
        entry = (len(source), None, source.splitlines(keepends=True), filename)
        monkeypatch.setitem(linecache.cache, filename, entry)
        exec(compile(source, filename, "exec"), names)

    with pytest.raises(ValueError, match="def train") as caught:
        distribute(1).run(names["train"], 3)

    first, second = cells.values()
    assert caught.value.args == (second.partition("import inspect\n")[2], first)
    told = str(caught.value.__cause__)
    for line in ("1 / (by - by)  # deep in the notebook", "return scale(by)  # in the cell"):
        assert line in told
    for filename in cells:
        assert f'File "{filename}", line ' in told


BLOCKED = [
    ("local", "all_reduce", "raise", 1),
    ("local", "all_reduce", "kill", 0),
    ("local", "barrier", "exit", 1),
    ("local", "rendezvous", "raise", 0),
    ("cluster", "barrier", "raise", 0),
    ("cluster", "all_reduce", "kill", 1),
]
CAUSES = {"raise": LookupError, "kill": WorkerDied, "exit": WorkerDied}


@pytest.mark.parametrize(
    ("distribute", "blocked_in", "how", "culprit"),
    [pytest.param(*row, marks=[on_cluster] if row[0] == "cluster" else []) for row in BLOCKED],
    indirect=["distribute"],
)
def test_cause_is_raised_and_not_the_echo_in_a_blocked_peer(
    distribute: Distribute, tmp_path: Path, blocked_in: str, how: str, culprit: int
) -> None:
    def program() -> None:
        import torch
        import torch.distributed as dist

        if blocked_in != "rendezvous":
            dist.init_process_group("gloo")
            dist.all_reduce(torch.ones(1))  # all have met
        if my_rank() == culprit:
            wait_until((tmp_path / "blocked").exists, "the peer waits for this rank")
            if how == "raise":
                raise LookupError("the cause")
            if how == "exit":
                os._exit(5)
            os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / "blocked").touch()
        if blocked_in == "rendezvous":
            dist.init_process_group("gloo")
        elif blocked_in == "barrier":
            dist.barrier()
        else:
            dist.all_reduce(torch.ones(1))
        raise AssertionError("a collective ended without its peer")

    with pytest.raises(CAUSES[how]) as caught:
        distribute(2).run(program)

    failures = failures_of(caught.value)
    assert next(iter(failures)) == culprit
    assert {rank: failure.collateral for rank, failure in failures.items()} in (
        {culprit: False},
        {culprit: False, 1 - culprit: True},
    )
    assert all("AssertionError" not in failure.text for failure in failures.values())


# Output

LINES = 20_000
STATES = 500


def print_oddly(rank: int) -> None:
    """Print in every odd way; `odd_output` says what that makes."""
    os.write(1, b"\xff\xfe not UTF-8\n")
    os.write(2, b"caf\xc3")
    os.write(2, b"\xa9, \xe2\x82 cut\n")
    os.write(1, b"a" * MIB + b"\n")
    for i in range(LINES):
        print(f"line {i} of rank {rank}")
    for i in range(STATES):
        print(f"\rstep {i + 1}/{STATES}", end="", file=sys.stderr)
    print(file=sys.stderr)
    print("windows\r")
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    sys.stdout.write("b" * (5 * MIB) + "\n")
    print("\udc80 surrogate")
    print("the whole of stderr", file=sys.stderr)
    atexit.register(print, "from an exit handler")
    ctypes.CDLL(None).printf(b"from C, without a newline")
    print("never flushed", end="; ")


def odd_output(rank: int) -> dict[str, bytes]:
    """Give the bytes that `print_oddly` leaves in each stream."""
    lines = "".join(f"line {i} of rank {rank}\n" for i in range(LINES))
    states = "".join(f"\rstep {i + 1}/{STATES}" for i in range(STATES))
    stdout = [
        b"\xff\xfe not UTF-8\n",
        b"a" * MIB + b"\n",
        lines.encode(),
        b"windows\r\n",
        b"from a child\n",
        b"b" * (5 * MIB) + b"\n",
        b"\\udc80 surrogate\n",
        b"never flushed; from an exit handler\n",
        b"from C, without a newline",
    ]
    stderr = [
        b"caf\xc3\xa9, \xe2\x82 cut\n",
        states.encode() + b"\n",
        b"the whole of stderr\n",
    ]
    return {"stdout": b"".join(stdout), "stderr": b"".join(stderr)}


def shown_by(rank: int, text: str) -> list[str]:
    """Give the lines of the driver's output that are a rank's, without their prefix."""
    prefix = f"[{rank}] "
    return [line.removeprefix(prefix) for line in text.split("\n") if line.startswith(prefix)]


def logged(log_dir: Path) -> dict[str, bytes]:
    """Read all files of the only run under a log folder."""
    (folder,) = log_dir.iterdir()
    return {path.name: path.read_bytes() for path in (folder / "attempt_0").iterdir()}


def but_long_lines(lines: list[str]) -> list[str]:
    """Leave out the lines of a million letters; such a line may be shown in parts."""
    return [line for line in lines if not re.fullmatch("a+|b+", line)]


def test_odd_output_is_shown_and_kept(
    distribute: Distribute, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def program() -> str:
        print_oddly(my_rank())
        return os.environ["TORCHELASTIC_RUN_ID"]

    # Where it is set for the driver, nothing would wait in a buffer.
    run_id = distribute(2, log_dir=tmp_path, env={"PYTHONUNBUFFERED": ""}).run(program)
    captured = capsys.readouterr()

    assert [path.name for path in tmp_path.iterdir()] == [run_id]
    files = logged(tmp_path)
    assert sorted(files) == ["rank0.stderr", "rank0.stdout", "rank1.stderr", "rank1.stdout"]
    for rank in range(2):
        expected = odd_output(rank)
        assert all(files[f"rank{rank}.{stream}"] == expected[stream] for stream in expected)

        text = expected["stdout"].decode(errors="backslashreplace").replace("\r\n", "\n")
        shown = shown_by(rank, captured.out)
        assert "".join(shown) == text.replace("\n", "")
        assert but_long_lines(shown) == but_long_lines(text.split("\n"))

        errors = shown_by(rank, captured.err)
        bars = [line for line in errors if line.startswith("step ")]
        assert [line for line in errors if line not in bars] == [
            "café, \\xe2\\x82 cut",
            "the whole of stderr",
        ]
        assert bars[-1] == f"step {STATES}/{STATES}"
        assert len(bars) < STATES / 2
    unprefixed = [line for line in captured.out.split("\n") if not re.match(r"\[[01]\] ", line)]
    assert unprefixed == [""]


@pytest.mark.parametrize(
    ("how", "show_output", "shown_ranks"), [("raise", [1], [1]), ("kill", "none", [])]
)
def test_failed_run_keeps_all_output_and_shows_what_was_asked_for(
    distribute: Distribute,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    how: str,
    show_output: Any,
    shown_ranks: list[int],
) -> None:
    log_dir, sign = tmp_path / "logs", tmp_path / "printed"

    def program() -> None:
        for i in range(3000):
            print(f"line {i}")
        print("warning", file=sys.stderr)
        if my_rank() == 0:
            sign.touch()
            wait_until(lambda: False, "the failure stops this rank")
        wait_until(sign.exists, "rank 0 has printed")
        sys.stdout.flush()  # a crash in a flood may lose its last few milliseconds
        sys.stderr.flush()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("the last word")

    with pytest.raises(WorkerDied if how == "kill" else OSError) as caught:
        distribute(2, log_dir=log_dir, show_output=show_output).run(program)
    captured = capsys.readouterr()

    assert list(failures_of(caught.value)) == [1]
    printed = b"".join(f"line {i}\n".encode() for i in range(3000))
    files = logged(log_dir)
    assert files["rank0.stdout"] == files["rank1.stdout"] == printed
    assert files["rank0.stderr"] == b"warning\n"
    assert files["rank1.stderr"].startswith(b"warning\n")
    traceback = files["rank1.stderr"].decode().removeprefix("warning\n")
    if how == "raise":
        assert traceback.endswith("OSError: the last word\n")
    else:
        assert traceback == ""
    for rank in range(2):
        lines = printed.decode().splitlines() if rank in shown_ranks else []
        errors = ["warning"] if rank in shown_ranks else []  # the error has the traceback
        assert shown_by(rank, captured.out) == lines
        assert shown_by(rank, captured.err) == errors


def test_of_very_many_lines_none_is_lost_or_told_twice(
    distribute: Distribute, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    many = 200_000

    def program() -> None:
        if my_rank() == 1:
            wait_until(lambda: False, "this rank is stopped")
        for number in range(many):
            print("line", number)
            if number == many - many // 10:
                child = os.fork()
                if not child:
                    print("forked")
                    sys.stdout.flush()
                    os._exit(0)
                os.waitpid(child, 0)
        wait_until(lambda: sys.stdout.line_buffering, "each line is written by itself again")
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerDied, match="last words"):
        distribute(2, log_dir=tmp_path).run(program)
    expected = sorted([*(f"line {number}" for number in range(many)), "forked", "last words"])
    (log,) = tmp_path.glob("*/attempt_0/rank0.stdout")
    assert sorted(log.read_text().splitlines()) == expected
    assert sorted(shown_by(0, capfd.readouterr().out)) == expected


class CutShort:
    """A sink that ends the run when it has heard "ready", as the run's timeout would."""

    def __init__(self) -> None:
        self.heard = b""
        self.cut = False

    def write(self, rank: int, stream: str, data: bytes) -> None:
        self.heard += data
        if not self.cut and b"ready" in self.heard:
            self.cut = True
            raise RunTimeout("cut short")

    def has_room(self) -> bool:
        return True


def test_output_is_kept_to_the_end_where_a_run_is_cut_short(distribute: Distribute) -> None:
    def program() -> None:
        def say_why(*_: object) -> None:
            os.write(1, b"l" * 2 * MIB + b"last words\n")
            os._exit(1)

        signal.signal(signal.SIGTERM, say_why)
        print("ready")
        wait_until(lambda: False, "the run is cut short")

    distributor, sink = distribute(1), CutShort()
    launcher, _ = distributor._plan(1, 1)
    job = Job(
        program=program_of(program, (), {}), num_processes=1, min_processes=1, settings=distributor
    )
    with pytest.raises(RunTimeout, match="cut short"):
        launcher.launch(job, sink)
    assert sink.heard.startswith(b"ready\n")
    assert sink.heard.endswith(b"last words\n")
    assert len(sink.heard) == len(b"ready\nlast words\n") + 2 * MIB


# What a rank leaves behind, and what it may do


@pytest.mark.parametrize("failed", [False, True], ids=["success", "failure"])
def test_threads_end_their_work_and_exit_handlers_run(
    distribute: Distribute, tmp_path: Path, failed: bool
) -> None:
    def program() -> None:
        note = tmp_path / f"rank{my_rank()}"

        def write(word: str) -> None:
            with note.open("a") as file:
                file.write(word + " ")

        def work() -> None:
            threading.main_thread().join(DEADLINE)  # as the interpreter begins to leave
            write("thread")

        atexit.register(write, "first")
        atexit.register(write, "last")
        threading.Thread(target=work).start()
        if failed and my_rank() == 0:
            raise LookupError("failed")
        if failed:
            sys.exit(3)

    if failed:
        with pytest.raises((LookupError, WorkerDied)) as caught:
            distribute(2).run(program)
        assert sorted(failures_of(caught.value)) == [0, 1]
    else:
        distribute(2).run(program)
    notes = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert notes == {"rank0": "thread last first ", "rank1": "thread last first "}


def test_failed_ranks_exit_handlers_run_to_their_end(
    distribute: Distribute, tmp_path: Path
) -> None:
    def program() -> None:
        pid, note = tmp_path / "pid", tmp_path / "note"
        if my_rank() == 1:
            pid.write_text(str(os.getpid()))
            wait_until(lambda: False, "this rank is stopped")

        def work() -> None:
            other = int(pid.read_text())
            wait_until(lambda: not is_alive(other), "the other rank is stopped")
            note.write_text("done")

        wait_until(lambda: pid.exists() and pid.read_text(), "the other rank runs")
        atexit.register(work)
        raise LookupError("failed")

    with pytest.raises(LookupError):
        distribute(2).run(program)
    assert (tmp_path / "note").read_text() == "done"


def test_children_of_a_rank_work(distribute: Distribute) -> None:
    def program() -> dict[str, object]:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        done: dict[str, object] = {}
        for method in ("fork", "spawn"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                done[method] = pool.map(math.factorial, [3, 5])
        data = TensorDataset(torch.arange(40))
        loader = DataLoader(data, batch_size=4, num_workers=2, persistent_workers=True)
        done["loader"] = sum(int(batch.sum()) for (batch,) in loader)
        unfinished = iter(loader)
        next(unfinished)
        vars(builtins)["kept alive"] = unfinished
        return done

    expected = {"fork": [6, 120], "spawn": [6, 120], "loader": sum(range(40))}
    assert distribute(1).run(program) == expected


def test_forked_children_do_not_speak_for_their_rank(distribute: Distribute) -> None:
    def program() -> object:
        codes = {}
        for way in ("return", "raise", "exit 0", "exit 3"):
            child = os.fork()
            if child:
                codes[way] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            elif way == "raise":
                raise ValueError("the child's")
            elif way == "return":
                return "the child's"
            else:
                sys.exit(int(way[-1]))
        return codes

    codes = {"return": 0, "raise": 1, "exit 0": 0, "exit 3": 3}
    assert distribute(1).run(program) == codes


def state_of_this_process() -> dict[str, Any]:
    """Take down whatever of this process a launcher might be tempted to change."""
    import numpy as np
    import torch

    loggers = [logging.root, *map(logging.getLogger, sorted(logging.root.manager.loggerDict))]
    return {
        "random": random.getstate(),
        "numpy": repr(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "cuda": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
        "process group": torch.distributed.is_initialized(),
        "environment": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "folder": os.getcwd(),
        "arguments": list(sys.argv),
        "path": list(sys.path),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "faulthandler": faulthandler.is_enabled(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "warnings": list(warnings.filters),
        "socket timeout": socket.getdefaulttimeout(),
        "loggers": {
            logger.name: (logger.level, logger.propagate, logger.disabled, [*logger.handlers])
            for logger in loggers
        },
    }


def open_files() -> set[str]:
    """List the descriptors that this process has open, by number and by what they are."""
    found = set()
    for number in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the one with which the folder is read
            found.add(f"{number} {os.readlink(f'/dev/fd/{number}')}")
    return found


def children() -> set[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found.update(task.read_text().split())
    return found


def state_of_spark() -> dict[str, Any]:
    from pyspark.sql import SparkSession

    context = SparkSession.active().sparkContext
    return {
        "conf": sorted(context.getConf().getAll()),
        "tags": context.getJobTags(),
        "group": context.getLocalProperty("spark.jobGroup.id"),
        "python": context.pythonExec,
    }


@pytest.mark.parametrize("ending", ["value", "failure"])
def test_nothing_in_the_drivers_process_changes(
    distribute: Distribute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    def program() -> int:
        random.seed(1)
        os.chdir("/")
        logging.basicConfig(level=logging.DEBUG)
        if ending == "failure":
            raise ValueError(ending)
        return my_rank()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_DRIVER", "1")
    distributor = distribute(2, env={"OF_THE_RANKS": "1"})
    random.seed(1234)
    before, threads = state_of_this_process(), set(threading.enumerate())
    files, processes = open_files(), children()
    spark_before = {} if distributor.local_mode else state_of_spark()

    if ending == "value":
        assert distributor.run_all(program) == [0, 1]
    else:
        with pytest.raises(ValueError, match=ending):
            distributor.run_all(program)

    after = state_of_this_process()
    assert {name for name in before if before[name] != after[name]} == set()
    wait_until(lambda: children() <= processes, "its processes have ended")
    if distributor.local_mode:
        wait_until(lambda: set(threading.enumerate()) <= threads, "its threads have ended")
        assert open_files() == files
    else:  # Py4J keeps connections and threads for later calls
        assert state_of_spark() == spark_before


# Scripts

SCRIPT = """
import gzip, json, os, sys
from pathlib import Path
import sibling

out = Path(sys.argv[1], os.environ["RANK"])
rank_file = open(out, "w")
closed = gzip.open(os.devnull, "wt")
closed.close()  # has no descriptor to ask for any more
json.dump([sys.argv[1:], __name__, __file__, sibling.VALUE, os.environ["WORLD_SIZE"]], rank_file)

class Trouble(Exception):
    def __init__(self, code, why):
        super().__init__(why)
        self.code = code

def main():  # keeps the module's names, both files among them, in a cycle
    if sys.argv[2] == "raise":
        raise Trouble(7, "in the script")  # the script's line
    if sys.argv[2] == "exit":
        sys.exit(int(sys.argv[3]))
    if os.environ["RANK"] == "1":
        sys.exit(0)

main()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script beside the module that it imports, in a folder that nothing else knows."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "sibling.py").write_text("VALUE = 'from beside the script'\n")
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return path


def test_script_runs_as_if_started_by_hand(
    distribute: Distribute, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(script.parent.parent)

    words = (str(out), "--b", "word with spaces")
    assert distribute(2).run_all("project/train.py", *words) == [None, None]

    expected = [
        list(words),
        "__main__",
        str(script),
        "from beside the script",
        "2",
    ]
    assert [json.loads((out / rank).read_text()) for rank in "01"] == [expected, expected]
    assert sorted(path.name for path in out.iterdir()) == ["0", "1"]


@pytest.mark.parametrize(
    ("words", "kind"),
    [(("exit", "3"), WorkerDied), (("raise",), Exception)],
    ids=["exit", "raise"],
)
def test_script_that_fails_says_so_in_its_own_way(
    distribute: Distribute, script: Path, tmp_path: Path, words: tuple[str, ...], kind: Any
) -> None:
    with pytest.raises(kind) as caught:
        distribute(2).run(script, str(tmp_path), *words)

    error: Any = caught.value
    assert set(failures_of(error)) <= {0, 1}
    if kind is WorkerDied:
        assert (error.exit_code, error.signal) == (3, None)
    else:
        assert type(error).__name__ == "Trouble"
        assert (error.args, error.code) == (("in the script",), 7)
        told = str(error.__cause__)
        assert 'raise Trouble(7, "in the script")  # the script\'s line' in told
        assert f'File "{script}", line ' in told
        assert "runpy" not in told
