"""The files of a folder as training data, under the names of ``serverless_gpu.data``."""

from distributor.air.data import (
    Checkpointable,
    DataLoader,
    UCVolumeDataset,
    UCVolumeReader,
    UCVolumeWriter,
)

__all__ = ["Checkpointable", "DataLoader", "UCVolumeDataset", "UCVolumeReader", "UCVolumeWriter"]
