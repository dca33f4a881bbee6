"""The documentation of databricks.air: two ranks train a model, which is saved with DCP."""

import glob
import os

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pyspark.sql import SparkSession
from synthetic import ConvNet, accuracy, images
from torch.nn import CrossEntropyLoss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam
from torch.utils.data import DataLoader

from distributor.air import distributed, runtime
from distributor.train.torch import prepare_data_loader

# Executors train if there is a Spark session.
REMOTE = SparkSession.getActiveSession() is not None
FOLDER = os.path.abspath("results/databricks_air")


@distributed(num_accelerators=2, remote=REMOTE, timeout=120, use_gpu=False)
def train(folder, epochs, lr=0.01):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(ConvNet())
    optimizer = Adam(model.parameters(), lr=lr)
    criterion = CrossEntropyLoss()
    loader = prepare_data_loader(DataLoader(images(), batch_size=32, shuffle=True))
    state = {"model": model.module.state_dict()}
    if start := len(glob.glob(f"{folder}/epoch-*")):
        dcp.load(state, checkpoint_id=f"{folder}/epoch-{start - 1}")
        model.module.load_state_dict(state["model"])
    for epoch in range(start, epochs):
        for pixels, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(pixels), labels)
            loss.backward()
            optimizer.step()
        dcp.save(state, checkpoint_id=f"{folder}/epoch-{epoch}")
        if runtime.get_global_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f} on {runtime.get_node_ip()}")
    dist.destroy_process_group()
    return [*range(start, epochs)]


if __name__ == "__main__":
    print("trained", *train.distributed(FOLDER, epochs=2))
    print("continued", *train.with_overrides(num_accelerators=1).distributed(FOLDER, epochs=3))

    model = ConvNet()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=f"{FOLDER}/epoch-2", no_dist=True)
    model.load_state_dict(state["model"])
    print(f"accuracy {accuracy(model, images(seed=1)):.2f}")
