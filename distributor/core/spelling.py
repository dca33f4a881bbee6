"""How the API that the user has called names things, and the conventions that it follows."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from distributor.core.cell_errors import ends_at_caller

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


@dataclass(frozen=True)
class Spelling:
    """The names and conventions of one API; the names are by default those of `TorchDistributor`.

    PySpark's classes leave ``CUDA_VISIBLE_DEVICES`` as it is if local ranks use no GPUs; other
    APIs hide the GPUs. `ignore_ssl` is the Spark property that permits runs on a cluster that
    requires encryption, and `logger` receives what PySpark's classes log.
    """

    api: str = "TorchDistributor"
    num_processes: str = "num_processes"  # the parameter for the number of ranks
    run_here: str = "pass local_mode=True"
    run_on_cpus: str = "pass use_gpu=False"
    logger: str = "distributor"  # PySpark's classes each log to the logger of their name
    # Permits runs on a cluster that requires encryption.
    ignore_ssl: str = "pytorch.spark.distributor.ignoreSsl"
    # From local ranks that use none. PySpark's classes leave CUDA_VISIBLE_DEVICES as it is.
    hides_gpus: bool = True
    gpu_type: str = "gpu_type"
    has_options: bool = False  # whether settings are options of a command line
    # What the API raises in place of errors of this package, as subclasses of theirs.
    errors: Mapping[type[BaseException], type[Exception]] = field(default_factory=dict)

    def of(self, setting: str) -> str:
        """Return what the user writes for a setting of `TorchDistributor`."""
        if setting in ("num_processes", "gpu_type"):
            setting = str(getattr(self, setting))
        is_option = self.has_options and not setting.startswith("-")
        return f"--{setting.replace('_', '-')}" if is_option else setting

    @contextlib.contextmanager
    def renames(self) -> Iterator[None]:
        """Have the `Message` of an error in the block name things as this API does."""
        try:
            yield
        except Exception as error:
            error.args = tuple(map(self.respelled, error.args))
            if (own := self.own(error)) is not error:
                raise own from own.__cause__
            raise

    def own(self, error: E) -> E:
        """Return an error of this package as this API raises it, and any other as it is."""
        kind = self.errors.get(type(error))
        if kind is None:
            return error
        own: Any = kind(*error.args)
        vars(own).update(vars(error))
        own.__cause__, own.__suppress_context__ = error.__cause__, True
        return own.with_traceback(error.__traceback__)  # type: ignore[no-any-return]

    def respelled(self, text: T) -> T | Message:
        """Return a `Message` as this API spells it, and anything else as it is."""
        return text.spelled(self) if isinstance(text, Message) else text


class Message(str):
    """A message that names things as an API does: by default those of `TorchDistributor`.

    Its template has fields of `Spelling`, settings and the values in braces.
    """

    def __new__(cls, template: str, spelling: Spelling = Spelling(), **values: object) -> Message:
        message = super().__new__(cls, template.format_map(_Names(spelling, values)))
        message._template, message._values = template, values
        return message

    _template: str
    _values: dict[str, object]

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)

    def spelled(self, spelling: Spelling) -> Message:
        return Message(self._template, spelling, **self._values)


class _Names(dict[str, object]):
    def __init__(self, spelling: Spelling, values: Mapping[str, object]) -> None:
        super().__init__({**vars(spelling), **values})
        self._spelling = spelling

    def __missing__(self, name: str) -> str:
        return self._spelling.of(name)


# Names that APIs have for one parameter.
_SYNONYMS = (
    {
        *("num_processes", "num_workers", "num_accelerators", "nproc", "nproc_per_node"),
        *("gpus", "num_gpus", "numGpus", "world_size", "num_proc"),
    },
    {"local_mode", "localMode", "remote", "cluster"},
    {"use_gpu", "useGpu"},
    {"gpu_type", "accelerator_type"},
    {"module", "model", "net", "torchObj"},
    {"maxIter", "epochs", "num_epochs", "max_epochs", "iters"},
    {"stepSize", "lr", "learning_rate"},
    {"batchSize", "batch_size", "miniBatch"},
    {"featuresCol", "feature_cols", "features_col", "features", "inputCol"},
    {"labelCol", "label_cols", "label_col", "label"},
    {"predictionCol", "prediction_col", "outputCol", "output_cols"},
    {"storage_path", "store"},
    {"train", "train_minibatch_fn", "train_loop_per_worker"},
)


def check_names(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Answer an unknown argument with the known one that was likely meant."""
    for name in given:
        if name not in known:
            unknown = f"{function} got an unexpected keyword argument {name!r}."
            raise TypeError(f"{unknown} {suggestion(name, known)}")


def suggestion(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """Return a question for the known name that is most like an unknown one, or all known names."""
    names = {_plain(each): each for each in sorted(known)}
    given = _plain(name)
    synonyms = {each for group in _SYNONYMS if given in group for each in group}
    nearest = [
        *(each for each in names if each in synonyms),
        *difflib.get_close_matches(given, names, 1),
        *(each for each in names if len(given) > 1 and each.startswith(given)),
    ]
    if nearest:
        return f"Did you mean {names[nearest[0]]!r}?"
    if otherwise is not None:
        return otherwise
    return f"It takes {', '.join(names.values())}." if names else ""


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def checks_keywords(cls: type[T]) -> type[T]:
    """Answer an unknown argument of a class's constructor with a known one."""
    # Python does so too, since 3.13, but knows no synonyms.
    construct = cls.__init__
    known = [*inspect.signature(construct).parameters][1:]

    @ends_at_caller
    @functools.wraps(construct)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        check_names(f"{cls.__name__}()", kwargs, known)
        construct(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[assignment, method-assign]
    return cls
