"""Canaries for what `distributor._compat.torch` uses of torch."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from support.canary import relies_on

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from distributor._compat import torch as private  # noqa: E402

pytestmark = pytest.mark.repository


def test_storages_of_tensors_are_taken_apart_and_made_again() -> None:
    tensor = torch.arange(4, dtype=torch.int32)
    with relies_on("torch", "TypedStorage", "torch.typed_storage"):
        # What the pickle of a tensor refers to.
        usual, (typed, *_) = tensor.__reduce_ex__(5)
        assert private.is_typed_storage(typed)
        untyped = private.untyped_storage(typed)
        assert untyped.data_ptr() == tensor.data_ptr()
        assert not private.is_typed_storage(untyped)
        again = private.typed_storage(untyped, torch.int32)
        assert again.dtype == torch.int32
        assert private.untyped_storage(again).data_ptr() == tensor.data_ptr()
        assert not private.is_rebuilder_of_bytes(usual)

    tensor = torch.arange(4).to(torch.float8_e5m2)
    with relies_on("torch", "_rebuild_tensor_v3", "torch.rebuild_tensor_of_bytes"):
        function, (storage, *rest) = tensor.__reduce_ex__(5)
        assert private.is_rebuilder_of_bytes(function)
        assert storage.data_ptr() == tensor.data_ptr()
        again = private.rebuild_tensor_of_bytes(storage, *rest)
        assert again.float().tolist() == [0, 1, 2, 3]
        assert again.data_ptr() == tensor.data_ptr()


def test_an_optimizer_imports_what_is_preloaded() -> None:
    program = (
        "import sys, torch\n"
        "parameter = torch.nn.Parameter(torch.ones(1))\n"
        "before = set(sys.modules)\n"
        "torch.optim.SGD([parameter], lr=1.0)\n"
        "print(*set(sys.modules) - before)\n"
    )
    with relies_on("torch", "what the first optimizer imports", "torch.OPTIMIZER_IMPORTS"):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        assert set(private.OPTIMIZER_IMPORTS) <= set(done.stdout.split())


def test_logs_and_debug_level_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, level = logging.getLogger("torch.distributed"), dist.get_debug_level()
    with relies_on("torch", "_logging._internal._init_logs", "torch.read_log_variables"):
        monkeypatch.setenv("TORCH_LOGS", "+distributed")
        private.read_log_variables()
        assert logger.getEffectiveLevel() == logging.DEBUG
        monkeypatch.setenv("TORCH_LOGS", "-distributed")
        private.read_log_variables()
        assert logger.getEffectiveLevel() == logging.ERROR
    with relies_on("torch", "set_debug_level_from_env", "torch.read_debug_level"):
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
        private.read_debug_level()
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
        dist.set_debug_level(level)


def test_a_store_is_served_on_a_socket_that_exists() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with relies_on("torch", "TCPStore's master_listen_fd", "torch.serve_store"):
        store = private.serve_store("127.0.0.1", port, listener.detach())
        client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        client.set("key", "value")
        assert store.get("key") == b"value"
    with relies_on("torch", "the error of a store whose server has gone", "torch.LOST_CONNECTION"):
        del store
        with pytest.raises(RuntimeError) as lost:
            client.get("key")
        assert any(sign in str(lost.value).lower() for sign in private.LOST_CONNECTION), lost.value


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"),
    reason=f"torch {torch.__version__} for CPUs has no flight recorder",
)
def test_the_flight_recorder_has_the_last_collectives() -> None:
    program = (
        "import json, torch, torch.distributed as dist\n"
        "from distributor._compat.torch import recorded_collectives\n"
        "assert recorded_collectives() == []\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(3))\n"
        "print(json.dumps(recorded_collectives()))\n"
        "dist.destroy_process_group()\n"  # otherwise its threads end with the interpreter
    )
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "10"}
    with relies_on("torch", "_dump_fr_trace_json", "torch.recorded_collectives"):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        [entry] = json.loads(done.stdout)
        assert entry["profiling_name"] == "gloo:all_reduce"
        assert (entry["collective_seq_id"], entry["input_sizes"]) == (1, [[3]])
        assert entry["process_group"][-1] == "default_pg"
        assert {"retired", "state"} <= entry.keys()


def test_groups_are_found_and_a_ddp_model_refers_to_what_frees_its_own() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with relies_on("torch", "_world.pg_map", "torch.process_groups"):
            assert private.process_groups(dist.distributed_c10d) == [dist.group.WORLD]
        what = "DistributedDataParallel's reducer, logger and process_group"
        with relies_on("torch", what, "torch.keep_groups_of_models"):
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
            assert weakref.ref(model.reducer)() is model.reducer
            assert weakref.ref(model.logger)() is model.logger
            assert model.process_group is not None
    finally:
        dist.destroy_process_group()


def test_a_ddp_model_logs_how_long_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = sys.modules["torch.nn.parallel.distributed"]
    ddp = torch.nn.parallel.DistributedDataParallel
    monkeypatch.setattr(ddp, "__init__", ddp.__init__)
    noted: list[Any] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        what = "_set_ddp_runtime_logging_sample_rate or _get_ddp_logging_data"
        with relies_on("torch", what, "torch.ddp_waiting"):
            private.note_models(parallel, lambda *found: noted.append(found), 20)
            model = ddp(torch.nn.Linear(1, 1))
            assert noted == [(model, private.ddp_waiting, True)]
            assert private.ddp_waiting(model) is None
            for iteration in (1, 2, 3):
                model(torch.ones(1, 1)).sum().backward()
                found = private.ddp_waiting(model)
                # Torch notes an iteration when the next one begins.
                assert found is None if iteration == 1 else found[0] == iteration - 1
                assert found is None or 0 <= found[1] < 1
    finally:
        dist.destroy_process_group()


@pytest.mark.slow  # the compiler takes seconds to import
def test_the_steps_of_a_compiled_optimizer_are_counted(
    recwarn: pytest.WarningsRecorder,
) -> None:
    module = sys.modules["torch.optim.optimizer"]
    model, calls = torch.nn.Linear(1, 1), []
    optimizer = torch.optim.SGD(model.parameters())
    with relies_on("torch", "_torchdynamo_disable", "torch.call_after_steps"):
        handle = private.call_after_steps(module, lambda: calls.append(threading.get_ident()))
        step = torch.compile(lambda: optimizer.step(), backend="eager")
        for _ in range(3):
            model(torch.ones(1)).backward()
            step()
        handle.remove()
        assert len(calls) == 3
        assert not [each for each in recwarn if "Dynamo does not know" in str(each.message)]


def test_loaders_and_savers_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    saver = pytest.importorskip("torch.distributed.checkpoint.state_dict_saver")
    loaders, serialization = sys.modules["torch.utils.data.dataloader"], torch.serialization
    package = torch.distributed.checkpoint
    iterator = loaders._BaseDataLoaderIter
    for owner, name in (
        *((iterator, "__next__"), (loaders.DataLoader, "__iter__")),
        *((torch, "save"), (serialization, "save")),
        *((package, "save"), (package, "async_save"), (saver, "save"), (saver, "async_save")),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    calls: list[str] = []

    def timed(function: Any) -> Any:
        return lambda *args, **kwargs: (
            calls.append(function.__name__) or function(*args, **kwargs)  # type: ignore[func-returns-value]
        )

    with relies_on("torch", "_BaseDataLoaderIter.__next__", "torch.time_loaders"):
        private.time_loaders(loaders, timed)
        for num_workers in (0, 1):
            assert len(list(torch.utils.data.DataLoader([1, 2], num_workers=num_workers))) == 2
        assert calls == 2 * ["__iter__", *3 * ["__next__"]]
    with relies_on("torch", "what exports its functions that save", "torch.time_calls"):
        private.time_calls(serialization, ("save",), timed)
        private.time_calls(saver, ("save", "async_save"), timed)
        calls.clear()
        torch.save(1, tmp_path / "1.pt")
        package.save({}, checkpoint_id=str(tmp_path / "2"), no_dist=True)
        assert calls == ["save", "save"]
        assert package.async_save is saver.async_save


def test_torch_asks_for_the_host_of_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    asked = []

    def choose(host: str, port: int) -> str:
        asked.append((host, port))
        return "127.0.0.1"

    rendezvous = sys.modules["torch.distributed.rendezvous"]
    monkeypatch.setattr(rendezvous, "_create_c10d_store", rendezvous._create_c10d_store)
    monkeypatch.setattr(private, "_kept_stores", [])
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # torch 2.4 reads it, and ranks have it
    monkeypatch.setenv("MASTER_ADDR", "no-such-host")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    what = "_create_c10d_store, or when it reads TORCHELASTIC_USE_AGENT_STORE"
    with relies_on("torch", what, "torch.choose_store"):
        private.choose_store(rendezvous, choose)
        for init_method in ("env://", f"tcp://no-such-host:{store.port}"):
            dist.init_process_group("gloo", init_method, rank=0, world_size=1)
            dist.destroy_process_group()
        assert asked == [("no-such-host", store.port)] * 2


def test_each_initialization_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = dist.distributed_c10d
    monkeypatch.setattr(module, "_new_process_group_helper", module._new_process_group_helper)
    what = "_new_process_group_helper, or its arguments for the default process group"
    with relies_on("torch", what, "torch.separate_initializations"):
        private.separate_initializations(module)
        store, values = dist.HashStore(), []
        for number in range(3):
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            used = module._get_default_store()
            values.append(used.compare_set("key", "", str(number)))
            dist.new_group([0])
            dist.destroy_process_group()
        assert values == [b"0", b"1", b"2"]
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        dist.destroy_process_group()


def test_torch_starts_processes_in_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["torch.multiprocessing.spawn"]
    for each in (module, torch.multiprocessing):
        monkeypatch.setattr(each, "start_processes", each.start_processes)
    wrapped = []

    def wrap(function: Any) -> Any:
        wrapped.append(function)
        return print

    with relies_on("torch", "start_processes", "torch.wrap_spawned"):
        private.wrap_spawned(module, wrap)
        torch.multiprocessing.spawn(len, nprocs=1)
        torch.multiprocessing.start_processes(max, nprocs=1, start_method="fork")
        assert wrapped == [len, max]


def test_subclasses_of_the_distributed_sampler_call_its_constructor() -> None:
    module = sys.modules["torch.utils.data.distributed"]
    share, other = [0, 1, 2], [0, 1, 2, 3]
    sampler = torch.utils.data.SequentialSampler(share)

    class Changed(module.DistributedSampler):  # type: ignore[name-defined,misc]
        """With a constructor that can be changed."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    class DatasetOfSampler(list[int]):
        """As Lightning's, whose dataset is a sampler."""

        _sampler = sampler

    with relies_on("torch", "DistributedSampler's constructor", "torch.keep_shares_whole"):
        private.keep_shares_whole(
            SimpleNamespace(DistributedSampler=Changed),  # type: ignore[arg-type]
            is_share=lambda dataset: dataset is share,
        )
        ranks = {"num_replicas": 2, "rank": 1, "shuffle": False}
        assert list(Changed(share, **ranks)) == [0, 1, 2]
        assert list(Changed(DatasetOfSampler(sampler), **ranks)) == [0, 1, 2]
        assert list(Changed(other, **ranks)) == [1, 3]


def test_lightning_wraps_samplers_as_datasets() -> None:
    distributed = pytest.importorskip("lightning.fabric.utilities.distributed")
    sampler = torch.utils.data.SequentialSampler([1, 2])
    with relies_on("lightning", "_DatasetSamplerWrapper", "torch.keep_shares_whole"):
        wrapper = distributed.DistributedSamplerWrapper(sampler, num_replicas=2, rank=0)
        assert isinstance(wrapper, torch.utils.data.DistributedSampler)
        assert wrapper.dataset._sampler is sampler


def test_a_group_that_could_not_form_is_forgotten() -> None:
    module, store = dist.distributed_c10d, dist.HashStore()
    with relies_on("torch", "_world.group_count", "torch.forget_failed_group"):
        for _ in range(2):
            limit = timedelta(milliseconds=10)
            with pytest.raises(RuntimeError):
                dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=limit)
            assert module._world.group_count, "so that the keys of the next one differ"
            private.forget_failed_group()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        module._get_default_store().set("key", "")
        dist.destroy_process_group()
        assert store.check(["0//key"])


def test_the_time_of_collectives_is_limited() -> None:
    with relies_on("torch", "_set_pg_timeout", "torch.limit_group"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        private.limit_group(77.0)
        options = dist.group.WORLD._get_backend(torch.device("cpu")).options
        dist.destroy_process_group()
        assert options._timeout == timedelta(seconds=77)


def test_a_process_forms_a_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = dist.distributed_c10d
    monkeypatch.setattr(module, "rendezvous", module.rendezvous)
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "no-such-host"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    with relies_on("torch", "rendezvous", "torch.begin_alone"):
        private.begin_alone(module)
        for options in ({}, {"init_method": "env://"}, {"rank": 1, "world_size": 3}):
            dist.init_process_group("gloo", **options)
            assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
            dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()


def test_schedulers_do_not_count_void_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.optim.lr_scheduler
    for owner in vars(module).values():
        if isinstance(owner, type) and issubclass(owner, module.LRScheduler):
            for name in {"__init__", "step"} & vars(owner).keys():
                monkeypatch.setattr(owner, name, getattr(owner, name))
    void, created = [], []
    with relies_on("torch", "LRScheduler, or what has a step", "torch.follow_schedulers"):
        private.follow_schedulers(module, created.append, lambda scheduler: scheduler in void)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        schedulers = [
            module.StepLR(optimizer, 1),
            module.CosineAnnealingWarmRestarts(optimizer, 5),
            module.SequentialLR(optimizer, [module.ConstantLR(optimizer) for _ in "ab"], [3]),
            module.ReduceLROnPlateau(optimizer),
        ]
        assert created[-1] is schedulers[-1]
        assert {type(each) for each in created} >= {type(each) for each in schedulers}
        for scheduler in schedulers:
            arguments = (1.0,) if scheduler is schedulers[-1] else ()
            optimizer.step()
            scheduler.step(*arguments)
            assert scheduler.last_epoch == 1
            void.append(scheduler)
            scheduler.step(*arguments)
            assert scheduler.last_epoch == 1


def test_calls_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, scaler = dist.distributed_c10d, torch.amp.grad_scaler.GradScaler
    monkeypatch.setattr(groups, "new_group", groups.new_group)
    monkeypatch.setattr(scaler, "__init__", scaler.__init__)
    noted: list[Any] = []
    with relies_on("torch", "what calls new_group and GradScaler", "torch.note_calls"):
        private.note_calls(groups, "new_group", lambda ranks: noted.append(ranks))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert groups.new_group([0]) is not None
        dist.destroy_process_group()
        assert noted == [[0]], "the default group is made without it"
        private.note_calls(scaler, "__init__", lambda *_, **options: noted.append(options))
        torch.amp.GradScaler("cpu", enabled=False)
        assert noted[1:] == [{"enabled": False}]
