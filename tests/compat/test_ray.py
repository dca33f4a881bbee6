"""Canaries for what `distributor._compat.ray` uses of Ray."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.canary import relies_on

from distributor._compat import ray as private

pytestmark = [
    pytest.mark.repository,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]


def output_of(*arguments: str, folder: Path) -> str:
    done = subprocess.run(
        private.ray_command(*arguments),
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


def test_the_command_runs_beside_a_module_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('this is not Ray')")
    with relies_on("ray", "ray.scripts.scripts.main", "ray.ray_command"):
        options = ["--block", "--node-name=a", "--temp-dir=b", "--ray-client-server-port=1"]
        text = output_of("start", *options, "--help", folder=tmp_path)  # fails for an unknown one
        assert re.search(r"--temp-dir.*Can\s+be\s+specified per node", text, re.DOTALL)


def test_the_file_with_the_address_and_the_longest_socket() -> None:
    from ray._common.utils import get_ray_address_file
    from ray._private import ray_constants

    with relies_on("ray", "the file that ray start writes", "ray.ADDRESS_FILE"):
        assert get_ray_address_file("/folder") == f"/folder/{private.ADDRESS_FILE}"
    with relies_on("ray", "a variable for the end of a node", "ray.VARIABLES"):
        for name in private.VARIABLES:
            assert hasattr(ray_constants, name)
