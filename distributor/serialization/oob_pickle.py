"""Pickles with their large buffers beside them in one file, which is mapped to be read.

A file contains the pickle, each buffer (aligned), the offset and size of each buffer, and a trailer
with their number. Large tensors and arrays are loaded as views of the mapped file:
nothing is copied until a page is written to, and then only that page.

CUDA tensors are pickled as CPU tensors: the process that loads them may have no GPU, or others, and
loading must not initialize CUDA there.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
import pkgutil
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any, BinaryIO

from distributor._compat import torch as private
from distributor.core.processes import lacking_for_memory_files
from distributor.serialization import code_pickle

PROTOCOL = 5
# Bytes from which a buffer is stored beside the pickle; smaller ones are part of the pickle.
LARGE_BUFFER = 64 * 1024
ALIGNMENT = 64
_PLACE = struct.Struct("<QQ")
_TRAILER = struct.Struct("<Q8s")
_MAGIC = b"parcel 1"
_REBUILDER = f"{private.__name__}:{private.rebuild_tensor_of_bytes.__name__}"


def anonymous_file() -> BinaryIO:
    """Open a file without a name, in memory if the system supports that."""
    if not lacking_for_memory_files():
        return os.fdopen(os.memfd_create("distributor"), "w+b")
    return tempfile.TemporaryFile()


def give_back(file: BinaryIO, length: int) -> None:
    """Free the space of the first bytes of an anonymous file, whose length does not change."""
    keep_size_and_punch_hole = 0x01 | 0x02
    if sys.platform == "linux":
        offset, size = ctypes.c_int64(0), ctypes.c_int64(length)
        ctypes.CDLL(None).fallocate(file.fileno(), keep_size_and_punch_hole, offset, size)


class Pickler(code_pickle.Pickler):
    """Pickles tensors like arrays: a storage is a buffer, once for all tensors that share it."""

    def __init__(self, file: BinaryIO, in_band: bool = False) -> None:
        super().__init__(
            file, protocol=PROTOCOL, buffer_callback=None if in_band else self._keep_in
        )
        self.buffers: list[pickle.PickleBuffer] = []
        self._storages: dict[tuple[int, int], Any] = {}

    def _keep_in(self, buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < LARGE_BUFFER:
            return True
        self.buffers.append(buffer)
        return False

    def reducer_override(self, obj: Any) -> Any:
        if type(obj).__module__ == "torch.storage" and (reduced := self._reduce_storage(obj)):
            return reduced
        if type(obj) is FunctionType and private.is_rebuilder_of_bytes(obj):
            return pkgutil.resolve_name, (_REBUILDER,)
        return super().reducer_override(obj)

    def _reduce_storage(self, obj: Any) -> tuple[Any, ...] | None:
        """Reduce a storage in CPU or CUDA memory to a buffer; None leaves others to torch."""
        is_typed = private.is_typed_storage(obj)
        storage = private.untyped_storage(obj) if is_typed else obj
        address, size = storage.data_ptr(), storage.nbytes()
        if storage.device.type not in ("cpu", "cuda") or (size and not address):
            return None
        if size:  # storages of one memory may be several objects: the pickle must see one
            storage = self._storages.setdefault((address, size), storage)
        if is_typed:
            return private.typed_storage, (storage, obj.dtype)
        if storage is not obj:
            return _itself, (storage,)
        if not size:
            return _empty_storage, ()
        on_cpu = storage.cpu()  # itself, or a copy if it is in CUDA memory
        memory = (ctypes.c_char * size).from_address(on_cpu.data_ptr())
        memory.owner = on_cpu  # which must live as long as the view
        return _untyped_storage, (pickle.PickleBuffer(memory),)


def pack(obj: object, file: BinaryIO) -> None:
    """Write an object to an empty file."""
    pickler = Pickler(file)
    pickler.dump(obj)
    write_buffers(file, pickler.buffers)


def dumps(obj: object) -> bytes:
    """Pickle an object alone, without a file; ``pickle.loads`` loads it."""
    buffer = io.BytesIO()
    Pickler(buffer, in_band=True).dump(obj)
    return buffer.getvalue()


def write_buffers(file: BinaryIO, buffers: Sequence[pickle.PickleBuffer]) -> None:
    """Write the buffers and their index after a pickle."""
    for piece in pieces(file.tell(), buffers):
        file.write(piece)
    file.flush()


def pieces(offset: int, buffers: Sequence[pickle.PickleBuffer]) -> Iterator[bytes | memoryview]:
    """Yield what follows a pickle that ends at an offset: the buffers, aligned, and their index."""
    places = []
    for buffer in buffers:
        memory = buffer.raw()
        padding = -offset % ALIGNMENT
        offset += padding
        places.append(_PLACE.pack(offset, memory.nbytes))
        offset += memory.nbytes
        yield bytes(padding)
        yield memory
    yield b"".join(places) + _TRAILER.pack(len(places), _MAGIC)


def unpack(file: int) -> Any:
    """Load the object from a file."""
    mapped = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    return pickle.Unpickler(mapped, buffers=_buffers(memoryview(mapped))).load()


def _buffers(view: memoryview) -> list[memoryview]:
    if len(view) < _TRAILER.size:
        raise EOFError("the file is too short")
    count, magic = _TRAILER.unpack(view[-_TRAILER.size :])
    if magic != _MAGIC:
        raise EOFError("the file has no end")
    start = len(view) - _TRAILER.size - count * _PLACE.size
    places = _PLACE.iter_unpack(view[start : len(view) - _TRAILER.size])
    return [view[offset : offset + size] for offset, size in places]


def _untyped_storage(buffer: Any) -> Any:
    import torch

    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    copied_already = isinstance(buffer, (bytes, bytearray))
    return (tensor.clone() if copied_already else tensor).untyped_storage()


def _itself(storage: Any) -> Any:
    return storage


def _empty_storage() -> Any:
    import torch

    storage: Any = torch.UntypedStorage  # whose constructor has no types
    return storage(0)
