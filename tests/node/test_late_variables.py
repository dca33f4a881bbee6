"""A program sets environment variables before it imports torch, which may have been imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import cluster_is_slow
from support.ranks import Distribute

pytest.importorskip("torch")

SCRIPT = """
import importlib.util, json, os, sys
from pathlib import Path

before = [name for name in sys.modules if name.partition(".")[0] == "torch"]
os.environ["OMP_NUM_THREADS"] = "2"
os.environ["TORCH_LOGS"] = "+distributed"
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
found = importlib.util.find_spec("torch").origin
import torch.nn
import torch, logging, torch.distributed as dist

facts = {
    "modules before": before,
    "threads": torch.get_num_threads(),
    "log level": logging.getLogger("torch.distributed").getEffectiveLevel(),
    "debug level": str(dist.get_debug_level()),
    "spec": [found == torch.__file__, torch.__spec__.origin == torch.__file__],
}
Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(facts))
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""
EXPECTED = {
    "modules before": [],
    "threads": 2,
    "log level": 10,
    "debug level": "DebugLevel.INFO",
    "spec": [True, True],
}


@cluster_is_slow
def test_variables_that_a_script_sets_before_it_imports_torch(
    distribute: Distribute, tmp_path: Path
) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    out.mkdir()
    distribute(2).run(script, str(out))
    assert [json.loads((out / rank).read_text()) for rank in "01"] == [EXPECTED] * 2
