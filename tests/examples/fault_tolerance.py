"""Ray Train's example of fault tolerance: it fails once, resumes, and is continued by name."""

import os
import tempfile

import torch
from synthetic import ConvNet, images, print_accuracy
from torch.nn import CrossEntropyLoss
from torch.utils.data import DataLoader

from distributor import train
from distributor.train.torch import TorchTrainer, prepare_data_loader, prepare_model


def train_func(config):
    model = ConvNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    start = 0
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            model.load_state_dict(torch.load(os.path.join(folder, "model.pt")))
            optimizer.load_state_dict(torch.load(os.path.join(folder, "optimizer.pt")))
            start = torch.load(os.path.join(folder, "extra.pt"))["epoch"] + 1
    model = prepare_model(model)
    loader = prepare_data_loader(DataLoader(images(), batch_size=32, shuffle=True))
    criterion = CrossEntropyLoss()

    for epoch in range(start, config["epochs"]):
        loader.sampler.set_epoch(epoch)
        for pixels, labels in loader:
            loss = criterion(model(pixels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        metrics = {"loss": loss.item(), "epoch": epoch, "start": start}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if train.get_context().get_world_rank() == 0:
                torch.save(model.module.state_dict(), os.path.join(folder, "model.pt"))
                torch.save(optimizer.state_dict(), os.path.join(folder, "optimizer.pt"))
                torch.save({"epoch": epoch}, os.path.join(folder, "extra.pt"))
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report(metrics, checkpoint=checkpoint)
        if epoch == 1 and start == 0:
            raise RuntimeError("fails once")


def make_trainer(epochs):
    return TorchTrainer(
        train_func,
        train_loop_config={"epochs": epochs, "lr": 0.01},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            storage_path=os.path.abspath("results"),
            name="fault_tolerance",
            failure_config=train.FailureConfig(max_failures=1),
            checkpoint_config=train.CheckpointConfig(
                num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min"
            ),
        ),
    )


if __name__ == "__main__":
    make_trainer(epochs=3).fit()
    result = make_trainer(epochs=4).fit()
    print_accuracy(result.checkpoint, "model.pt")
