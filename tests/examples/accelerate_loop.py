"""Ray Train's example for Accelerate: only the main process saves; the others report no files."""

import os
import tempfile

import torch
from accelerate import Accelerator
from synthetic import ConvNet, images, print_accuracy
from torch.nn import CrossEntropyLoss
from torch.utils.data import DataLoader

from distributor import train
from distributor.train.torch import TorchTrainer, prepare_data_loader


def train_func(config):
    accelerator = Accelerator()
    model = ConvNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    loader = DataLoader(images(), batch_size=32, shuffle=True)
    if config["shards"]:
        loader = prepare_data_loader(loader)  # Accelerate takes it as it is
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    criterion = CrossEntropyLoss()

    for epoch in range(config["epochs"]):
        model.train()
        seen = 0
        for pixels, labels in loader:
            loss = criterion(model(pixels), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen += len(labels)
        losses = accelerator.gather(loss.detach()[None])
        metrics = {"epoch": epoch, "loss": losses.mean().item(), "seen": seen}

        with tempfile.TemporaryDirectory() as folder:
            state = accelerator.unwrap_model(model).state_dict()
            accelerator.save(state, os.path.join(folder, "model.bin"))
            train.report(metrics, checkpoint=train.Checkpoint.from_directory(folder))


if __name__ == "__main__":
    for name, shards in [("accelerate_loop", False), ("accelerate_shards", True)]:
        trainer = TorchTrainer(
            train_func,
            train_loop_config={"lr": 0.01, "epochs": 3, "shards": shards},
            scaling_config=train.ScalingConfig(num_workers=2),
            run_config=train.RunConfig(storage_path=os.path.abspath("results"), name=name),
        )
        result = trainer.fit()
        print_accuracy(result.checkpoint, "model.bin")
