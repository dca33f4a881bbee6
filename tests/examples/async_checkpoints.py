"""Ray Train's example of asynchronous checkpoints and validation, while the training goes on."""

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
                validation=train.ValidationTaskConfig(fn_kwargs={"seed": 1}),
            )
        else:
            train.report(metrics, None)
    reported = train.get_all_reported_checkpoints()
    return [each.metrics["epoch"] for each in reported]


def validate(checkpoint, seed):
    model = ResNet()
    with checkpoint.as_directory() as folder:
        model.load_state_dict(torch.load(os.path.join(folder, "model.pt")))
    return {"accuracy": accuracy(model, images(seed=seed))}


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_func,
        validation_config=train.ValidationConfig(fn=validate),
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            storage_path=os.path.abspath("results"), name="async_checkpoints"
        ),
    )
    result = trainer.fit()
    print(f"epochs {result.return_value}")

    validated = [metrics["accuracy"] for _, metrics in result.best_checkpoints]
    print(f"validated {len(validated)}")
    print(f"accuracy {validated[-1]:.2f}")
