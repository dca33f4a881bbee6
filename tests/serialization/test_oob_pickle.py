"""Pickles with out-of-band buffers round-trip, and large buffers are mapped instead of copied."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest

from distributor.serialization.oob_pickle import (
    LARGE_BUFFER,
    Pickler,
    anonymous_file,
    dumps,
    pack,
    unpack,
)

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

MANY = LARGE_BUFFER  # elements, so that the data here has at least LARGE_BUFFER bytes


def round_trip(obj: Any) -> Any:
    with anonymous_file() as file:
        pack(obj, file)
        return unpack(file.fileno())


def size_of(obj: Any) -> int:
    with anonymous_file() as file:
        pack(obj, file)
        return os.fstat(file.fileno()).st_size


TENSORS = {
    "small": lambda: torch.arange(3),
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(2.5),
    "transposed": lambda: torch.arange(2.0 * MANY).reshape(2, MANY).T,
    "slice": lambda: torch.arange(2.0 * MANY)[7:-3:2],
    "sparse": lambda: torch.eye(400).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.rand(MANY), 0.1, 0, torch.qint8),
    "needs grad": lambda: torch.ones(MANY, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.rand(MANY)),
    # of dtypes that have no class of storages
    "float8 parameter": lambda: torch.nn.Parameter(torch.rand(8).to(torch.float8_e5m2)),
    "uint16": lambda: torch.empty(0, 3, dtype=torch.uint16),
    "transposed uint32": lambda: torch.arange(2 * MANY).to(torch.uint32).reshape(2, MANY).T,
    "subclass": lambda: torch.arange(8).to(torch.uint16).as_subclass(Marked),
    "negative": lambda: torch.ones(8, dtype=torch.complex32).conj().imag,
}


class Marked(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
def test_tensors_round_trip(make: Any) -> None:
    given = make()
    in_one_pickle, same = pickle.loads(dumps([given, given]))
    assert in_one_pickle is same
    for found in (round_trip(given), in_one_pickle):
        assert type(found) is type(given)
        for name in ("dtype", "shape", "requires_grad", "layout"):
            assert getattr(found, name) == getattr(given, name)
        if given.layout != torch.strided:
            assert torch.equal(found.to_dense(), given.to_dense())
        elif given.is_quantized:
            assert torch.equal(found.dequantize(), given.dequantize())
        else:
            assert (found.stride(), found.is_neg()) == (given.stride(), given.is_neg())
            assert torch.equal(bits_of(found), bits_of(given))


def random_bits(dtype: torch.dtype, size: int) -> torch.Tensor:
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (16 * size,), dtype=torch.uint8)
    tensor = torch.empty(size, dtype=dtype)
    return tensor.set_(bits.untyped_storage(), 0, (size,), (1,))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def dtypes() -> list[torch.dtype]:
    """Return every dtype but those of quantized tensors, which need a scale."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return [dtype for dtype in found if "qint" not in str(dtype) and "quint" not in str(dtype)]


def test_tensors_of_each_dtype_arrive_bit_for_bit() -> None:
    for dtype in dtypes():
        given = random_bits(dtype, MANY)
        for whole, part in (
            round_trip([given, given[2:]]),
            pickle.loads(dumps([given, given[2:]])),
        ):
            assert whole.dtype == part.dtype == dtype
            assert (whole.shape, whole.stride()) == (given.shape, given.stride())
            assert torch.equal(bits_of(whole), bits_of(given))
            assert whole.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
            assert part.storage_offset() == 2


def test_views_of_one_memory_with_other_dtypes_stay_views_of_one_memory() -> None:
    array = np.arange(8, dtype="uint16")
    weights = torch.from_numpy(array.view("int16"))
    given = [
        torch.from_numpy(array),  # with a storage of its own
        weights,
        weights.view(torch.uint16),
        weights.view(torch.float8_e5m2),
        weights.untyped_storage(),
    ]
    for found in (round_trip(given), round_trip(given[::-1]), pickle.loads(dumps(given))):
        assert len({each.data_ptr() for each in found}) == 1


ARRAYS = {
    "small": lambda: np.arange(3.0),
    "by columns": lambda: np.asfortranarray(np.arange(2.0 * MANY).reshape(2, MANY)),
    "slice": lambda: np.arange(2 * MANY)[::2],
    "records": lambda: np.zeros(MANY, dtype=[("a", "i4"), ("b", "f8")]),
    "text": lambda: np.array(["one", "two"] * MANY),
}


@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS.keys())
def test_arrays_round_trip(make: Any) -> None:
    given = make()
    found = round_trip(given)
    assert found.dtype == given.dtype
    assert found.flags.f_contiguous or not given.flags.f_contiguous
    assert np.array_equal(found, given)
    found[:1] = given[1:2]  # raises if the array is read-only


def test_shared_memory_is_written_once_and_stays_shared() -> None:
    weights = torch.rand(4 * MANY)
    given = {"all": weights, "again": weights, "tail": weights[-3:], "tied": weights.view(2, -1)}
    assert size_of(given) < 1.1 * size_of(weights)
    found = round_trip(given)
    found["all"][-1] = 7.0
    assert [found[name].flatten()[-1].item() for name in given] == [7.0] * 4
    assert weights[-1].item() != 7.0


def test_memory_referenced_only_by_the_pickle_lives_until_it_is_written() -> None:
    class Model:
        def __getstate__(self) -> dict[str, Any]:
            return {"weights": torch.full((MANY,), 3.0)}

    with anonymous_file() as file:
        pickler = Pickler(file)
        pickler.dump(Model())
        buffers = pickler.buffers
        del pickler
        overwriting = [torch.zeros(MANY) for _ in range(20)]
        assert not any(t.any() for t in overwriting)
        assert torch.frombuffer(buffers[0].raw(), dtype=torch.float32).eq(3.0).all()


@pytest.mark.parametrize("lost", [1, 2 * MANY])
def test_a_truncated_file_is_an_error(lost: int) -> None:
    with anonymous_file() as file:
        pack([torch.rand(MANY), "text"], file)
        os.truncate(file.fileno(), os.fstat(file.fileno()).st_size - lost)
        with pytest.raises((EOFError, ValueError, pickle.UnpicklingError)):
            unpack(file.fileno())
