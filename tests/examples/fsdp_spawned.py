"""PyTorch's tutorial for FSDP and DDP: a script that starts its processes, at its own address."""

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
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def setup(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def train(model, rank, loader, optimizer, epoch, sampler):
    model.train()
    total = torch.zeros(2)
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target, reduction="sum")
        loss.backward()
        optimizer.step()
        total[0] += loss.item()
        total[1] += len(data)
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch} loss {total[0] / total[1]:.4f}")


def test(model, rank, loader):
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for data, target in loader:
            total[0] += model(data).argmax(dim=1).eq(target).sum().item()
            total[1] += len(data)
    dist.all_reduce(total)
    if rank == 0:
        print(f"accuracy {total[0] / total[1]:.2f}")


def wrap(model, args):
    if args.ddp:
        return DDP(model)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    return FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))


def main(rank, world_size, args):
    setup(rank, world_size, args.port)
    torch.manual_seed(args.seed)
    train_set, test_set = images(), images(seed=1)
    sampler = DistributedSampler(train_set, rank=rank, num_replicas=world_size, shuffle=True)
    test_sampler = DistributedSampler(test_set, rank=rank, num_replicas=world_size)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, num_workers=1)
    test_loader = DataLoader(test_set, args.batch_size, sampler=test_sampler)

    model = wrap(ResNet(), args)
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(model, rank, loader, optimizer, epoch, sampler)
        test(model, rank, test_loader)
        scheduler.step()

    if args.save_model:
        dist.barrier()
        states = model.state_dict()
        if rank == 0:
            torch.save(states, args.save_model)
    cleanup()
    # The interpreter's finalization may abort the process: gloo's threads still release tensors.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", default="12355")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-model")
    args = parser.parse_args()
    world_size = 2
    mp.spawn(main, args=(world_size, args), nprocs=world_size, join=True)
