"""A small T5 learns to continue Python's own documentation, sharded by FSDP.

Run it on two ranks of this machine, or with ``local_mode=False`` on a Spark cluster:

    TorchDistributor(2, use_gpu=False, storage_path="results", name="t5").run(
        "notebooks/t5.py", "--epochs", "2", "--save"
    )

Nothing is downloaded: the model is small and randomly initialized, its tokens are bytes, and the
text is that of Python's ``help()``.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from functools import partial
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

from distributor import train
from distributor.train.torch import get_device, prepare_data_loader, prepare_model

SEEN, CONTINUED = 96, 32
"""Bytes of the encoder's input, and of the continuation that the decoder learns."""


warnings.filterwarnings("ignore", module="torch.distributed")  # FSDP's warnings about its own calls


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank and step")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--gamma", type=float, default=0.7, help="factor by which lr decays each epoch"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="report checkpoints to storage_path")
    return parser.parse_args()


def make_samples(count: int) -> Any:
    """Split the text into samples of an input and its continuation."""
    text = " ".join(" ".join(topics.values()).split()).encode("ascii", "ignore").decode()
    size = SEEN + CONTINUED
    pieces = [text[start : start + size] for start in range(0, len(text) - size, size)][:count]
    seen = tokens_of([piece[:SEEN] for piece in pieces])
    follows = tokens_of([piece[SEEN:] for piece in pieces])
    return [{"input_ids": one, "labels": other} for one, other in zip(seen, follows, strict=True)]


def tokens_of(texts: list[str]) -> torch.Tensor:
    """Return the tokens of texts of equal length, whose characters are bytes."""
    tokens: torch.Tensor = ByT5Tokenizer()(texts, return_tensors="pt")["input_ids"]
    return tokens


def make_model() -> torch.nn.Module:
    """Create the model and shard it block by block.

    The embeddings, which encoder and decoder share, stay in the outermost unit.
    """
    config = T5Config(
        vocab_size=384,  # bytes, and T5's special tokens
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
    options = {
        "auto_wrap_policy": policy,
        "mixed_precision": bfloat16_where_it_is(),
        "sharding_strategy": ShardingStrategy.FULL_SHARD,  # SHARD_GRAD_OP: keeps full weights
        "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
    }
    model = T5ForConditionalGeneration(config)
    return prepare_model(model, parallel_strategy="fsdp", parallel_strategy_kwargs=options)


def bfloat16_where_it_is() -> MixedPrecision | None:
    """Return a policy that computes in bfloat16 on GPUs that support it."""
    if not torch.cuda.is_available() or not torch.cuda.is_bf16_supported():
        return None
    half = torch.bfloat16
    return MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half)


def train_one_epoch(model: torch.nn.Module, loader: Any, optimizer: Any) -> float:
    model.train()
    total = torch.zeros(2, device=get_device())
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        total += torch.stack([loss.detach().float(), torch.ones_like(total[0])])
    return mean_of_ranks(total)


def validate(model: torch.nn.Module, loader: Any) -> float:
    model.eval()
    total = torch.zeros(2, device=get_device())
    with torch.no_grad():
        for batch in loader:
            loss = model(**batch).loss
            total += torch.stack([loss.float(), torch.ones_like(total[0])])
    return mean_of_ranks(total)


def mean_of_ranks(sum_and_count: torch.Tensor) -> float:
    if dist.is_initialized():  # a single rank needs no group
        dist.all_reduce(sum_and_count)
    total, count = sum_and_count.tolist()
    return float(total / count)


def state_of(model: Any, optimizer: Any, scheduler: Any, epoch: int) -> dict[str, Any]:
    """Return the state of a checkpoint, with this rank's shards."""
    weights, moments = get_state_dict(model, optimizer)
    states = {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict()}
    return {**states, "epoch": epoch}


def save(model: Any, optimizer: Any, scheduler: Any, metrics: dict[str, Any]) -> None:
    """Report metrics, with this rank's part of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(state_of(model, optimizer, scheduler, metrics["epoch"]), checkpoint_id=folder)
        train.report(metrics, checkpoint=train.Checkpoint.from_directory(folder))


def load(model: Any, optimizer: Any, scheduler: Any) -> int:
    """Resume from the latest checkpoint, if there is one; return the number of its epoch."""
    checkpoint = train.get_checkpoint()
    state = state_of(model, optimizer, scheduler, epoch=0)
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        scheduler.load_state_dict(state["scheduler"])
    return int(state["epoch"])


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    samples = make_samples(args.samples)
    held_out = len(samples) // 10
    loader = DataLoader(samples[held_out:], args.batch_size, shuffle=True)
    loader = prepare_data_loader(loader)
    validation_loader = prepare_data_loader(DataLoader(samples[:held_out], args.batch_size))

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    trained = load(model, optimizer, scheduler) if args.save else 0
    for epoch in range(trained + 1, args.epochs + 1):
        loader.sampler.set_epoch(epoch)
        loss = train_one_epoch(model, loader, optimizer)
        scheduler.step()
        validation_loss = validate(model, validation_loader)
        if train.get_context().get_world_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f}, validation loss {validation_loss:.3f}")
        if args.save:
            metrics = {"epoch": epoch, "loss": loss, "validation_loss": validation_loss}
            save(model, optimizer, scheduler, metrics)


if __name__ == "__main__":
    main()
