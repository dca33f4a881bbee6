"""A module of another package can be changed right after it is imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import cloudpickle
import pytest

from distributor import TorchDistributor
from distributor.rank.import_hooks import after_import, at_next_import

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NEXT_TORCH = """
import sys
from importlib.machinery import PathFinder, SourceFileLoader

class Renamed(SourceFileLoader):
    def get_code(self, fullname):
        source = self.get_data(self.path).replace(b"_new_process_group_helper", b"_new_group")
        return compile(source, self.path, "exec")

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "torch.distributed.distributed_c10d":
            spec = PathFinder.find_spec(name, path)
            spec.loader = Renamed(name, spec.origin)
            return spec

sys.meta_path.insert(0, Finder())
"""
"""A sitecustomize that renames a private function of torch, as a release of torch may."""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a package that can be imported, with a data file, and return its name."""
    folder = tmp_path / "hooked_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("value = 1\n")
    (folder / "data.txt").write_text("data")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, folder.name, raising=False)
    return folder.name


def test_a_module_is_changed_once_after_its_import(package: str) -> None:
    values: list[int] = []
    after_import(package, lambda module: values.append(module.value))
    assert values == []

    importlib.import_module(package)
    importlib.import_module(package)
    assert values == [1]


def test_ranks_train_with_a_torch_whose_private_names_are_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NEXT_TORCH)

    def reduce() -> int:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        assert not hasattr(dist.distributed_c10d, "_new_process_group_helper")
        return int(total)

    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    ranks = TorchDistributor(2, use_gpu=False, warm=False, timeout=100, env={"PYTHONPATH": path})
    assert ranks.run(reduce) == 2
    said = capfd.readouterr().err
    assert said.count("torch.distributed.distributed_c10d could not be adapted (separate_") == 1


def test_the_next_import_of_a_package_that_is_imported_already(package: str) -> None:
    first, calls = importlib.import_module(package), []
    spec = first.__spec__
    at_next_import(package, lambda: calls.append(sys.modules[package]))
    assert package not in sys.modules
    found = importlib.util.find_spec(package)
    assert found is not None
    assert spec is not None
    assert found.origin == spec.origin
    assert calls == []

    assert importlib.import_module(package) is first
    assert importlib.import_module(package) is first
    assert first.__spec__ is spec
    assert calls == [first]
