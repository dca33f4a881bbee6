"""Stages in storage: Spark's metadata, and a file of torch with everything else."""

from __future__ import annotations

import io
from typing import Any, TypeVar

import torch
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWriter

from distributor._compat import pyspark_ml as private
from distributor._compat.pyspark import is_connect_session
from distributor.errors import UnpicklableError
from distributor.filesystems import native, resolve
from distributor.serialization import code_pickle
from distributor.serialization.pickle_diagnostics import explain_parts

FILE = "torch.pt"
T = TypeVar("T", bound="MLReadable[Any]")


class StageWriter(MLWriter):
    """Saves the Params of a stage as Spark does, and its parts by torch."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:
        parts = self.instance.parts()
        file = io.BytesIO()
        try:
            torch.save(parts, file, pickle_module=code_pickle)
        except Exception as error:
            raise UnpicklableError(explain_parts(parts) or str(error)) from error
        DefaultParamsWriter.saveMetadata(self.instance, path, _context(self.sparkSession))
        filesystem, target = _file_in(self.sparkSession, path)
        with filesystem.open_output_stream(target) as stream:
            stream.write(file.getbuffer())


class StageReader(MLReader[T]):
    """Loads what a `StageWriter` has saved."""

    def __init__(self, kind: type[T]) -> None:
        super().__init__()
        self.kind = kind

    def load(self, path: str) -> T:
        name = f"{self.kind.__module__}.{self.kind.__name__}"
        context = _context(self.sparkSession)
        metadata = DefaultParamsReader.loadMetadata(path, context, expectedClassName=name)
        filesystem, source = _file_in(self.sparkSession, path)
        with filesystem.open_input_file(source) as file:
            parts = torch.load(file, map_location="cpu", weights_only=False)
        instance = self.kind(**parts)
        private.reset_uid(instance, metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        return instance


def _context(spark: Any) -> Any:
    # PySpark 3.5 reads and writes metadata with the context, which Connect does not have.
    return spark if is_connect_session(spark) else spark.sparkContext


def _file_in(spark: Any, path: str) -> tuple[Any, Any]:
    """Return the file system of a stage's folder, which Spark's configuration chooses, and a file.

    Through Connect it is the one that the path names on this machine.
    """
    address = path if is_connect_session(spark) else private.qualified(spark.sparkContext, path)
    filesystem, folder = resolve(address)
    return filesystem, native(filesystem, f"{folder}/{FILE}")
