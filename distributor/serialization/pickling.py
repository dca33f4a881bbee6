"""Pickling of functions for ranks, and of values and exceptions on their way back."""

from __future__ import annotations

import functools
import hashlib
import io
import linecache
import os
import pickle
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, BinaryIO

import cloudpickle

from distributor._compat import huggingface
from distributor._compat.cloudpickle import use_as_globals
from distributor._compat.cpython import add_source_lines
from distributor.core.module_search import MAIN_MODULES
from distributor.errors import UnpicklableError
from distributor.serialization import code_pickle, oob_pickle
from distributor.serialization.code_pickle import attribute
from distributor.serialization.code_search import imports_in_code
from distributor.serialization.pickle_diagnostics import (
    RefusedError,
    explain_call,
    find_unpicklable,
)

MAX_EXCEPTION = 16 * 1024 * 1024  # bytes of a pickled exception, beyond which only its text travels


@dataclass(frozen=True)
class PickledCall:
    """A call that was pickled on the driver, with the part of the main module that it needs.

    Python pickles classes and functions by name, and finds them in the module of that name. A
    rank's main module is therefore made of what was pickled by value from the driver's, and so is
    that of each process which the rank starts by ``spawn`` or ``forkserver``.
    """

    # Three pickles with one memo: functions and classes of the main module, its names, and the
    # function with its arguments.
    payload: Any
    main_size: int  # of the first two
    buffers: tuple[Any, ...]  # the large buffers of tensors and arrays, not in `payload`
    # Of files that exist only in this process (notebook cells), for a rank's tracebacks.
    sources: dict[str, list[str]]
    imports: frozenset[str] = frozenset()  # full names
    uses_environment: bool = True  # whether it mentions the process's environment variables
    names: frozenset[str] = frozenset()  # of the driver's main module that it has

    @property
    def size(self) -> int:
        return sum(memoryview(buffer).nbytes for buffer in (self.payload, *self.buffers))

    @functools.cached_property
    def digest(self) -> bytes:
        """What identifies the call."""
        content = hashlib.sha256()
        for buffer in (self.payload, *self.buffers):
            content.update(memoryview(buffer))
        return content.digest()

    def load(
        self, main: dict[str, Any] | None = None
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return the function, its positional and its keyword arguments."""
        if main is None:  # the driver, which has its sources
            namespace = {}
        else:
            namespace = main
            self._add_sources()
        with _own_names_kept(namespace):
            function, args, kwargs = self._load_main(self.payload, namespace).load()
        return function, args, kwargs

    def load_main(self, namespace: dict[str, Any]) -> None:
        """Fill the namespace of a main module with what the call needs of the driver's."""
        self._add_sources()
        with _own_names_kept(namespace):
            self._load_main(memoryview(self.payload)[: self.main_size], namespace)

    def _add_sources(self) -> None:
        for filename, lines in self.sources.items():
            add_source_lines(filename, lines)

    def _load_main(self, payload: Any, namespace: dict[str, Any]) -> _CallUnpickler:
        unpickler = _CallUnpickler(io.BytesIO(payload), self.buffers, namespace)
        unpickler.load()
        names, hints = unpickler.load()
        for name, value in names.items():
            namespace.setdefault(name, value)
        for name, pickled in hints.items():
            with suppress(Exception):  # such as a module that is not installed here
                namespace.setdefault(name, pickle.loads(pickled))
        return unpickler


def dump_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    explained: Callable[..., Any] | None = None,
    given: Collection[str] = (),
) -> PickledCall:
    """Pickle a call. Errors are about another function if `explained` is one.

    Names of the main module that are given are there when it is loaded, and are not pickled again.
    """
    main = sys.modules["__main__"]
    if main.__name__ in MAIN_MODULES[1:]:
        cloudpickle.register_pickle_by_value(main)
    call = function, args, dict(kwargs)
    try:
        pickler = None
        with suppress(Exception):  # a class that cannot be pickled, though its objects can
            likely = _parts_of_main(function, *args, *kwargs.values())
            pickler = _CallPickler(likely, call, given)
        pickler = pickler or _CallPickler((), call, given)
        if pickler.late:
            pickler = _CallPickler(pickler.names.values(), call, given)
    except Exception as error:
        explanation = explain_call(explained or function, args, kwargs, error)
        raise UnpicklableError(explanation) from error
    return pickler.pickled()


def dump_value(value: object, file: BinaryIO, what: str) -> None:
    pickler = _ValuePickler(file)
    try:
        pickler.dump(value)
        oob_pickle.write_buffers(file, pickler.buffers)
    except (MemoryError, OSError):
        raise
    except Exception as error:
        culprit = find_unpicklable("value", value, _ValuePickler)
        where = f"{culprit}" if culprit else f"{type(value).__name__}: {error}"
        raise UnpicklableError(f"{what} returned a value that cannot be pickled: {where}") from None


def dump_exception(error: BaseException) -> bytes | None:
    """Pickle an exception, or return None if it would not load with its type and arguments."""
    if not isinstance(error, Exception):
        return None  # a rank's KeyboardInterrupt must not look like the driver's
    for form in (error, _Rebuilt(error)):
        try:
            pickled = oob_pickle.dumps(form)
            loaded = pickle.loads(pickled)
            same = type(loaded) is type(error) and _text_of(loaded.args) == _text_of(error.args)
            if same and len(pickled) <= MAX_EXCEPTION:
                return pickled
        except Exception:  # any error only means that this form cannot be pickled
            continue
    return None


def _text_of(args: tuple[Any, ...]) -> str:
    """Return arguments as text without what differs between copies: addresses, and CUDA devices."""
    return re.sub(r" at 0x[0-9a-fA-F]+|, device='cuda:\d+'", "", repr(args))


def load_exception(pickled: bytes) -> BaseException | None:
    """Load an exception; None if this process cannot, for example without its module."""
    try:
        error = pickle.loads(pickled)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


class _Rebuilt:
    """Pickles an exception whose own pickling fails: type, arguments and picklable attributes."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        state = {k: v for k, v in vars(self._error).items() if not find_unpicklable(k, v)}
        return _rebuild, (type(self._error), self._error.args, state)


def _rebuild(
    kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *args)
    BaseException.__setattr__(error, "args", args)  # the user's class may forbid it
    error.__dict__.update(state)
    return error


@functools.lru_cache(maxsize=1024)
def _reducer_of(kind: type) -> Callable[[Any], tuple[Any, ...]] | None:
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((_REDUCERS[name] for name in names if name in _REDUCERS), None)


class _ValuePickler(oob_pickle.Pickler):
    """Pickles a value for the driver, and refuses what is of no use without the other ranks."""

    def reducer_override(self, obj: Any) -> Any:
        if advice := _advice_for(type(obj)):  # type: ignore[arg-type]  # it is hashable
            raise RefusedError(obj, advice)
        return super().reducer_override(obj)


@functools.lru_cache(maxsize=1024)
def _advice_for(kind: type) -> str | None:
    """Return what to return instead of an object that ranks share; modules differ by version."""
    names = (f"{base.__module__.partition('.')[0]}.{base.__qualname__}" for base in kind.__mro__)
    return next((_ADVICE[name] for name in names if name in _ADVICE), None)


_WHOLE_STATE = (
    "a rank has only its part; the whole model's state is, called by all ranks: "
    "return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
    "cpu_offload=True)), from torch.distributed.checkpoint.state_dict"
)
_ADVICE = {
    **dict.fromkeys(
        (
            "torch.DTensor",
            "torch.FSDPModule",
            "torch.FullyShardedDataParallel",
            "torch.ShardedTensor",
        ),
        _WHOLE_STATE,
    ),
    "torch.DistributedDataParallel": "it needs the process group; return model.module, or its "
    "state: return model.module.state_dict()",
    "deepspeed.DeepSpeedEngine": "it needs the process group; return engine.module.state_dict(), "
    "or with ZeRO 3 save the model by engine.save_16bit_model(folder)",
    "accelerate.Accelerator": "it belongs to the ranks; return accelerator.unwrap_model(model), or "
    "its state: return accelerator.get_state_dict(model)",
    "transformers.Trainer": "it belongs to the ranks; return trainer.model, or its state: return "
    "trainer.model.state_dict()",
    **dict.fromkeys(
        ("lightning.Trainer", "pytorch_lightning.Trainer"),
        "it belongs to the ranks; return trainer.model, or its state: return "
        "trainer.model.state_dict()",
    ),
}


def _reduce_data_module(module: Any) -> tuple[Any, ...]:
    """Reduce a data module of Lightning without its trainer, as Lightning reduces its modules."""
    make, arguments, state, *rest = module.__reduce_ex__(oob_pickle.PROTOCOL)
    if isinstance(state, dict):  # unless the class has its own
        state = {**state, "trainer": None}
    return make, arguments, state, *rest


def _reduce_lone(obj: Any) -> tuple[Any, ...]:
    make, arguments, *rest = obj.__reduce_ex__(oob_pickle.PROTOCOL)
    return _made_for_one_process, (type(obj).__name__, make, arguments), *rest


def _made_at_first_use(kind: type, arguments: dict[str, Any], attributes: dict[str, Any]) -> Any:
    """Return an object that is initialized when it is first used, by the program.

    By then the program may have set variables, or started the process group by itself.
    """

    def initialize_and_get(self: Any, name: str) -> Any:
        object.__setattr__(self, "__class__", kind)
        kind.__init__(self, **arguments)  # type: ignore[misc]
        for key, value in attributes.items():
            vars(self).setdefault(key, value)
        return getattr(self, name)

    namespace = {"__slots__": (), "__getattribute__": initialize_and_get}
    return object.__new__(type(kind)(kind.__name__, (kind,), namespace))


def _made_for_one_process(name: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise TypeError(
            f"The driver's {name}, which the function uses or has among its arguments, was made "
            f"for one process: each of the {ranks} ranks would train alone. Make the {name} inside "
            "the function. What it is made from can be an argument."
        )
    return make(*arguments)


_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
# What to do with a class and its subclasses, by its full name.
_REDUCERS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "transformers.training_args.TrainingArguments": lambda arguments: (
        _made_at_first_use,
        (type(arguments), *huggingface.training_arguments(arguments)),
    ),
    "accelerate.state.PartialState": lambda state: (
        _made_at_first_use,
        (type(state), huggingface.state_arguments(state), {}),
    ),
    **{f"{name}.core.datamodule.LightningDataModule": _reduce_data_module for name in _LIGHTNING},
    **dict.fromkeys(
        (
            "accelerate.accelerator.Accelerator",
            "accelerate.data_loader.DataLoaderDispatcher",
            "accelerate.data_loader.DataLoaderShard",
            "accelerate.optimizer.AcceleratedOptimizer",
            "accelerate.scheduler.AcceleratedScheduler",
            "accelerate.state.AcceleratorState",
            "lightning.fabric.fabric.Fabric",
            "lightning_fabric.fabric.Fabric",
            *(f"{name}.trainer.trainer.Trainer" for name in _LIGHTNING),
            "transformers.trainer.Trainer",
        ),
        _reduce_lone,
    ),
}


class _CallPickler(oob_pickle.Pickler):
    """Pickles a call; collects what it pickles of the main module, and facts about functions.

    It leaves out the driver's view of the processes. Objects of training frameworks that were made
    on the driver know of one process: a rank that used them would train alone, without a word.
    Arguments are made anew in each rank; of other objects, which do not keep what they were made
    from, several ranks are refused.

    ``late`` says whether the call has parts of the main module that are not among those given.
    """

    def __init__(self, of_main: Iterable[Any], call: Any, given: Collection[str]) -> None:
        self._file, self._given = io.BytesIO(), given
        super().__init__(self._file)
        self.sources: dict[str, list[str]] = {}
        self.imports: set[str] = set()
        self.names: dict[str, Any] = {}
        self._main = sys.modules["__main__"]
        self._namespace = _MainNamespace(
            {k: v for k, v in vars(self._main).items() if k in ("__file__", "__package__")}
        )
        self._annotations: set[str] = set()
        self.dump((self._namespace, tuple(of_main)))
        hints = self._find_annotations()
        self.dump((dict(self.names), hints))
        self.main_size = self._file.tell()
        known = len(self.names)
        self.dump(call)
        self.late = len(self.names) > known

    def pickled(self) -> PickledCall:
        payload = self._file.getvalue()
        return PickledCall(
            pickle.PickleBuffer(payload),
            self.main_size,
            tuple(self.buffers),
            self.sources,
            frozenset(self.imports),
            uses_environment=b"environ" in payload or b"putenv" in payload,
            names=frozenset(self.names),
        )

    def reducer_override(self, obj: Any) -> Any:
        if self._given and getattr(obj, "__module__", None) in MAIN_MODULES:
            path = getattr(obj, "__qualname__", None)
            is_there = isinstance(path, str) and attribute(self._main, path) is obj
            if is_there and path.partition(".")[0] in self._given:  # type: ignore[union-attr]
                return _main_value, (path,)
        if isinstance(obj, types.FunctionType):
            self.imports.update(imports_in_code(obj.__code__))
            filename = obj.__code__.co_filename
            if filename not in self.sources and not os.path.exists(filename):
                self.sources[filename] = linecache.getlines(filename, obj.__globals__)
            if self._is_of_main(obj.__globals__):
                use_as_globals(self, obj.__globals__, self._namespace)
        reduce = _reducer_of(type(obj))  # type: ignore[arg-type]  # it is hashable
        reduced = reduce(obj) if reduce else super().reducer_override(obj)
        if reduced is not NotImplemented and getattr(obj, "__module__", None) in MAIN_MODULES:
            self._collect(obj)
        return reduced

    def _is_of_main(self, namespace: dict[str, Any]) -> bool:
        # multiprocessing copies the names of a main module that it runs in another process.
        return namespace is vars(self._main) or (
            self._main.__name__ == namespace.get("__name__") == MAIN_MODULES[1]
        )

    def _collect(self, obj: Any) -> None:
        """Note the name of something that is pickled by value, and those in its annotations."""
        path = getattr(obj, "__qualname__", None)
        if not isinstance(path, str):
            return
        name, _, inner = path.partition(".")
        top = vars(self._main).get(name, None if inner else obj)
        if (attribute(top, inner) if inner else top) is obj and (not inner or _can_pickle(top)):
            self.names[name] = top
        with suppress(Exception):  # since Python 3.14, annotations run code
            for annotation in obj.__annotations__.values():
                if isinstance(annotation, str):
                    self._annotations.update(compile(annotation, "", "eval").co_names)

    def _find_annotations(self) -> dict[str, bytes]:
        """Add classes of the main module that occur in annotations; return others, pickled."""
        hints = {}
        for name in sorted(self._annotations & vars(self._main).keys() - self.names.keys()):
            value = getattr(self._main, name)
            with suppress(Exception):
                pickled = code_pickle.dumps(value)
                if getattr(value, "__module__", None) in MAIN_MODULES:
                    self.names[name] = value
                else:
                    hints[name] = pickled
        return hints


class _CallUnpickler(pickle.Unpickler):
    """Loads functions of the main module into a namespace."""

    def __init__(self, file: io.BytesIO, buffers: Any, namespace: dict[str, Any]) -> None:
        super().__init__(file, buffers=buffers)
        self._namespace = namespace

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found is _main_value:
            return lambda path: attribute(SimpleNamespace(**self._namespace), path)
        return (lambda: self._namespace) if found is _main_namespace else found


class _MainNamespace(dict[str, Any]):
    """Stands for the namespace of the main module of the process that loads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _main_namespace, (), None, None, iter(self.items())


def _main_namespace() -> dict[str, Any]:
    raise RuntimeError("only a _CallUnpickler knows it")


def _main_value(path: str) -> Any:
    raise RuntimeError("only a _CallUnpickler knows it")


@contextmanager
def _own_names_kept(namespace: dict[str, Any]) -> Iterator[None]:
    """Keep the names of a main module that must not become those of the driver's."""
    own = {k: v for k, v in namespace.items() if k in ("__name__", "__spec__")}
    yield
    namespace.update(own)


def _parts_of_main(*objects: Any) -> Iterator[Any]:
    """Yield functions and classes of the main module that a call most probably needs."""
    for obj in objects:
        kind = obj if isinstance(obj, (types.FunctionType, type)) else type(obj)
        if isinstance(obj, functools.partial):
            yield from _parts_of_main(obj.func, *obj.args, *obj.keywords.values())
        elif isinstance(obj, types.MethodType):
            yield from _parts_of_main(obj.__func__, obj.__self__)
        elif kind.__module__.startswith("distributor."):
            yield from _parts_of_main(*getattr(obj, "__dict__", {}).values())
        elif kind.__module__ in MAIN_MODULES and "<locals>" not in kind.__qualname__:
            yield kind


def _can_pickle(obj: Any) -> bool:
    try:
        code_pickle.dumps(obj)
    except Exception:
        return False
    return True
