"""Ray Train's example for Lightning with FSDP: sharded checkpoints; it fails once, and resumes."""

import os

import lightning.pytorch as pl
import torch
from lightning_trainer import FailAt, ImageClassifier
from synthetic import images
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader

from distributor import train
from distributor.train.lightning import (
    RayFSDPStrategy,
    RayLightningEnvironment,
    RayTrainReportCallback,
    prepare_trainer,
)
from distributor.train.torch import TorchTrainer, get_device


class FSDPOnCPUs(FSDP):
    """Lightning leaves it to FSDP to find the device, and FSDP does not find the CPU."""

    def __init__(self, *args, device_id=None, **kwargs):
        super().__init__(*args, device_id=get_device(), **kwargs)


class ShardedClassifier(ImageClassifier):
    def validation_step(self, batch, batch_index):
        pixels, labels = batch
        found = self.model(pixels).argmax(dim=1)
        self.log("accuracy", (found == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.trainer.model.parameters(), lr=0.01)


def train_func(config):
    if get_device().type == "cpu":
        torch.distributed.fsdp.FullyShardedDataParallel = FSDPOnCPUs
    checkpoint = train.get_checkpoint()
    model = ShardedClassifier()
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        strategy=RayFSDPStrategy(state_dict_type="sharded"),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback(), FailAt(None if checkpoint else 1)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    loader = DataLoader(images(), batch_size=32, shuffle=True)
    test_loader = DataLoader(images(seed=1), batch_size=32)
    if checkpoint:
        with checkpoint.as_directory() as folder:
            path = os.path.join(folder, RayTrainReportCallback.CHECKPOINT_NAME)
            trainer.fit(model, loader, test_loader, ckpt_path=path)
    else:
        trainer.fit(model, loader, test_loader)


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"epochs": 3},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            storage_path=os.path.abspath("results"),
            name="lightning_fsdp",
            failure_config=train.FailureConfig(max_failures=1),
        ),
    )
    result = trainer.fit()
    print(f"accuracy {result.metrics['accuracy']:.2f}")
