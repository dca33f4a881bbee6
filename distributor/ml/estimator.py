"""`TorchEstimator` and `TorchModel`: training and prediction as stages of Spark ML."""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from pyspark.ml import Estimator, Model
from pyspark.ml.linalg import VectorUDT
from pyspark.ml.param import TypeConverters
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasLabelCol,
    HasMaxIter,
    HasPredictionCol,
    HasSeed,
    HasStepSize,
)
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DoubleType,
    FractionalType,
    NumericType,
    StructType,
)

from distributor._compat import pyspark as private
from distributor.core.spelling import check_names
from distributor.data.batches import check_bool, whole_number
from distributor.data.dataframes import from_spark, is_dataframe, vectors_of
from distributor.data.prediction import names_unpicklable, predict
from distributor.errors import UnpicklableError
from distributor.filesystems import native, resolve
from distributor.ml.training import (
    Meaning,
    ModuleLoop,
    Predictor,
    Training,
    meaning_for,
    single_number,
)
from distributor.serialization import code_pickle
from distributor.settings import instance_of, must_be, optional
from distributor.torch_distributor import TorchDistributor
from distributor.train.worker_loop import loop_arguments

_DEFAULTS: dict[str, Any] = {"batchSize": 32, "maxIter": 10, "seed": 0, "config": {}}
_FOR_TRAINING = ("featuresCol", "labelCol", "batchSize", "maxIter", "stepSize", "seed")
"""The Params that the configuration of a training function has."""
_FUNCTIONS = ("module", "loss", "optimizer", "train", "predict", "probability")
_RESOURCES = ("num_processes", "local_mode", "use_gpu")
"""The arguments of `TorchEstimator` that are no Params, besides `find_unused_parameters`."""
FILE = "torch.pt"
"""The file of a saved stage that has the arguments of its constructor that are no Params."""
_check_function = must_be("a function", callable, TypeError)
_check_optimizer = must_be(
    "a function of the module's parameters, such as torch.optim.Adam", callable, TypeError
)
_check_module = must_be(
    "a torch.nn.Module, or a function that returns one",
    lambda value: isinstance(value, torch.nn.Module) or callable(value),
    TypeError,
)
_check_column = must_be(
    "the name of one column (pyspark.ml.feature.VectorAssembler joins several)",
    instance_of(str),
    TypeError,
)
_check_trained = must_be("a torch.nn.Module", instance_of(torch.nn.Module), TypeError)
_check_frame = must_be("a Spark DataFrame", is_dataframe, TypeError)
_check_config = must_be("a dict of values for JSON", instance_of(Mapping), TypeError)

S = TypeVar("S", bound="MLReadable[Any]")


class StageWriter(MLWriter):
    """Saves the Params of a stage as Spark does, and its parts by torch."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:
        parts = self.instance.parts()
        file = io.BytesIO()
        with names_unpicklable(parts):
            torch.save(parts, file, pickle_module=code_pickle)
        DefaultParamsWriter.saveMetadata(self.instance, path, _context(self.sparkSession))
        filesystem, target = _file_in(self.sparkSession, path)
        with filesystem.open_output_stream(target) as stream:
            stream.write(file.getbuffer())


class StageReader(MLReader[S]):
    """Loads what a `StageWriter` has saved."""

    def __init__(self, kind: type[S]) -> None:
        super().__init__()
        self.kind = kind

    def load(self, path: str) -> S:
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
    return spark if private.is_connect_session(spark) else spark.sparkContext


def _file_in(spark: Any, path: str) -> tuple[Any, Any]:
    """Return the file system of a stage's folder, which Spark's configuration chooses, and a file.

    Through Connect it is the one that the path names on this machine.
    """
    is_connect = private.is_connect_session(spark)
    address = path if is_connect else private.qualified(spark.sparkContext, path)
    filesystem, folder = resolve(address)
    return filesystem, native(filesystem, f"{folder}/{FILE}")


P = TypeVar("P", bound="_Params")


def _config(value: Any) -> dict[str, Any]:
    _check_config("config", value)
    json.dumps(value)  # as the metadata has it; raises TypeError
    return dict(value)


class _Params(HasFeaturesCol, HasLabelCol, HasPredictionCol, HasMaxIter, HasSeed, HasStepSize):
    """The Params of an estimator and of its models."""

    batchSize = private.param(
        "batchSize",
        "rows of a rank's batch in training, and of a batch in prediction (>= 1).",
        partial(whole_number, "batchSize", least=1),
    )
    config = private.param("config", "values for the training function, by name.", _config)
    probabilityCol = private.param(
        "probabilityCol", "column name for the probabilities of classes.", TypeConverters.toString
    )

    def _set_params(self, arguments: Mapping[str, Any]) -> None:
        """Set those of the constructor's arguments that are Params."""
        values = {name: value for name, value in arguments.items() if self.hasParam(name)}
        private.set_params(self, _DEFAULTS, values)

    def _with(self: P, **values: Any) -> P:
        private.set_params(self, {}, values)
        return self

    def setFeaturesCol(self: P, value: str) -> P:
        return self._with(featuresCol=value)

    def setPredictionCol(self: P, value: str) -> P:
        return self._with(predictionCol=value)

    def setProbabilityCol(self: P, value: str) -> P:
        return self._with(probabilityCol=value)

    def setBatchSize(self: P, value: int) -> P:
        return self._with(batchSize=value)

    def getProbabilityCol(self) -> str:
        return str(self.getOrDefault("probabilityCol"))

    def getBatchSize(self) -> int:
        return int(self.getOrDefault("batchSize"))

    def getConfig(self) -> dict[str, Any]:
        return dict(self.getOrDefault("config"))

    def write(self) -> StageWriter:
        """Return what saves this stage: ``write().overwrite().save(path)``."""
        return StageWriter(self)

    def _probability_column(self) -> str | None:
        return self.getOrDefault("probabilityCol") if self.isDefined("probabilityCol") else None

    def _check_probability(self, function: Callable[[Any], Any] | None) -> None:
        if self._probability_column() is not None and function is None:
            raise ValueError(
                f"probabilityCol is {self._probability_column()!r}, but what the module's outputs "
                "mean is known only for losses of classes. Pass a function that makes "
                "probabilities of them: probability=lambda output: output.softmax(dim=1)."
            )

    def _field(self, dataset: Any, name: str) -> Any:
        """Return a column that a Param names, with its type."""
        column = self.getOrDefault(name)
        if column not in dataset.columns:
            known = ", ".join(dataset.columns)
            raise ValueError(f"{name} is {column!r}, which is no column. The columns are {known}.")
        return dataset.schema[column]

    def _features(self, dataset: Any) -> tuple[str, dict[str, torch.dtype]]:
        """Return the name of the features' column, and the dtypes of its tensors."""
        field = self._field(dataset, "featuresCol")
        element = field.dataType
        while isinstance(element, ArrayType):
            element = element.elementType
        is_vector = field.name in vectors_of(dataset)
        is_array = isinstance(field.dataType, ArrayType) and isinstance(element, NumericType)
        if not is_vector and not is_array:
            raise TypeError(
                f"featuresCol is {field.name!r}, a column of type {field.dataType.simpleString()}, "
                "but must be a column of vectors, as VectorAssembler makes them, or of arrays of "
                "numbers."
            )
        is_float = is_vector or isinstance(element, FractionalType)
        return field.name, {field.name: torch.float32} if is_float else {}


class TorchEstimator(_Params, Estimator["TorchModel"], MLReadable["TorchEstimator"], MLWritable):
    """Trains a module of torch on a DataFrame, as a stage of Spark ML.

    Ranks read their shares of the rows as the ranks of `TorchDistributor` do. Nothing is collected
    on the driver, and there is no intermediate storage.

    **With a module**: each rank trains it, in DistributedDataParallel, for `maxIter` epochs. With
    the setting ``storage_path``, each epoch is a checkpoint, from which a failed fit resumes. With
    ``CrossEntropyLoss`` and ``NLLLoss``, labels are int64, and a prediction is the index of the
    largest output. With other losses, labels have the dtype and the shape of the outputs; with
    ``BCEWithLogitsLoss`` and ``BCELoss``, a prediction is the class 0 or 1, otherwise the output.
    The functions of `torch.nn.functional` count as these losses.

    **With a training function**: `train` runs on each rank as the ``train_loop_per_worker`` of a
    `TorchTrainer` does, with the rows in ``distributor.train.get_dataset_shard("train")``. It must
    return the trained module on rank 0. Reports and checkpoints need the setting ``storage_path``.

    Follows ``pyspark.ml.Estimator``:
    https://spark.apache.org/docs/latest/api/python/reference/api/pyspark.ml.Estimator.html

    Parameters
    ----------
    module : torch.nn.Module or callable, optional
        What is trained: a module, which is copied, or a function that returns one in each rank.
    loss : callable, optional
        Returns the loss of an output and the target. `module` needs it.
    optimizer : callable, optional
        Returns the optimizer of the module's parameters, such as ``torch.optim.Adam``. `module`
        needs it.
    find_unused_parameters : bool, default False
        As for DistributedDataParallel: pass True if a step does not use all parameters of `module`.
    train : callable, optional
        The training function instead of `module`. It takes `config`, or nothing.
    predict : callable, optional
        Returns the predictions of a batch, one number for each row, from the module's output.
    probability : callable, optional
        Returns the probabilities of the classes, a row of numbers for each row, from the module's
        output; known for the losses that are named above.
    featuresCol : str, default "features"
        The column of vectors or of arrays, for the module. Vectors, floats and doubles become
        float32; integers become int64 and so on, as in training on DataFrames.
    labelCol : str, default "label"
        The column of numbers to learn.
    predictionCol : str, default "prediction"
        The column of type double that the model adds.
    probabilityCol : str, optional
        A column of vectors that the model adds too: the probabilities of the classes.
    batchSize : int, default 32
        Rows of a rank's batch in training, and of a batch in prediction.
    maxIter : int, default 10
        Epochs.
    stepSize : float, optional
        The learning rate, which the optimizer gets as ``lr``; by default the optimizer's own.
    seed : int, default 0
        Determines the module that a function returns, the order of the rows, and dropout.
    config : mapping of str to object, optional
        Values for the training function, which JSON can store. It also gets the Params
        `featuresCol`, `labelCol`, `batchSize`, `maxIter`, `stepSize` and `seed`.
    num_processes, local_mode, use_gpu : optional
        As for `TorchDistributor`, but by default one rank on an executor, without a GPU.
    **settings : optional
        Other settings of `TorchDistributor`, such as ``storage_path`` and ``max_failures``, except
        ``name``: each fit is a run of its own.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another type, missing, or there is one too many, or as
        `TorchDistributor` raises them.
    RuntimeError
        If there are too few GPUs, or `local_mode` is False and there is no active Spark session.

    Examples
    --------
    >>> estimator = TorchEstimator(
    ...     module=torch.nn.Linear(3, 2),
    ...     loss=torch.nn.CrossEntropyLoss(),
    ...     optimizer=torch.optim.Adam,
    ...     stepSize=0.01,
    ...     num_processes=2,
    ... )  # doctest: +SKIP
    >>> estimator.fit(train_df).transform(test_df).select("prediction")  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        module: torch.nn.Module | Callable[[], torch.nn.Module] | None = None,
        loss: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        find_unused_parameters: bool = False,
        train: Callable[..., torch.nn.Module | None] | None = None,
        predict: Callable[[Any], torch.Tensor] | None = None,
        probability: Callable[[Any], torch.Tensor] | None = None,
        featuresCol: str = "features",
        labelCol: str = "label",
        predictionCol: str = "prediction",
        probabilityCol: str | None = None,
        batchSize: int = 32,
        maxIter: int = 10,
        stepSize: float | None = None,
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
        num_processes: int | tuple[int, int] = 1,
        local_mode: bool = False,
        use_gpu: bool = False,
        **settings: Any,
    ) -> None:
        arguments = locals()
        known = set(inspect.signature(TorchEstimator).parameters) - {"settings"}
        known |= set(inspect.signature(TorchDistributor).parameters)
        check_names("TorchEstimator()", settings, known)
        _check_column("featuresCol", featuresCol)
        super().__init__()
        self._set_params(arguments)
        self._functions: dict[str, Any] = {name: arguments[name] for name in _FUNCTIONS}
        _check_functions(**self._functions)
        check_bool("find_unused_parameters", find_unused_parameters)
        if train is not None and find_unused_parameters:
            raise ValueError("find_unused_parameters belongs to module, but train is the argument.")
        self._finds_unused = find_unused_parameters
        self._settings = {name: arguments[name] for name in _RESOURCES} | settings
        self._distributor()

    def setLabelCol(self, value: str) -> TorchEstimator:
        return self._with(labelCol=value)

    def setMaxIter(self, value: int) -> TorchEstimator:
        return self._with(maxIter=value)

    def setStepSize(self, value: float) -> TorchEstimator:
        return self._with(stepSize=value)

    def setSeed(self, value: int) -> TorchEstimator:
        return self._with(seed=value)

    def setConfig(self, value: Mapping[str, Any]) -> TorchEstimator:
        return self._with(config=value)

    def parts(self) -> dict[str, Any]:
        """Return the arguments of the constructor that are no Params."""
        unused = {"find_unused_parameters": self._finds_unused}
        return {**self._functions, **unused, **self._settings}

    @classmethod
    def read(cls) -> StageReader[TorchEstimator]:
        """Return what loads an estimator: ``read().load(path)``. It unpickles the saved file."""
        return StageReader(cls)

    def _fit(self, dataset: Any) -> TorchModel:
        _check_frame("dataset", dataset)
        functions = self._functions
        train, loss = functions["train"], functions["loss"]
        predict, probability = meaning_for(loss)
        meaning = functions["predict"] or predict, functions["probability"] or probability
        self._check_probability(meaning[1])
        rows = from_spark(dataset)
        if train is None:
            features, dtypes = self._features(dataset)
            label = self._field(dataset, "labelCol")
            if not isinstance(label.dataType, (NumericType, BooleanType)):
                raise TypeError(
                    f"labelCol is {label.name!r}, a column of type "
                    f"{label.dataType.simpleString()}, but must be a column of numbers."
                )
            names = (name.replace("`", "``") for name in {features, label.name})
            rows = from_spark(dataset.select(*(f"`{name}`" for name in names)))
            train = ModuleLoop(
                functions["module"],
                loss,
                functions["optimizer"],
                dtypes,
                has_storage=self._settings.get("storage_path") is not None,
                has_predict=functions["predict"] is not None,
                find_unused_parameters=self._finds_unused,
            )
        run: Callable[..., Any] = self._distributor().run
        with names_unpicklable(functions, UnpicklableError):
            trained = run(Training(train, self._loop_config()), rows)
        model = TorchModel(trained, *meaning)
        private.copy_params(self, model)
        return model

    def _loop_config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.getOrDefault("config")
        if taken := sorted(config.keys() & set(_FOR_TRAINING)):
            raise ValueError(f"config has {taken[0]!r}, which is a Param: set that instead.")
        params = {
            name: self.getOrDefault(name) if self.isDefined(name) else None
            for name in _FOR_TRAINING
        }
        return {**config, **params}

    def _distributor(self) -> TorchDistributor:
        if self._settings.get("name") is not None:
            raise ValueError("name is no setting here: each fit is a run of its own.")
        return TorchDistributor(**self._settings)


class TorchModel(_Params, Model, MLReadable["TorchModel"], MLWritable):
    """Adds the predictions of a trained module to a DataFrame, as a stage of Spark ML.

    Rows are computed as by `distributor.data.predict`.

    Follows ``pyspark.ml.Model``:
    https://spark.apache.org/docs/latest/api/python/reference/api/pyspark.ml.Model.html

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    predict : callable, optional
        Returns the predictions of a batch, one number for each row, from the module's output,
        which it is by default.
    probability : callable, optional
        Returns the probabilities of the classes, a row of numbers for each row, from the module's
        output.
    featuresCol : str, default "features"
        The column of vectors or of arrays, for the module.
    predictionCol : str, default "prediction"
        The column of type double that is added.
    probabilityCol : str, optional
        A column of vectors that is added too, as `probability` makes them.
    batchSize : int, default 32
        Rows that the module gets at once, at most.

    Attributes
    ----------
    module : torch.nn.Module
        The module, on the CPU.

    Raises
    ------
    TypeError
        If an argument is of another type.
    ValueError
        If `batchSize` is less than 1.

    Examples
    --------
    >>> model = estimator.fit(train_df)  # doctest: +SKIP
    >>> model.write().overwrite().save("hdfs:///models/digits")  # doctest: +SKIP
    >>> TorchModel.load("hdfs:///models/digits").module  # doctest: +SKIP
    Linear(in_features=3, out_features=2, bias=True)
    """

    def __init__(
        self,
        module: torch.nn.Module,
        predict: Callable[[Any], torch.Tensor] | None = None,
        probability: Callable[[Any], torch.Tensor] | None = None,
        *,
        featuresCol: str = "features",
        predictionCol: str = "prediction",
        probabilityCol: str | None = None,
        batchSize: int = 32,
    ) -> None:
        super().__init__()
        self._set_params(locals())
        _check_trained("module", module)
        _check_makers(predict, probability)
        self.module = module
        self._meaning = Meaning(predict or single_number, probability)

    def parts(self) -> dict[str, Any]:
        """Return the arguments of the constructor that are no Params."""
        predict, probability = self._meaning
        return {"module": self.module, "predict": predict, "probability": probability}

    @classmethod
    def read(cls) -> StageReader[TorchModel]:
        """Return what loads a model: ``read().load(path)``. It unpickles the saved file."""
        return StageReader(cls)

    def _transform(self, dataset: Any) -> Any:
        _check_frame("dataset", dataset)
        features, dtypes = self._features(dataset)
        self._check_probability(self._meaning.probability)
        prediction, probability = self.getOrDefault("predictionCol"), self._probability_column()
        for argument, name in (("predictionCol", prediction), ("probabilityCol", probability)):
            if name in dataset.columns:
                raise ValueError(
                    f"{argument} is {name!r}, a column that the DataFrame has already."
                )
        outputs = StructType().add(prediction, DoubleType())
        if probability is not None:
            outputs.add(probability, VectorUDT())
        with names_unpicklable(self.parts(), UnpicklableError):
            return predict(
                dataset,
                partial(Predictor, self.module, self._meaning, prediction, probability),
                columns=features,
                outputs=outputs,
                batch_size=self.getOrDefault("batchSize"),
                dtypes=dtypes,
            )


def _check_makers(predict: Any, probability: Any) -> None:
    optional(_check_function)("predict", predict)
    optional(_check_function)("probability", probability)


def _check_functions(module: Any, loss: Any, optimizer: Any, train: Any, **makers: Any) -> None:
    if (module is None) == (train is None):
        raise ValueError(
            "Pass either module, loss and optimizer, or train, which is the training function."
        )
    _check_makers(**makers)
    if train is not None:
        loop_arguments(train, {}, "train", "config")
        if loss is not None or optimizer is not None:
            raise ValueError("loss and optimizer belong to module, but train is the argument.")
        return
    _check_module("module", module)
    if loss is None or optimizer is None:
        missing = "loss" if loss is None else "optimizer"
        raise ValueError(f"{missing} is missing: module needs a loss and an optimizer.")
    if isinstance(loss, type):
        raise TypeError(f"loss is the class {loss.__name__}: pass an instance, {loss.__name__}().")
    _check_function("loss", loss)
    if isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "optimizer is an object that has parameters of this process. Pass a function of the "
            f"parameters: optimizer=lambda parameters: {_construction(optimizer)}."
        )
    _check_optimizer("optimizer", optimizer)


def _construction(optimizer: torch.optim.Optimizer) -> str:
    """Return the call that makes such an optimizer, with the arguments that are no defaults."""
    kind = type(optimizer)
    known = inspect.signature(kind).parameters
    values = "".join(
        f", {name}={value!r}"
        for name, value in optimizer.defaults.items()
        if name in known and value != known[name].default
    )
    origin = "torch.optim" if kind.__module__.startswith("torch.optim.") else kind.__module__
    return f"{origin}.{kind.__qualname__}(parameters{values})"
