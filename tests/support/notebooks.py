"""The notebooks, run from top to bottom; ``make notebooks`` saves them with their outputs."""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.cluster import Cluster, cluster_on
from support.kernels import kernel_for
from support.machines import machines_on_loopback
from support.tracking_server import tracking_server

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
ON_CLUSTER = ("walkthrough", "serverless", "dataframes", "estimator", "lora")
"""Those that need Spark and a tracking server."""
NAMES = (*ON_CLUSTER, "fsdp", "fsdp2", "recovery", "study")
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
"""Variables that switch off MLflow's usage reports."""
PLAIN = {
    "OMP_NUM_THREADS": "1",  # as on ranks: on busy cores more threads only wait
    "PYTHONWARNINGS": "ignore",  # they depend on the installed versions
}
"""Variables that any notebook is run with."""
OF_THIS_MACHINE = {
    r"(?m)^(NOTE: Picked up|WARNING: Using incubator).*\n": "",
    re.escape(f"{ROOT}/"): "",
    r"[^\s\"]*/ipykernel_\d+/\d+\.py": "<cell>",
    rf"\b{re.escape(socket.gethostname())}\b": "localhost",
}
"""Patterns of this machine, and of Java's start, with their replacements in saved outputs."""


@dataclass(frozen=True)
class Place:
    """Where notebooks run: a folder, their sessions' cluster, the tracking server's address."""

    folder: Path
    cluster: Cluster
    uri: str

    def run(self, name: str, **properties: str) -> Any:
        """Run a notebook, with Spark properties of its own; an unexpected error is raised."""
        environment = {
            **self.cluster.environment,
            **QUIET,
            "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
            "MLFLOW_EXPERIMENT_NAME": name,
            "MLFLOW_TRACKING_URI": self.uri,
            "SPARK_CONF_DIR": str(self._spark_conf(name, properties)),
            "SPARK_LOCAL_IP": self.cluster.on_driver.address,
        }
        return run_here(name, self.folder / name, environment)

    def _spark_conf(self, name: str, properties: dict[str, str]) -> Path:
        folder = self.folder / f"{name}-conf"
        folder.mkdir()
        shutil.copy(ROOT / "conf" / "log4j2.properties", folder)
        settings = {
            **self.cluster.properties,
            **{
                f"spark.executorEnv.{variable}": value
                for variable, value in {**QUIET, **PLAIN}.items()
            },
            "spark.ui.showConsoleProgress": "false",
            **properties,
        }
        lines = [f"{key} {value}\n" for key, value in settings.items()]
        (folder / "spark-defaults.conf").write_text("".join(lines))
        return folder


def run_here(name: str, folder: Path, environment: Mapping[str, str] | None = None) -> Any:
    """Run a notebook in a new folder, with more variables, and return it with its outputs."""
    import nbformat

    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", nbformat.NO_CONVERT)
    folder.mkdir()
    with kernel_for(notebook, folder, {**PLAIN, **(environment or {})}) as client:
        client.execute()
    return notebook


@contextlib.contextmanager
def place_for_notebooks(folder: Path, port: int | None = None) -> Iterator[Place]:
    """Start, on the loopback, a cluster of two executors and a tracking server."""
    with (
        contextlib.ExitStack() as stack,
        ThreadPoolExecutor() as pool,
        machines_on_loopback(3) as machines,
    ):
        server = pool.submit(stack.enter_context, tracking_server(folder, port))
        with cluster_on(machines, folder, cores=2) as cluster:
            yield Place(folder, cluster, server.result())


def main() -> int:
    """Run and save the notebooks that the command line names."""
    import nbformat

    parser = argparse.ArgumentParser("notebooks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name, notebook in run_all(wanted.only, Path(folder)):
            nbformat.write(neutral(notebook), NOTEBOOKS / f"{name}.ipynb")
            print(f"{name}: {len(notebook.cells)} cells")
    return 0


def run_all(names: Sequence[str], folder: Path) -> Iterator[tuple[str, Any]]:
    """Run notebooks, the ones without a cluster first, and yield each with its outputs."""
    for name in names:
        if name not in ON_CLUSTER:
            yield name, run_here(name, folder / name)
    if there := [name for name in names if name in ON_CLUSTER]:
        with place_for_notebooks(folder, port=5000) as place:
            yield from ((name, place.run(name)) for name in there)


def neutral(notebook: Any) -> Any:
    """Remove this machine's details from a notebook that has run."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = _without_machine(output.text)
            if "traceback" in output:
                output.traceback = [_without_machine(text) for text in output.traceback]
            for kind, text in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output.data[kind] = _without_machine(text)
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("text") != ""]
    return notebook


def _without_machine(text: str) -> str:
    for pattern, instead in OF_THIS_MACHINE.items():
        text = re.sub(pattern, instead, text)
    return text


if __name__ == "__main__":
    sys.exit(main())
