"""Makes the figures of the documentation: what a notebook, Spark's UI and MLflow show.

Run as ``PYTHONPATH=tests python docs/figures.py``. A kernel runs the cells below on this machine,
with a tracking server and a local Spark; the browser is that of ``screenshots.py``.
"""

from __future__ import annotations

import html
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from mlflow import MlflowClient
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from screenshots import take, take_with
from support.kernels import kernel_for
from support.tracking_server import tracking_server

FIGURES = Path(__file__).resolve().parent / "_static" / "figures"
DEFINITIONS = """
import distributor, mlflow, torch
import torch.distributed as dist
from distributor import TorchDistributor, runtime
from pyspark.sql import SparkSession

spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.port", "UI_PORT").config("spark.ui.showConsoleProgress", "false")
    .getOrCreate()
)
"""
RUN = """
def train(epochs):
    import time

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.rand(256, 4)
    for epoch in range(1, epochs + 1):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        runtime.progress(epoch, epochs, loss=loss.item())
        time.sleep(0.02)
    print(f"loss {loss.item():.4f}")
    return loss.item()


two_ranks = TorchDistributor(2, local_mode=False, use_gpu=False)
two_ranks.run(train, 200)
"""
FAILURE = """
def divide(rank_that_fails):
    print("dividing")
    return 1 / (runtime.get_global_rank() - rank_that_fails)


two_ranks.run(divide, 1)
"""
STYLE = """
body { font-family: system-ui, sans-serif; font-size: 14px; margin: 16px; background: white }
.highlight { background: #f5f5f5; border: 1px solid #e0e0e0; padding: 4px 12px; margin-bottom: 8px }
pre { margin: 0; font-size: 13px; white-space: pre-wrap }
table { font-size: 13px; border-collapse: collapse } td, th { padding: 2px 8px; text-align: left }
"""
WIDTH = 900
UI_PORT = 4140


def page_of(cell: Any) -> str:
    """Return a page that shows a cell with its outputs, as a notebook does."""
    parts = [highlight(cell.source, PythonLexer(), HtmlFormatter())]
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(f"<pre>{html.escape(output.text)}</pre>")
        elif output.output_type == "error":
            text = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(output.traceback))
            parts.append(f"<pre>{html.escape(text)}</pre>")
        else:
            text = html.escape(output.data["text/plain"])
            parts.append(output.data.get("text/html") or f"<pre>{text}</pre>")
    style = STYLE + HtmlFormatter().get_style_defs(".highlight")
    return f"<!doctype html><meta charset=utf-8><style>{style}</style>{''.join(parts)}"


def main() -> None:
    """Run the cells, and write the figures."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp())
    notebook = nbformat.v4.new_notebook()

    def figure(name: str, height: int, source: str) -> None:
        tags = {"tags": ["raises-exception"]}
        notebook.cells.append(nbformat.v4.new_code_cell(source.strip(), metadata=tags))
        cell = client.execute_cell(notebook.cells[-1], len(notebook.cells) - 1)
        if name:
            page = folder / f"{name}.html"
            page.write_text(page_of(cell))
            take(page.as_uri(), FIGURES / f"{name}.png", WIDTH, height)

    with tracking_server(folder) as uri:
        variables = {"MLFLOW_TRACKING_URI": uri}
        with kernel_for(notebook, folder, variables) as client:
            figure("", 0, DEFINITIONS.replace("UI_PORT", str(UI_PORT)))
            figure("notebook", 600, RUN)
            figure("notebook-failure", 680, FAILURE)
            take(f"http://127.0.0.1:{UI_PORT}/jobs/", FIGURES / "spark-ui.png", 1100, 560)
        run = MlflowClient(uri).search_runs(["0"], order_by=["attributes.start_time"])[0].info
        address = f"{uri}/#/experiments/{run.experiment_id}/runs/{run.run_id}/model-metrics"
        take_with("loss", address, FIGURES / "mlflow.png", 1280, 640)


if __name__ == "__main__":
    main()
