"""Processes that ranks start by spawn or forkserver find the main program's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import cluster_is_slow
from support.ranks import Distribute
from test_main_module import Main, main  # noqa: F401  (a fixture)

from distributor.programs.programs import module_of

CHILDREN = """
import concurrent.futures, multiprocessing, os

class State:
    def __init__(self, value): self.value = value

BIAS = 1

def square(state): return State(state.value ** 2 + BIAS)

def put(queue): queue.put(State(7))

def nested(method, value):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map(square, [State(value)])[0]

def values(method):
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=put, args=(queue,))
    process.start()
    results = [queue.get()]
    process.join()
    # The process of the executor starts another one, which needs the same names.
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        results.append(executor.submit(nested, method, 3).result())
    return [result.value for result in results if type(result) is State]
"""
SCRIPT = f"""{CHILDREN}
if __name__ == "__main__":
    import json, sys
    with open(sys.argv[1], "w") as file: json.dump(values(sys.argv[2]), file)
"""
EXPECTED = [7, 10]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_children_of_a_function(main: Main, distribute: Distribute, method: str) -> None:  # noqa: F811
    assert distribute(1).run(main(CHILDREN).values, method) == EXPECTED


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
@pytest.mark.parametrize("warm", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_children_of_a_script(
    distribute: Distribute, tmp_path: Path, method: str, warm: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    distribute(1, warm=warm).run(script, str(tmp_path / "values"), method)
    assert json.loads((tmp_path / "values").read_text()) == EXPECTED


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
@cluster_is_slow
def test_children_of_a_module_that_is_run_by_name(
    distribute: Distribute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(str(tmp_path))
    distribute(1).run(module_of("package.train"), str(tmp_path / "values"), method)
    assert json.loads((tmp_path / "values").read_text()) == EXPECTED


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_a_data_loader(main: Main, distribute: Distribute, method: str) -> None:  # noqa: F811
    program = main("""
    import multiprocessing, torch, torch.multiprocessing

    class Numbers(torch.utils.data.Dataset):
        def __len__(self): return 4
        def __getitem__(self, index): return index

    def total():
        loader = torch.utils.data.DataLoader(Numbers(), num_workers=1)
        return sum(int(batch) for batch in loader)

    def work(index): assert total() == 6  # the structure of PyTorch's ImageNet example

    def train(method):
        multiprocessing.set_start_method(method, force=True)  # forkserver is Python 3.14's default
        torch.multiprocessing.spawn(work, nprocs=1)
        return total()
    """)
    assert distribute(1).run(program.train, method) == 6


@pytest.mark.slow
@pytest.mark.parametrize("api", ["TorchTrainer", "@distributed"])
def test_children_of_a_trainer_s_loop(main: Main, api: str) -> None:  # noqa: F811
    from distributor import distributed
    from distributor.train import ScalingConfig
    from distributor.train.torch import TorchTrainer

    program: Any = main(CHILDREN + "\ndef check(config): assert values('spawn') == [7, 10]\n")
    if api == "@distributed":
        distributed(gpus=1, use_gpu=False)(program.check).distributed({})
    else:
        TorchTrainer(
            program.check,
            train_loop_config={},
            scaling_config=ScalingConfig(num_workers=1, local_mode=True),
        ).fit()
