"""What this package uses of ``pyspark.ml``, and of Hadoop through py4j, that is not documented."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def param(name: str, text: str, convert: Callable[[Any], Any]) -> Any:
    """Return a Param for the body of a class."""
    from pyspark.ml.param import Param, Params

    return Param(Params._dummy(), name, text, convert)


def set_params(instance: Any, defaults: dict[str, Any], values: dict[str, Any]) -> None:
    """Set the defaults of Params, and the values of those that are not None."""
    instance._setDefault(**defaults)
    instance._set(**{name: value for name, value in values.items() if value is not None})


def copy_params(source: Any, target: Any) -> None:
    """Set the Params of an instance, and its uid, as they are in another one."""
    target._resetUid(source.uid)
    source._copyValues(target)


def reset_uid(instance: Any, uid: str) -> None:
    """Set the uid of an instance, also in its Params."""
    instance._resetUid(uid)


def qualified(context: Any, path: str) -> str:
    """Return a path with the file system that Spark takes it to be in."""
    java_path = context._jvm.org.apache.hadoop.fs.Path(path)
    filesystem = java_path.getFileSystem(context._jsc.hadoopConfiguration())
    address = filesystem.makeQualified(java_path)
    if address.toUri().getScheme() == "file":  # a path may contain what an address escapes
        return str(address.toUri().toASCIIString())
    return str(address.toString())
