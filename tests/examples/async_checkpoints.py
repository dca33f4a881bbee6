"""Ray Train's example of asynchronous checkpoints: rank 0 goes on while its files are uploaded."""

import os
import tempfile

import torch
from synthetic import ResNet, accuracy, images
from torch.nn import CrossEntropyLoss
from torch.utils.data import DataLoader

from distributor import train
from distributor.train.torch import TorchTrainer, prepare_data_loader, prepare_model


def train_func():
    model = prepare_model(ResNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = prepare_data_loader(DataLoader(images(), batch_size=32, shuffle=True))
    criterion = CrossEntropyLoss()

    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for pixels, labels in loader:
            loss = criterion(model(pixels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        metrics = {"loss": loss.item(), "epoch": epoch}
        if train.get_context().get_world_rank() == 0:
            folder = tempfile.mkdtemp()  # removed once it has been uploaded
            torch.save(model.module.state_dict(), os.path.join(folder, "model.pt"))
            train.report(
                metrics,
                checkpoint=train.Checkpoint.from_directory(folder),
                checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC,
                checkpoint_dir_name=f"epoch_{epoch}",
            )
        else:
            train.report(metrics, None)
    reported = train.get_all_reported_checkpoints()
    return [each.metrics["epoch"] for each in reported]


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_func,
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            storage_path=os.path.abspath("results"), name="async_checkpoints"
        ),
    )
    result = trainer.fit()
    print(f"epochs {result.return_value}")

    model = ResNet()
    with result.checkpoint.as_directory() as folder:
        model.load_state_dict(torch.load(os.path.join(folder, "model.pt")))
    print(f"accuracy {accuracy(model, images(seed=1)):.2f}")
