"""A model that an executor's Python workers share: loaded once, and its tensors in memory once.

The first worker loads the model and saves it in the executor's local folder. All map that file, so
that its pages, which the kernel may drop and read again, are the tensors. There is no process to
end, and nothing to free: Spark removes the folder with the executor.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch

from distributor.core.files import atomic_path, lock_exclusively, private_folder
from distributor.core.resources import spark_local_dirs
from distributor.serialization import code_pickle

T = TypeVar("T")
MAX_FILES = 4  # of an executor: those used last
LOADING_SECONDS = 3600.0
"""Seconds to wait for another Python worker of the executor that loads the same model."""


def load_once(key: str, load: Callable[[], T]) -> T:
    """Return what `load` returns, which only one of an executor's Python workers calls.

    The others call it too if there are no tensors in what it returns, such as in a function that
    uses a global variable, or if that cannot be pickled.
    """
    folder = _folder()
    if folder is None:
        return load()
    path = folder / key
    if not path.exists():
        with _locked(folder / f"{key}.lock"):
            if not path.exists():
                value = load()
                if not _saved(value, path):
                    return value
                del value  # its memory, before the file is mapped
                _remove_oldest(folder)
    with contextlib.suppress(FileNotFoundError):  # removed by a worker that has loaded another one
        if path.stat().st_size:
            os.utime(path)
            return cast(T, _mapped(path))
    return load()


def _folder() -> Path | None:
    for folder in spark_local_dirs():
        with contextlib.suppress(OSError):
            return private_folder(Path(folder, "distributor-models"))
    return None


class _Settings(NamedTuple):
    """Settings of torch, which `load` may have changed in its process."""

    num_threads: int
    matmul_precision: str
    default_dtype: torch.dtype

    @classmethod
    def current(cls) -> _Settings:
        precision = torch.get_float32_matmul_precision()
        return cls(torch.get_num_threads(), precision, torch.get_default_dtype())

    def apply(self) -> None:
        torch.set_num_threads(self.num_threads)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.set_default_dtype(self.default_dtype)


def _saved(value: Any, path: Path) -> bool:
    """Save a model for the other workers, or an empty file if they must load it themselves."""
    try:
        with atomic_path(path) as partial:
            torch.save(
                (value, _Settings.current()),
                partial,
                pickle_module=code_pickle,
                pickle_protocol=pickle.HIGHEST_PROTOCOL,
            )
            with zipfile.ZipFile(partial) as file:
                has_tensors = any("/data/" in name for name in file.namelist())
            if has_tensors:
                _mapped(partial)
            else:
                partial.write_bytes(b"")
        return has_tensors
    except Exception as error:  # of any type: the model's classes may pickle themselves
        print(
            "distributor.data.predict: the model cannot be shared, so that each Python worker "
            f"loads its own ({type(error).__name__}: {error}).",
            file=sys.stderr,
        )
        path.touch()
        return False


def _mapped(path: Path) -> Any:
    # Pages are copied once a process writes to them.
    value, settings = torch.load(path, mmap=True, weights_only=False)
    settings.apply()
    return value


def _remove_oldest(folder: Path) -> None:
    # Those with a suffix are locks, and files that other workers write now.
    files = [path for path in folder.iterdir() if not path.suffix]
    with contextlib.suppress(FileNotFoundError):  # another worker removes them too
        for path in sorted(files, key=lambda path: path.stat().st_mtime)[:-MAX_FILES]:
            path.unlink()  # workers that have mapped it keep it


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        lock_exclusively(
            file.fileno(),
            LOADING_SECONDS,
            f"Another Python worker of this executor on {socket.gethostname()} has been "
            f"loading the model for more than {LOADING_SECONDS:g} s. If load hangs there, "
            "the executor's stderr, or a stack of that process, shows where.",
        )
        yield
