"""Pickles with out-of-band buffers round-trip, and large buffers are mapped instead of copied."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

import pytest

from distributor.serialization.oob_pickle import (
    LARGE_BUFFER,
    Pickler,
    anonymous_file,
    dumps,
    give_back,
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
    "large": lambda: torch.arange(MANY, dtype=torch.float64),
    "small": lambda: torch.arange(3),
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(2.5),
    "bfloat16": lambda: torch.arange(MANY).to(torch.bfloat16),
    "bool": lambda: torch.arange(2 * MANY) % 3 == 0,
    "complex": lambda: torch.complex(torch.ones(MANY), torch.arange(MANY).float()),
    "transposed": lambda: torch.arange(2.0 * MANY).reshape(2, MANY).T,
    "slice": lambda: torch.arange(2.0 * MANY)[7:-3:2],
    "sparse": lambda: torch.eye(400).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.rand(MANY), 0.1, 0, torch.qint8),
    "needs grad": lambda: torch.ones(MANY, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.rand(MANY)),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
def test_tensors_round_trip(make: Any) -> None:
    given = make()
    found = round_trip(given)
    assert type(found) is type(given)
    assert (found.dtype, found.shape, found.requires_grad) == (
        given.dtype,
        given.shape,
        given.requires_grad,
    )
    if given.layout == torch.strided:
        assert found.stride() == given.stride()
    dense = [t.dequantize() if t.is_quantized else t.detach().to_dense() for t in (found, given)]
    assert torch.equal(*dense)


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
def test_a_pickle_without_a_file_has_its_tensors(make: Any) -> None:
    given = make()
    found, same = pickle.loads(dumps([given, given]))
    assert found is same
    assert (type(found), found.dtype, found.shape) == (type(given), given.dtype, given.shape)
    dense = [t.dequantize() if t.is_quantized else t.detach().to_dense() for t in (found, given)]
    assert torch.equal(*dense)


def random_bits(dtype: torch.dtype, size: int) -> torch.Tensor:
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (16 * size,), dtype=torch.uint8)
    tensor = torch.empty(size, dtype=dtype)
    return tensor.set_(bits.untyped_storage(), 0, (size,), (1,))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def dtypes() -> list[torch.dtype]:
    """Return every dtype but those of quantized tensors, which need a scale."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(
        (dtype for dtype in found if "qint" not in str(dtype) and "quint" not in str(dtype)),
        key=str,
    )


@pytest.mark.parametrize("size", [8, MANY])
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_tensors_of_each_dtype_arrive_bit_for_bit(dtype: torch.dtype, size: int) -> None:
    given = random_bits(dtype, size)
    for found in (round_trip([given, given[2:]]), pickle.loads(dumps([given, given[2:]]))):
        whole, part = found
        assert whole.dtype == part.dtype == dtype
        assert (whole.shape, whole.stride()) == (given.shape, given.stride())
        assert torch.equal(bits_of(whole), bits_of(given))
        assert whole.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        assert part.storage_offset() == 2


NO_STORAGE_CLASS = {
    "parameter": lambda: torch.nn.Parameter(torch.rand(8).to(torch.float8_e5m2)),
    "requires grad": lambda: torch.rand(8).to(torch.float8_e5m2).requires_grad_(),
    "empty": lambda: torch.empty(0, 3, dtype=torch.uint16),
    "scalar": lambda: torch.tensor(5, dtype=torch.uint64),
    "transposed": lambda: torch.arange(2 * MANY).to(torch.uint32).reshape(2, MANY).T,
    "subclass": lambda: torch.arange(8).to(torch.uint16).as_subclass(Marked),
    "negative": lambda: torch.ones(8, dtype=torch.complex32).conj().imag,
    "meta": lambda: torch.empty(3, dtype=torch.uint16, device="meta"),
}


class Marked(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.mark.parametrize("make", NO_STORAGE_CLASS.values(), ids=NO_STORAGE_CLASS.keys())
def test_tensors_whose_dtype_has_no_storage_class_round_trip(make: Any) -> None:
    given = make()
    for found in (round_trip(given), pickle.loads(dumps(given))):
        assert type(found) is type(given)
        for name in ("dtype", "shape", "device", "requires_grad"):
            assert getattr(found, name) == getattr(given, name)
        assert (found.stride(), found.is_neg()) == (given.stride(), given.is_neg())
        assert given.is_meta or torch.equal(bits_of(found), bits_of(given))


def test_a_sparse_tensor_of_unsigned_integers_round_trips() -> None:
    values = torch.tensor([1, 2**16 - 1]).to(torch.uint16)
    found = round_trip(torch.sparse_coo_tensor([[0, 2]], values, (4,), is_coalesced=True))
    assert found.indices().tolist() == [[0, 2]]
    assert found.values().tolist() == [1, 2**16 - 1]


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
    "large": lambda: np.arange(MANY),
    "small": lambda: np.arange(3.0),
    "by columns": lambda: np.asfortranarray(np.arange(2.0 * MANY).reshape(2, MANY)),
    "slice": lambda: np.arange(2 * MANY)[::2],
    "records": lambda: np.zeros(MANY, dtype=[("a", "i4"), ("b", "f8")]),
    "text": lambda: np.array(["one", "two"] * MANY),
    "dates": lambda: np.arange(MANY).astype("datetime64[s]"),
}


@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS.keys())
def test_arrays_round_trip(make: Any) -> None:
    given = make()
    found = round_trip(given)
    assert found.dtype == given.dtype
    assert found.flags.f_contiguous or not given.flags.f_contiguous
    assert np.array_equal(found, given)
    found[:1] = given[1:2]  # raises if the array is read-only


def test_a_read_only_array_stays_read_only() -> None:
    given = np.arange(MANY)
    given.flags.writeable = False
    assert not round_trip(given).flags.writeable


def test_tables_round_trip() -> None:
    pd = pytest.importorskip("pandas")
    pa = pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"x": np.arange(MANY), "name": ["a", "b"] * (MANY // 2)})
    pd.testing.assert_frame_equal(round_trip(frame), frame)
    table = pa.table({"x": np.arange(MANY), "y": [None, "text"] * (MANY // 2)})
    assert round_trip(table).equals(table)


def test_shared_memory_is_written_once_and_stays_shared() -> None:
    weights = torch.rand(4 * MANY)
    given = {"all": weights, "again": weights, "tail": weights[-3:], "tied": weights.view(2, -1)}
    assert size_of(given) < 1.1 * size_of(weights)
    found = round_trip(given)
    found["all"][-1] = 7.0
    assert [found[name].flatten()[-1].item() for name in given] == [7.0] * 4
    assert weights[-1].item() != 7.0


def test_empty_tensors_do_not_come_to_share_memory() -> None:
    found = round_trip([torch.empty(0), torch.empty(0)])
    for number, tensor in enumerate(found):
        tensor.resize_(2).fill_(number)
    assert [tensor.tolist() for tensor in found] == [[0.0, 0.0], [1.0, 1.0]]


def test_a_loaded_model_can_be_trained() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 2))
    found = round_trip(model)
    found(torch.ones(1, 300)).sum().backward()
    torch.optim.SGD(found.parameters(), lr=0.1).step()
    pairs = zip(found.parameters(), model.parameters(), strict=True)
    assert not all(torch.equal(*pair) for pair in pairs)


def test_objects_loaded_twice_from_one_file_are_independent() -> None:
    with anonymous_file() as file:
        pack({"a": torch.zeros(MANY), "b": np.zeros(MANY)}, file)
        first, second = unpack(file.fileno()), unpack(file.fileno())
    first["a"] += 1
    first["b"] += 1
    assert not second["a"].any()
    assert not second["b"].any()


def test_large_buffers_are_stored_outside_the_pickle() -> None:
    given = {"tensor": torch.rand(MANY), "array": np.zeros(MANY), "small": torch.ones(3)}
    with anonymous_file() as file:
        pickler = Pickler(file)
        pickler.dump(given)
        assert file.tell() < LARGE_BUFFER
        assert sorted(buffer.raw().nbytes for buffer in pickler.buffers) == [4 * MANY, 8 * MANY]


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


@pytest.mark.parametrize("kept", [0, 5, 0.5, -1])
def test_a_truncated_file_is_an_error(kept: float) -> None:
    with anonymous_file() as file:
        pack([torch.rand(MANY), "text"], file)
        size = os.fstat(file.fileno()).st_size
        os.truncate(file.fileno(), int(size * kept) if 0 < kept < 1 else int(kept % size))
        with pytest.raises((EOFError, ValueError, pickle.UnpicklingError)):
            unpack(file.fileno())


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux can release the memory of a part of a file"
)
def test_the_part_of_a_file_that_was_read_occupies_no_memory() -> None:
    with anonymous_file() as file:
        file.write(bytes(2**20) + b"rest")
        file.flush()
        give_back(file, 2**20)
        status = os.fstat(file.fileno())
        assert status.st_size == 2**20 + 4
        assert status.st_blocks * 512 < 2**20
        assert os.pread(file.fileno(), 4, 2**20) == b"rest"
