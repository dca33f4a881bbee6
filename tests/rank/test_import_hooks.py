"""A module of another package can be changed right after it is imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import resources
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from distributor import TorchDistributor
from distributor.rank.import_hooks import adapt, after_import, at_next_import

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


def test_a_module_that_is_imported_already_is_changed_at_once(package: str) -> None:
    importlib.import_module(package)
    values: list[int] = []
    after_import(package, lambda module: values.append(module.value))
    assert values == [1]


def test_several_changes_of_one_module(package: str) -> None:
    changes: list[str] = []
    after_import(package, lambda module: changes.append("first"))
    after_import(package, lambda module: changes.append("second"))
    module = importlib.import_module(package)

    assert sorted(changes) == ["first", "second"]
    assert isinstance(module.__loader__, SourceFileLoader)


def test_a_module_that_another_finder_finds_is_changed(package: str) -> None:
    class Elsewhere:
        """Finds one package as finders of editable installations do."""

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            folder = Path(sys.path[0], package)
            return spec_from_file_location(name, folder / "__init__.py") if name == other else None

    other = f"{package}_elsewhere"
    sys.meta_path.append(Elsewhere)  # type: ignore[arg-type]
    values: list[int] = []
    after_import(other, lambda module: values.append(module.value))
    try:
        importlib.import_module(other)
    finally:
        sys.modules.pop(other, None)
    assert values == [1]


def test_a_program_that_looks_for_a_module_before_it_imports_it(package: str) -> None:
    values: list[int] = []
    after_import(package, lambda module: values.append(module.value))
    assert importlib.util.find_spec(package) is not None
    importlib.import_module(package)
    assert values == [1]


def test_an_import_that_fails_and_is_tried_again_is_changed(package: str) -> None:
    values: list[int] = []
    after_import(package, lambda module: values.append(module.value))
    path = Path(sys.path[0], package, "__init__.py")
    path.write_text("raise OSError('of the first import')")
    with pytest.raises(OSError, match="of the first import"):
        importlib.import_module(package)
    path.write_text("value = 1  # another size, since a file's time may be the same")
    importlib.import_module(package)
    assert values == [1]


def test_a_change_that_fails_is_said_and_the_import_succeeds(
    package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def rename(module: Any) -> None:
        module.value = module._private_name

    adapt(package, rename)
    assert importlib.import_module(package).value == 1
    text = f"distributor: {package} could not be adapted (rename: AttributeError: "
    assert text in capsys.readouterr().err


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


def test_a_changed_module_has_its_own_loader_and_data(package: str) -> None:
    finders = list(sys.meta_path)
    after_import(package, lambda module: None)
    module = importlib.import_module(package)

    assert module.__spec__ is not None
    assert isinstance(module.__spec__.loader, SourceFileLoader)
    assert module.__loader__ is module.__spec__.loader
    assert resources.files(package).joinpath("data.txt").read_text() == "data"
    assert sys.meta_path == finders
