"""Canaries for what `distributor._compat.huggingface` uses of Accelerate."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from support.canary import relies_on
from torch.utils.data import DataLoader, IterableDataset

from distributor._compat import huggingface as private

pytestmark = pytest.mark.repository

if find_spec("accelerate") is None:
    pytest.skip("Accelerate is not installed", allow_module_level=True)


@pytest.fixture
def accelerate() -> Any:
    """Import Accelerate in a test only: each process of the tests collects all of them."""
    return importlib.import_module("accelerate")


def test_a_marked_loader_is_not_prepared_again(accelerate: Any) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    plain, marked = (DataLoader([1, 2, 3, 4]) for _ in range(2))
    private.mark_as_prepared(marked)
    assert accelerator.prepare(plain) is not plain
    with relies_on("accelerate", "the mark of prepared objects", "huggingface.mark_as_prepared"):
        assert accelerator.prepare(marked) is marked


def test_a_state_sees_other_ranks_only_if_it_is_asked_to(
    accelerate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class State:
        def __init__(self, cpu: bool, **kwargs: Any) -> None:
            asked.append((cpu, kwargs))

    with relies_on("accelerate", "PartialState's argument cpu", "huggingface.see_all_ranks"):
        state: Any = accelerate.state.PartialState()
        assert private.state_arguments(state) in ({"cpu": True}, {"cpu": False})
        parse = accelerate.state.parse_flag_from_env
        module: Any = SimpleNamespace(PartialState=State, parse_flag_from_env=parse)
        private.see_all_ranks(module)
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        for world_size, variable in (("2", None), ("1", None), ("2", "false"), ("1", "true")):
            monkeypatch.setenv("WORLD_SIZE", world_size)
            monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
            if variable:
                monkeypatch.setenv("ACCELERATE_USE_CPU", variable)
            module.PartialState(backend=None)
        assert asked == [(cpu, {"backend": None}) for cpu in (True, False, False, True)]


class Numbers(IterableDataset[int]):
    """Four numbers."""

    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.parametrize("dataset", [[0, 1, 2, 3], Numbers()], ids=["map", "iterable"])
def test_a_share_is_left_whole(accelerate: Any, dataset: Any) -> None:
    """Neither divided among two processes, nor read by the first for both."""
    module: Any = accelerate.accelerator
    inside = SimpleNamespace(prepare_data_loader=module.prepare_data_loader)
    private.keep_shares_whole(inside, is_share=lambda found: found is dataset)  # type: ignore[arg-type]
    arguments = {"num_processes": 2, "process_index": 1, "put_on_device": True}
    with relies_on("accelerate", "prepare_data_loader", "huggingface.keep_shares_whole"):
        assert "prepare_data_loader" in accelerate.Accelerator.prepare_data_loader.__code__.co_names
        prepared = inside.prepare_data_loader(DataLoader(dataset, batch_size=3), **arguments)
        assert [batch.tolist() for batch in prepared] == [[0, 1, 2], [3]]
        assert prepared.remainder == -1, "gather_for_metrics drops nothing"
    other = inside.prepare_data_loader(DataLoader([0, 1, 2, 3]), **arguments)
    assert [batch.tolist() for batch in other] == [[1], [3]]
