"""PyTorch's tutorial for FSDP: a script that starts its processes, at its own address."""

import argparse
import functools
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from synthetic import ResNet, images
from torch import optim
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def train(model, rank, loader, optimizer, epoch):
    model.train()
    total = torch.zeros(2)
    loader.sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target, reduction="sum")
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item(), len(data)])
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch} loss {total[0] / total[1]:.4f}")


def test(model, rank, loader):
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for data, target in loader:
            found = model(data).argmax(dim=1).eq(target).sum().item()
            total += torch.tensor([found, len(data)])
    dist.all_reduce(total)
    if rank == 0:
        print(f"accuracy {total[0] / total[1]:.2f}")


def main(rank, world_size, args):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = args.port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(1)

    loaders = []
    for data in (images(), images(seed=1)):
        sampler = DistributedSampler(data, rank=rank, num_replicas=world_size)
        loaders.append(DataLoader(data, batch_size=32, sampler=sampler, num_workers=1))
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    model = FSDP(ResNet(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    for epoch in (1, 2):
        train(model, rank, loaders[0], optimizer, epoch)
        test(model, rank, loaders[1])

    dist.barrier()
    states = model.state_dict()
    if rank == 0:
        torch.save(states, args.save_model)
    dist.destroy_process_group()
    # The interpreter's finalization may abort the process: gloo's threads still release tensors.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", default="12355")
    parser.add_argument("--save-model", default="model.pt")
    world_size = 2
    mp.spawn(main, args=(world_size, parser.parse_args()), nprocs=world_size, join=True)
