"""Overhead of a trial of a study, slots that it leaves without ranks, and the time to an accuracy.

The overhead is the wall time of a study times the trials at once, less the time in their function,
for each trial. A short study before it is not counted: it starts the warm processes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import functions
from benchmarks.floors import free_port
from benchmarks.launch import titled as placed
from benchmarks.measure import Driven, apart
from benchmarks.packages import library
from benchmarks.peers import Peer
from benchmarks.report import Row, gathered, row
from benchmarks.spark import IN_DRIVER, LOCAL, LOOPBACK, session
from benchmarks.turns import Effort, measured
from distributor.core.versions import DISTRIBUTION

Study = Callable[[Callable[..., float], int], None]
"""Runs a function in so many trials."""

RANKS = 2
TRIALS, QUICK_TRIALS, TRIALS_OF_PEERS = 64, 8, 8
SLEEPERS, QUICK_SLEEPERS = 4, 2
"""Trials that sleep, for each trial at once."""
SECONDS, QUICK_SECONDS = 10.0, 2.0
"""Seconds for which they sleep."""
WARM_UPS, WARM_UPS_OF_PEERS = 6, 2
"""Trials before those that are counted: after its fourth run a warm process imports more."""
DEADLINE = 900.0
OVERHEAD, IDLE = "overhead of a trial", "slots without ranks"


class Case(NamedTuple):
    """A way to run a study, a place, the ranks of a trial, and the trials in all and at once.

    Those of a case with `seconds` sleep.
    """

    peer: Peer
    place: str
    ranks: int
    at_once: int
    trials: int
    seconds: float = 0.0

    @property
    def title(self) -> str:
        return titled(self.place, self.ranks, self.at_once, self.seconds)


def titled(place: str, ranks: int, at_once: int, seconds: float = 0.0) -> str:
    """Return the title of a case."""
    of_seconds = f" of {seconds:g} s" if seconds else ""
    return f"{placed(place, ranks)}, {at_once} trial{'s' * (at_once > 1)}{of_seconds} at once"


def cluster(at_once: int) -> str:
    """Return the master of a cluster with room for so many trials."""
    return f"local-cluster[{RANKS},{at_once},1024]"


def measure(effort: Effort) -> list[Row]:
    """Measure studies."""
    ours, peers = PEERS["ours"], [PEERS["pyspark"], PEERS["mlflow"]]
    trials = QUICK_TRIALS if effort.quick else TRIALS
    seconds = QUICK_SECONDS if effort.quick else SECONDS
    sleepers = QUICK_SLEEPERS if effort.quick else SLEEPERS
    cases = []
    for at_once in (1,) if effort.quick else (1, 2):
        places = ((LOCAL, RANKS), (cluster(at_once), RANKS), (LOCAL, 1))
        cases += [Case(ours, place, ranks, at_once, trials) for place, ranks in places]
        if not effort.quick:
            cases += [
                Case(peer, place, ranks, at_once, TRIALS_OF_PEERS)
                for peer in peers
                for place, ranks in places
            ]
        cases += [
            Case(ours, place, RANKS, at_once, sleepers * at_once, seconds)
            for place in (LOCAL, cluster(at_once))
        ]
    wanted = [c for c in cases if not effort.families or c.peer.family in effort.families]
    searches = [] if effort.quick else [Search(PEERS[name]) for name in ("ours", "ours_unpruned")]
    return measured(wanted, effort.few_rounds, _drive, _rows) + measured(
        [c for c in searches if not effort.families or c.peer.family in effort.families],
        1,
        lambda case: apart(search, SEARCH_DEADLINE, prunes=case.peer.name == "ours"),
        lambda case, found: [row(case.peer, case.title, REACHED, gathered(found, "seconds"))],
    )


def drive(
    peer: str, place: str, ranks: int, at_once: int, trials: int, seconds: float
) -> dict[str, Any]:
    """Run a study, and compare its wall time with the time in the function of its ranks."""
    library("optuna").logging.set_verbosity(library("optuna").logging.WARNING)
    warm_ups = WARM_UPS if peer == "ours" else WARM_UPS_OF_PEERS
    with PEERS[peer].open(place, ranks, at_once) as study, tempfile.TemporaryDirectory() as name:
        study(partial(functions.fit_noted, seconds=0.0), warm_ups * at_once)
        began = time.perf_counter()
        study(partial(functions.fit_noted, seconds=seconds, folder=name), trials)
        slot_seconds = (time.perf_counter() - began) * at_once * ranks
        noted = [float(file.read_text()) for file in Path(name).iterdir()]
    if len(noted) != trials * ranks:
        raise RuntimeError(f"{len(noted)} ranks ran the function, not {trials * ranks}")
    without = slot_seconds - sum(noted)
    return {"overhead": without / ranks / trials, "idle": 100 * without / slot_seconds}


@contextlib.contextmanager
def _ours(place: str, ranks: int, at_once: int) -> Iterator[Study]:
    from distributor import TorchDistributor
    from distributor.tune import optimize

    # A cluster has room for as many as are wanted.
    jobs = at_once if place == LOCAL else None

    def study(function: Callable[..., float], trials: int) -> None:
        distributor = TorchDistributor(ranks, local_mode=place == LOCAL, use_gpu=False)
        optimize(_study(), function, _space, distributor, n_trials=trials, n_jobs=jobs)

    with session(place):
        yield study


@contextlib.contextmanager
def _pyspark(place: str, ranks: int, at_once: int) -> Iterator[Study]:
    from pyspark.ml.torch.distributor import TorchDistributor

    def study(function: Callable[..., float], trials: int) -> None:
        def objective(trial: Any) -> Any:
            distributor = TorchDistributor(ranks, local_mode=place == LOCAL, use_gpu=False)
            return distributor.run(function, **_space(trial))

        _study().optimize(objective, n_trials=trials, n_jobs=at_once)

    with session(IN_DRIVER if place == LOCAL else place):
        yield study


@contextlib.contextmanager
def _mlflow(place: str, ranks: int, at_once: int) -> Iterator[Study]:
    mlflow = library("mlflow")

    def study(function: Callable[..., float], trials: int) -> None:
        def objective(trial: Any) -> Any:
            if ranks == 1:
                variables = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": free_port()}
                os.environ.update({name: str(value) for name, value in variables.items()})
                os.environ["MASTER_ADDR"] = LOOPBACK
                return function(**_space(trial))
            from pyspark.ml.torch.distributor import TorchDistributor

            distributor = TorchDistributor(ranks, local_mode=True, use_gpu=False)
            return distributor.run(function, **_space(trial))

        experiment = mlflow.create_experiment(f"{time.time()}")
        storage = library("mlflow.optuna.storage").MlflowStorage(experiment)
        study = library("mlflow.pyspark.optuna.study").MlflowSparkStudy(
            "study", storage, sampler=_study().sampler
        )
        try:
            study.optimize(objective, n_trials=trials, n_jobs=at_once)
        except Exception as error:
            # The text has a traceback, and the cause in its last line.
            raise RuntimeError(str(error).strip().splitlines()[-1]) from error

    with tempfile.TemporaryDirectory() as folder:
        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        with session(f"local[{at_once}]" if place == LOCAL else place):
            yield study


PEERS = {
    peer.name: peer
    for peer in (
        Peer("ours", "distributor", _ours, DISTRIBUTION),
        Peer("ours_unpruned", "distributor, without a pruner", _ours, DISTRIBUTION),
        Peer(
            "pyspark",
            "Optuna's n_jobs, PySpark's TorchDistributor",
            _pyspark,
            "pyspark",
            note=f"{TRIALS_OF_PEERS} trials, in threads",
        ),
        Peer(
            "mlflow",
            "MlflowSparkStudy",
            _mlflow,
            "mlflow",
            note=f"{TRIALS_OF_PEERS} trials; several ranks with PySpark's TorchDistributor",
        ),
    )
}


SEEDS = range(20, 25)
TARGET, EPOCHS, BATCH, TRAINED = 0.97, 27, 8, 1297
SEARCH_DEADLINE = 3600.0
REACHED = f"until {100 * TARGET:.0f} % accuracy"


class Search(NamedTuple):
    """Studies that end with the first trial of an accuracy, with Hyperband or without a pruner."""

    peer: Peer

    @property
    def title(self) -> str:
        return f"{LOCAL}, studies of scikit-learn's digits, {len(SEEDS)} seeds"


def search(prunes: bool) -> dict[str, Any]:
    """Run a study for each seed, whose trials are the same with and without the pruner.

    The space is wide, so that most trials learn nothing, and the first good one comes late.
    """
    from distributor import TorchDistributor
    from distributor.tune import optimize

    optuna = library("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruners, seconds = optuna.pruners, []
    images, digits = library("sklearn.datasets").load_digits(return_X_y=True)
    for seed in [None, *SEEDS]:  # the first starts the warm processes
        reached: list[float] = []
        study = optuna.create_study(
            study_name=f"digits-{seed}",
            direction="maximize",
            sampler=optuna.samplers.RandomSampler(seed=seed),
            pruner=pruners.HyperbandPruner(1, EPOCHS, 3) if prunes else pruners.NopPruner(),
        )

        def stop(study: Any, trial: Any, reached: list[float] = reached) -> None:
            if trial.value is not None and trial.value >= TARGET:
                reached.append(time.perf_counter())
                study.stop()

        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            optimize(
                study,
                partial(_learn, images, digits),
                _wide_space,
                TorchDistributor(1, use_gpu=False, storage_path=folder),
                n_trials=6 if seed is None else 500,
                n_jobs=1,
                metric="accuracy",
                reduce="max",
                callbacks=[stop],
            )
        if seed is not None:
            seconds.append(reached[0] - began)
    return {"seconds": seconds}


def _learn(images: Any, digits: Any, lr: float, width: int, momentum: float, decay: float) -> None:
    from distributor.train import report

    torch = library("torch")

    torch.manual_seed(0)
    torch.set_num_threads(1)
    order = torch.randperm(len(images))
    x, y = torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(digits)[order]
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum, weight_decay=decay)
    for _ in range(EPOCHS):
        for batch in torch.randperm(TRAINED).split(BATCH):
            loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            hits = model(x[TRAINED:]).argmax(1) == y[TRAINED:]
        report({"accuracy": float(hits.float().mean())})


def _wide_space(trial: Any) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-7, 1000, log=True),
        "width": trial.suggest_int("width", 2, 32, log=True),
        "momentum": trial.suggest_float("momentum", 0, 0.99),
        "decay": trial.suggest_float("decay", 1e-6, 100, log=True),
    }


def _study() -> Any:
    optuna = library("optuna")
    return optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))


def _space(trial: Any) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-4, 0.3, log=True),
        "width": trial.suggest_int("width", 2, 64),
    }


def _drive(case: Case) -> Driven:
    peer, *values = case
    parameters = dict(zip(Case._fields[1:], values, strict=True))
    return apart(drive, DEADLINE, peer=peer.name, **parameters)


def _rows(case: Case, measurements: list[Driven]) -> list[Row]:
    if case.seconds:
        return [row(case.peer, case.title, IDLE, gathered(measurements, "idle"), "%")]
    return [row(case.peer, case.title, OVERHEAD, gathered(measurements, "overhead"))]
