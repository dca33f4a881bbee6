"""Canaries for what `distributor._compat.huggingface` uses of Accelerate and Transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from support.canary import relies_on
from torch.utils.data import DataLoader

from distributor._compat import huggingface as private

pytestmark = pytest.mark.repository


@pytest.fixture
def accelerate() -> Any:
    """Import Accelerate in a test only: each process of the tests collects all of them."""
    return pytest.importorskip("accelerate")


def test_a_marked_loader_is_not_prepared_again(accelerate: Any) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    plain, marked = (DataLoader([1, 2, 3, 4]) for _ in range(2))
    private.mark_as_prepared(marked)
    assert accelerator.prepare(plain) is not plain
    with relies_on("accelerate", "the mark of prepared objects", "huggingface.mark_as_prepared"):
        assert accelerator.prepare(marked) is marked


def test_a_state_sees_other_ranks_only_if_it_is_asked_to(
    accelerate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class State:
        def __init__(self, cpu: bool, **kwargs: Any) -> None:
            asked.append((cpu, kwargs))

    with relies_on("accelerate", "PartialState's argument cpu", "huggingface.see_all_ranks"):
        state: Any = accelerate.state.PartialState()
        assert private.state_arguments(state) in ({"cpu": True}, {"cpu": False})
        parse = accelerate.state.parse_flag_from_env
        module: Any = SimpleNamespace(PartialState=State, parse_flag_from_env=parse)
        private.see_all_ranks(module)
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        for world_size, variable in (("2", None), ("1", None), ("2", "false"), ("1", "true")):
            monkeypatch.setenv("WORLD_SIZE", world_size)
            monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
            if variable:
                monkeypatch.setenv("ACCELERATE_USE_CPU", variable)
            module.PartialState(backend=None)
        assert asked == [(cpu, {"backend": None}) for cpu in (True, False, False, True)]


def test_a_share_is_left_whole(accelerate: Any) -> None:
    """Neither divided among two processes, nor read by the first for both."""
    share = [0, 1, 2, 3]
    module: Any = accelerate.accelerator
    inside = SimpleNamespace(prepare_data_loader=module.prepare_data_loader)
    asked: list[Any] = []
    private.keep_shares_whole(
        inside,  # type: ignore[arg-type]
        is_share=lambda found: found is share,
        evened=lambda loader: loader,
        question=lambda dataset, processes: asked.append((dataset, processes)),
    )
    arguments = {"num_processes": 2, "process_index": 1, "put_on_device": True}
    with relies_on("accelerate", "prepare_data_loader", "huggingface.keep_shares_whole"):
        assert "prepare_data_loader" in accelerate.Accelerator.prepare_data_loader.__code__.co_names
        prepared = inside.prepare_data_loader(DataLoader(share, batch_size=3), **arguments)
        assert [batch.tolist() for batch in prepared] == [[0, 1, 2], [3]]
        assert prepared.remainder == -1, "gather_for_metrics drops nothing"
    other = inside.prepare_data_loader(DataLoader([0, 1, 2, 3]), **arguments)
    assert [batch.tolist() for batch in other] == [[1], [3]]
    assert asked == [([0, 1, 2, 3], 2)]


def test_lost_adapters_are_refused(accelerate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    what = "fsdp2_prepare_model, which the Accelerator calls"
    with relies_on("accelerate", what, "huggingface.refuse_lost_adapters"):
        prepare = accelerate.utils.fsdp_utils.fsdp2_prepare_model
        assert accelerate.accelerator.fsdp2_prepare_model is prepare
        assert "state_dict_type" in accelerate.FullyShardedDataParallelPlugin.__annotations__
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.14.0")
    utils: Any = SimpleNamespace(fsdp2_prepare_model=lambda accelerator, model: model)
    private.refuse_lost_adapters(utils)
    plugin = SimpleNamespace(state_dict_type="StateDictType.FULL_STATE_DICT")
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    with pytest.raises(RuntimeError, match="Install accelerate"):
        utils.fsdp2_prepare_model(accelerator, SimpleNamespace(peft_config={}))
    assert utils.fsdp2_prepare_model(accelerator, "of another kind") == "of another kind"


def test_fsdp_on_cpus_is_named(
    accelerate: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class State:
        _shared_state: ClassVar[dict[str, Any]] = {}
        distributed_type, is_main_process = "DistributedType.MULTI_CPU", True

        def __init__(self) -> None:
            self._shared_state["made"] = True

    with relies_on("accelerate", "AcceleratorState's names", "huggingface.note_ignored_fsdp"):
        assert isinstance(accelerate.state.AcceleratorState._shared_state, dict)
        assert (
            "ACCELERATE_USE_FSDP" in accelerate.state.AcceleratorState.__init__.__code__.co_consts
        )
        parse = accelerate.state.parse_flag_from_env
    module: Any = SimpleNamespace(AcceleratorState=State, parse_flag_from_env=parse)
    private.note_ignored_fsdp(module)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for _ in range(2):
        module.AcceleratorState()
    assert capsys.readouterr().out == "distributor: on CPUs Accelerate ignores FSDP: it uses DDP.\n"


def test_a_trainer_reports_its_steps() -> None:
    transformers = pytest.importorskip("transformers")
    reported = []
    module: Any = SimpleNamespace(
        TrainerCallback=transformers.trainer.TrainerCallback, DEFAULT_CALLBACKS=[]
    )
    what = "DEFAULT_CALLBACKS, with which each Trainer begins"
    with relies_on("transformers", what, "huggingface.report_progress"):
        assert transformers.trainer.DEFAULT_CALLBACKS
        private.report_progress(module, lambda *steps: reported.append(steps))
        [callback] = module.DEFAULT_CALLBACKS
        state = transformers.TrainerState(global_step=2, max_steps=5)
        callback().on_step_end(None, state, None)
    assert reported == [(2, 5)]


def test_arguments_are_made_anew_without_their_view_of_the_processes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")  # here: each process collects all tests
    kind = transformers.TrainingArguments
    given = kind(str(tmp_path), use_cpu=True, learning_rate=0.5, report_to="none", seed=3)
    given.note = "of the program's own"
    assert given.device.type == "cpu"
    what = "the attributes of TrainingArguments that depend on the process"
    with relies_on("transformers", what, "huggingface.training_arguments"):
        taken, others = private.training_arguments(given)
        again = kind(**taken)
        assert again.to_dict() == given.to_dict()
        view = vars(again).keys() - kind.__dataclass_fields__.keys()
        assert {"_setup_devices", "_n_gpu", "distributed_state"} <= view
        assert others.pop("note") == "of the program's own"
        assert not any("PartialState" in type(value).__name__ for value in others.values())
        assert not {name for name in others if "device" in name or "gpu" in name}
