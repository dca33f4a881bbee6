"""Kinds of GPUs, as ``serverless_gpu.compute`` names them."""

from distributor.node.gpus import GPUType

__all__ = ["GPUType"]
