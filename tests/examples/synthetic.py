"""Small models, and data that they learn in two epochs: a module beside the examples."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

CLASSES = 4


def images(count=256, seed=0):
    """Noisy images of 8×8 pixels; a bright quadrant is the label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    pixels = torch.randn(count, 1, 8, 8, generator=generator) / 2
    for label in range(CLASSES):
        row, column = 4 * (label // 2), 4 * (label % 2)
        pixels[labels == label, :, row : row + 4, column : column + 4] += 1
    return TensorDataset(pixels, labels)


def sentences(count=128):
    """Sequences that count up; the label is the parity of their first number."""
    rows = [(torch.arange(6) + start) % 16 for start in range(count)]
    return [{"input_ids": row, "labels": int(row[0]) % 2} for row in rows]


def accuracy(model, data):
    """Return the share of labels that a model finds."""
    pixels, labels = data.tensors
    model.eval()
    with torch.no_grad():
        found = model(pixels).argmax(dim=1)
    return (found == labels).float().mean().item()


class ConvNet(nn.Sequential):
    """A small network for `images`; its batch norm has statistics of its own on each rank."""

    def __init__(self, width=8):
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * width, CLASSES),
        )


def print_accuracy(checkpoint, file):
    """Print the accuracy of the network that a file of a checkpoint has."""
    model = ConvNet()
    with checkpoint.as_directory() as folder:
        model.load_state_dict(torch.load(f"{folder}/{file}"))
    print(f"accuracy {accuracy(model, images(seed=1)):.2f}")
