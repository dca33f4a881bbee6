"""Ray Train's example for Lightning: it fails in the second epoch, and resumes."""

import os

import lightning.pytorch as pl
import torch
from synthetic import ConvNet, accuracy, images
from torch.nn import functional as F
from torch.utils.data import DataLoader

from distributor import train
from distributor.train.lightning import (
    RayDDPStrategy,
    RayLightningEnvironment,
    RayTrainReportCallback,
    prepare_trainer,
)
from distributor.train.torch import TorchTrainer


class ImageClassifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = ConvNet()

    def forward(self, pixels):
        return self.model(pixels)

    def training_step(self, batch, batch_index):
        pixels, labels = batch
        loss = F.cross_entropy(self(pixels), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class FailAt(pl.Callback):
    def __init__(self, epoch):
        self.epoch = epoch

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == self.epoch:
            raise RuntimeError("fails once")


def train_func(config):
    loader = DataLoader(images(), batch_size=32, shuffle=True)
    checkpoint = train.get_checkpoint()
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        devices="auto",
        accelerator="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback(), FailAt(None if checkpoint else 1)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    model = ImageClassifier()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            path = os.path.join(folder, RayTrainReportCallback.CHECKPOINT_NAME)
            trainer.fit(model, train_dataloaders=loader, ckpt_path=path)
    else:
        trainer.fit(model, train_dataloaders=loader)


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"epochs": 3},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            storage_path=os.path.abspath("results"),
            name="lightning_trainer",
            failure_config=train.FailureConfig(max_failures=1),
        ),
    )
    result = trainer.fit()

    with result.checkpoint.as_directory() as folder:
        path = os.path.join(folder, RayTrainReportCallback.CHECKPOINT_NAME)
        model = ImageClassifier.load_from_checkpoint(path)
    print(f"accuracy {accuracy(model, images(seed=1)):.2f}")
