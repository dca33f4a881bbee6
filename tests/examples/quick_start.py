"""Ray Train's quick start for PyTorch: each rank reports a checkpoint at the end of each epoch."""

import os
import tempfile

import torch
from synthetic import ConvNet, images, print_accuracy
from torch.nn import CrossEntropyLoss
from torch.optim import Adam
from torch.utils.data import DataLoader

import distributor as ray
import distributor.train.torch


def train_func():
    model = ray.train.torch.prepare_model(ConvNet())
    criterion = CrossEntropyLoss()
    optimizer = Adam(model.parameters(), lr=0.01)
    loader = DataLoader(images(), batch_size=32, shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)

    for epoch in range(3):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for pixels, labels in loader:
            loss = criterion(model(pixels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        metrics = {"loss": loss.item(), "epoch": epoch}
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.module.state_dict(), os.path.join(folder, "model.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint)
        if ray.train.get_context().get_world_rank() == 0:
            print(metrics)


if __name__ == "__main__":
    scaling_config = ray.train.ScalingConfig(num_workers=2, use_gpu=False)
    run_config = ray.train.RunConfig(
        storage_path=os.path.abspath("results"),
        name="quick_start",
        checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
    )
    trainer = ray.train.torch.TorchTrainer(
        train_func, scaling_config=scaling_config, run_config=run_config
    )
    result = trainer.fit()
    print_accuracy(result.checkpoint, "model.pt")
