"""TRL's script for LoRA, on Spark's executors and under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.pages import PAGES, python_blocks
from support.waiting import DEADLINE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.spark,
    pytest.mark.skipif(not (find_spec("trl") and find_spec("peft")), reason="TRL is not installed"),
]

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "trl.scripts.sft"]
DISTRIBUTOR = ["-m", "distributor", "run", "--cluster", "--master=local-cluster[2,1,1024]"]
DISTRIBUTOR += ["--nproc=2", "--cpu", "-m", "trl.scripts.sft", "--"]


def test_the_losses_of_trl_are_those_under_torchrun(spark: Any, tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(python_blocks(PAGES / "how-to" / "fine-tune.md")[0].source, names)  # makes a base model
    data = tmp_path / "data"
    data.mkdir()
    rows = (json.dumps({"text": text}) for text in names["texts"])
    (data / "train.jsonl").write_text("\n".join(rows))
    options = f"""
        --model_name_or_path {names["base"]} --dataset_name {data} --use_peft
        --lora_target_modules q_proj v_proj --learning_rate 1e-2 --max_steps 6
        --per_device_train_batch_size 4 --logging_steps 1 --save_steps 6 --use_cpu --bf16 False
        --report_to none --log_on_each_node False
    """.split()
    losses = []
    for number, command in enumerate((TORCHRUN, DISTRIBUTOR)):
        output = tmp_path / str(number)
        done = subprocess.run(
            [sys.executable, *command, *options, "--output_dir", str(output)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        state = json.loads((output / "checkpoint-6" / "trainer_state.json").read_text())
        losses.append([log["loss"] for log in state["log_history"] if "loss" in log])
    under_torchrun, on_executors = losses
    assert len(on_executors) == 6
    assert on_executors == under_torchrun
    assert (output / "adapter_model.safetensors").exists()
