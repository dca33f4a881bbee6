"""What this package changes of torch after its import may have another name in a new release."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import cloudpickle
import pytest

from distributor import TorchDistributor
from distributor.rank.import_hooks import adapt

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


def test_an_import_that_fails_and_is_tried_again_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module, values = tmp_path / "tried_again.py", list[int]()
    adapt("tried_again", lambda module: values.append(module.value))
    module.write_text("raise OSError('of the first import')")
    with pytest.raises(OSError, match="of the first import"):
        importlib.import_module("tried_again")
    module.write_text("value = 1  # another size, since a file's time may be the same")
    importlib.import_module("tried_again")
    assert values == [1]
