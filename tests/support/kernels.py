"""Kernels of this interpreter, isolated from the Jupyter configuration of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from support.waiting import DEADLINE

FOLDERS = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")


@contextlib.contextmanager
def kernel_for(
    notebook: Any, folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """Start a kernel that works in a folder; return nbclient's client of the notebook."""
    import jupyter_client
    import nbclient

    spec = folder / "kernels" / "this_python"
    spec.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    names = {"display_name": "this Python", "language": "python", "argv": command}
    (spec / "kernel.json").write_text(json.dumps(names))
    specs = jupyter_client.kernelspec.KernelSpecManager(kernel_dirs=[str(folder / "kernels")])
    with mock.patch.dict(os.environ, dict.fromkeys(FOLDERS, str(folder))):
        client = nbclient.NotebookClient(
            notebook,
            km=jupyter_client.AsyncKernelManager(
                kernel_name="this_python", kernel_spec_manager=specs
            ),
            timeout=DEADLINE,
            startup_timeout=DEADLINE,
            shutdown_kernel="immediate",
            coalesce_streams=True,
            record_timing=False,
            resources={"metadata": {"path": str(folder)}},
        )
        # Sockets that stay open would look for the kernel's ports for ever, whoever has them next.
        with client.setup_kernel(env={**os.environ, **(environment or {})}, cleanup_kc=True):
            yield client
