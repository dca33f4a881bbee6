"""The documentation of databricks.air: files of a folder train a model, which is saved with DCP."""

import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pyspark.sql import SparkSession
from synthetic import ResNet, accuracy, images
from torch.nn import CrossEntropyLoss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from distributor.air import distributed, runtime
from distributor.air.data import DataLoader, UCVolumeDataset, UCVolumeReader, UCVolumeWriter

# Executors train if there is a Spark session.
REMOTE = SparkSession.getActiveSession() is not None
VOLUME = os.path.abspath("results/databricks_air")


def read(paths):
    saved = [torch.load(path) for path in paths]
    return [torch.cat(parts) for parts in zip(*saved, strict=True)]


@distributed(num_accelerators=2, remote=REMOTE, timeout=120, use_gpu=False)
def train(volume, epochs, lr=0.01):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(ResNet())
    optimizer = Adam(model.parameters(), lr=lr)
    criterion = CrossEntropyLoss()
    loader = DataLoader(
        UCVolumeDataset(f"{volume}/images"), batch_size=2, collate_fn=read, num_workers=1
    )
    state = {"model": model.module.state_dict()}
    if start := len(glob.glob(f"{volume}/epoch-*")):
        dcp.load(state, storage_reader=UCVolumeReader(f"{volume}/epoch-{start - 1}"))
        model.module.load_state_dict(state["model"])
    for epoch in range(start, epochs):
        for pixels, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(pixels), labels)
            loss.backward()
            optimizer.step()
        dcp.save(state, storage_writer=UCVolumeWriter(f"{volume}/epoch-{epoch}"))
        if runtime.get_global_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f} on {runtime.get_node_ip()}")
    dist.destroy_process_group()
    return [*range(start, epochs)]


if __name__ == "__main__":
    os.makedirs(f"{VOLUME}/images")
    parts = [tensor.split(16) for tensor in images().tensors]
    for number, part in enumerate(zip(*parts, strict=True)):
        torch.save(part, f"{VOLUME}/images/{number:02}.pt")

    print("trained", *train.distributed(VOLUME, epochs=2))
    print("continued", *train.with_overrides(num_accelerators=1).distributed(VOLUME, epochs=3))

    model = ResNet()
    state = {"model": model.state_dict()}
    dcp.load(state, storage_reader=UCVolumeReader(f"{VOLUME}/epoch-2"), no_dist=True)
    model.load_state_dict(state["model"])
    print(f"accuracy {accuracy(model, images(seed=1)):.2f}")
