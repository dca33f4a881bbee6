"""Processes that ranks start by spawn or forkserver find the main program's names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import cluster_is_slow
from support.ranks import Distribute
from test_main_module import Main, main  # noqa: F401  (a fixture)

from distributor.programs import module_of

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


both_methods = pytest.mark.parametrize(
    "method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)]
)


@both_methods
@cluster_is_slow
def test_children_of_a_function(main: Main, distribute: Distribute, method: str) -> None:  # noqa: F811
    assert distribute(1).run(main(CHILDREN).values, method) == EXPECTED


@both_methods
@cluster_is_slow
def test_children_of_a_module_that_is_run_by_name(
    distribute: Distribute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(str(tmp_path))
    distribute(1).run(module_of("package.train"), str(tmp_path / "values"), method)
    assert json.loads((tmp_path / "values").read_text()) == EXPECTED
