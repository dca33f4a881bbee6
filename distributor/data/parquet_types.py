"""Types of the columns of Parquet files: of several files together, and as Spark reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

# Types that Spark does not have in files, and those with all of their values.
_WIDER = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20),
    pa.null(): pa.int32(),  # as which files store it
    pa.large_string(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.date64(): pa.date32(),
}


def rebuilt(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return a type with other leaves. Its fields may be null, and its arrays have any length."""
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name != "arrow.uuid":
        return rebuilt(kind.storage_type, change)
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, rebuilt(field.type, change)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(rebuilt(kind.key_type, change), rebuilt(kind.item_type, change))
    if not hasattr(kind, "value_type"):
        return change(kind)
    value = rebuilt(kind.value_type, change)
    if pa.types.is_dictionary(kind):
        return value
    return kind if "_view<" in str(kind) else pa.list_(value)  # pyarrow loses what a view has


def leaves(kind: pa.DataType) -> list[pa.DataType]:
    """Return the types without parts that a type consists of: a file has a column for each."""
    found: list[pa.DataType] = []

    def add(leaf: pa.DataType) -> pa.DataType:
        found.append(leaf)
        return leaf

    rebuilt(kind, add)
    return found


def with_instants(kind: pa.DataType, stored: Sequence[str]) -> pa.DataType:
    """Return the type of a column that a file stores as these types; INT96 as Spark reads it.

    For pyarrow, it is a time without a time zone.
    """
    if "INT96" not in stored:
        return kind
    each = iter(stored)
    return rebuilt(kind, lambda leaf: pa.timestamp("us", "UTC") if next(each) == "INT96" else leaf)


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return a type that has all values of two types, as they are; None if there is none."""
    if one == other:
        return one
    kinds = [rebuilt(kind, _mergeable) for kind in (one, other)]
    try:
        schemas = [pa.schema([("", kind)]) for kind in kinds]
        found = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowException, TypeError):  # the latter before pyarrow 14
        return None
    return found if all(_is_alike(kind, found) for kind in kinds) else None


def spark_type(kind: pa.DataType) -> pa.DataType:
    """Return what Spark reads a type as; a type that Spark does not have remains as it is."""
    return rebuilt(kind, _of_spark)


def _mergeable(leaf: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(leaf) and leaf.tz is not None:
        return pa.timestamp(leaf.unit, "UTC")
    return _without_view(leaf)


def _is_alike(kind: pa.DataType, found: pa.DataType) -> bool:
    """Return whether integers do not become floats, nor texts bytes."""
    pairs = list(zip(leaves(kind), leaves(found), strict=False))
    return pa.types.is_null(kind) or (
        len(leaves(kind)) == len(leaves(found))
        and all(pa.types.is_null(one) or _marks(one) == _marks(other) for one, other in pairs)
    )


def _marks(leaf: pa.DataType) -> tuple[bool, bool]:
    return pa.types.is_floating(leaf), "string" in str(leaf)


def _without_view(leaf: pa.DataType) -> pa.DataType:
    return getattr(pa, str(leaf).removesuffix("_view"))() if str(leaf).endswith("_view") else leaf


def _of_spark(leaf: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(leaf):
        return pa.timestamp("us", None if leaf.tz is None else "UTC")
    if pa.types.is_fixed_size_binary(leaf):
        return pa.binary()
    if pa.types.is_duration(leaf):
        return pa.int64()
    if pa.types.is_decimal(leaf) and leaf.precision <= 38:
        return pa.decimal128(leaf.precision, leaf.scale)
    return _WIDER.get(leaf, _without_view(leaf))
