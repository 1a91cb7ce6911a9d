# SPDX-License-Identifier: Apache-2.0
"""Worker groups on a real local Ray and in process: dispatch, rendezvous, co-location, failures."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from verl.protocol import DataProto, DataProtoConfig
from verl.single_controller.base import ClassWithInitArgs, Worker, WorkerGroup
from verl.single_controller.base import decorator as decorator_module
from verl.single_controller.base.decorator import (
    DISPATCH_MODE_FN_REGISTRY,
    MAGIC_ATTR,
    Dispatch,
    Execute,
    get_predefined_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from verl.single_controller.local import LocalWorkerGroup, create_local_colocated
from verl.utils.errors import UserError


class Calculator(Worker):
    """Joins a gloo group in `__init__`, as the hardest case for the start of a group."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        if self.world_size > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def all_reduce(self, value: float) -> float:
        total = torch.tensor([value * (self.rank + 1)], dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(total)
        return float(total)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def scale_rows(self, data: DataProto) -> DataProto:
        x = data.batch["x"] * self.scale
        metrics = {"x/sum": float(x.sum())}
        if self.world_size > 1:
            total = x.sum().reshape(1)
            dist.all_reduce(total)
            metrics = {"x/sum": float(total)}
        rank = torch.full((len(data),), self.rank)
        data.meta_info["touched"] = True
        names = {"name": data.non_tensor_batch["name"]}
        return DataProto.from_dict({"y": x, "rank": rank}, names, {"metrics": metrics})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def scale_rows_later(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"] * self.scale}, {"name": data.non_tensor_batch["name"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def metrics_only(self, data: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"rank": float(self.rank)}})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count_rows(self, data: DataProto) -> int:
        return len(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def double(self, value: int) -> int:
        return 2 * value

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def echo(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def who(self, suffix: str) -> str:
        return f"{self.rank}{suffix}"

    @register(execute_mode=Execute.RANK_ZERO)
    def first(self, values: list[int]) -> int:
        return len(values)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self) -> dict[str, str]:
        keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
        keys += ("WG_BACKEND", "RAY_LOCAL_RANK")
        return {key: os.environ[key] for key in keys if key in os.environ} | {"threads": str(torch.get_num_threads())}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, message: str) -> None:
        if self.rank == self.world_size - 1:
            raise UserError(message)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_in_collective(self) -> None:
        if self.rank == self.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(1))

    def unregistered(self) -> int:
        return self.rank


class Partner(Worker):
    """Second role of a co-located actor."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def partner_scale(self) -> float:
        other = self.get_fused_worker_by_name("calc")
        assert isinstance(other, Calculator)
        return other.scale


class ColocatedCalculator(Calculator):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()


class FailingInit(Worker):
    def __init__(self, message: str) -> None:
        super().__init__()
        if self.rank == 1:
            raise UserError(message)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))


def rows(n: int) -> DataProto:
    names = np.array([f"row{i}" for i in range(n)], dtype=object)
    return DataProto.from_dict({"x": torch.arange(float(n))}, {"name": names}, {"step": 3})


@pytest.fixture(scope="module")
def group(ray_session: None) -> Iterator[WorkerGroup]:
    """Two gloo ranks on half a CPU each."""
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    pool = RayResourcePool([2], use_gpu=False, cpus_per_rank=0.5)
    wg = RayWorkerGroup(pool, RayClassWithInitArgs(Calculator, scale=2.0), ray_wait_register_center_timeout=60)
    yield wg
    wg.shutdown()
    pool.shutdown()


# ---- on Ray -----------------------------------------------------------------------------------------------------


def test_ranks_form_a_process_group(group: WorkerGroup) -> None:
    assert group.world_size == 2
    assert group.all_reduce(10.0) == [30.0, 30.0]
    env = group.environment()
    assert [e["RANK"] for e in env] == ["0", "1"] and [e["LOCAL_RANK"] for e in env] == ["0", "1"]
    assert {e["WORLD_SIZE"] for e in env} == {"2"} and {e["WG_BACKEND"] for e in env} == {"ray"}
    assert {(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in env} == {(group.master_address, group.master_port)}
    assert {(e["OMP_NUM_THREADS"], e["OMP_WAIT_POLICY"], e["threads"]) for e in env} == {("1", "PASSIVE", "1")}


def test_data_is_split_and_joined_in_order(group: WorkerGroup) -> None:
    data = rows(6)
    out = group.scale_rows(data)
    assert out.batch["y"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert out.batch["rank"].tolist() == [0, 0, 0, 1, 1, 1]
    assert out.non_tensor_batch["name"].tolist() == [f"row{i}" for i in range(6)]
    assert out.meta_info["metrics"] == {"x/sum": 30.0}  # reduced by the workers; rank 0's dict arrives
    assert data.meta_info == {"step": 3}
    assert group.metrics_only(data).meta_info == {"metrics": {"rank": 0.0}}
    assert group.count_rows(data=data) == [3, 3]


def test_uneven_split_is_refused_or_padded(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="5 rows cannot be split equally over 2 ranks"):
        group.scale_rows(rows(5))
    marked = rows(5)
    marked.meta_info[DataProtoConfig.auto_padding_key] = True
    out = group.scale_rows(marked)
    assert out.batch["y"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0] and out.batch["rank"].tolist() == [0, 0, 0, 1, 1]
    assert len(marked) == 5 and len(out.non_tensor_batch["name"]) == 5
    assert group.scale_rows_later(marked).get().batch["x"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert group.metrics_only(marked).meta_info == {"metrics": {"rank": 0.0}}
    monkeypatch.setenv("VERL_AUTO_PADDING", "1")
    assert group.scale_rows(rows(1)).batch["y"].tolist() == [0.0]


def test_futures_pass_from_call_to_call(group: WorkerGroup) -> None:
    future = group.scale_rows_later(rows(4))
    assert group.scale_rows(future).batch["y"].tolist() == [0.0, 4.0, 8.0, 12.0]


def test_submitted_calls_run_in_order_and_end_like_the_others(group: WorkerGroup) -> None:
    marked = rows(5)
    marked.meta_info[DataProtoConfig.auto_padding_key] = True
    calls = [group.submit("scale_rows", rows(4)), group.submit("scale_rows", marked), group.submit("double", [3, 4])]
    ranked = group.submit("who", "?")
    assert calls[2].result() == [6, 8] and ranked.result() == "0?"
    assert calls[1].result().batch["y"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert calls[0].result().batch["y"].tolist() == [0.0, 2.0, 4.0, 6.0]
    failing = group.submit("fail", "no such thing")
    assert group.submit("double", [1, 2]).result() == [2, 4]
    with pytest.raises(UserError, match="no such thing"):
        failing.result()
    with pytest.raises(AttributeError, match="'unregistered' is no registered method"):
        group.submit("unregistered")


def test_a_submitted_call_does_not_wait(group: WorkerGroup) -> None:
    start = time.monotonic()
    call = group.submit("sleep", 1.0)
    assert time.monotonic() - start < 0.9
    assert call.result() == [1.0, 1.0] and time.monotonic() - start >= 1.0


def test_other_dispatch_modes(group: WorkerGroup) -> None:
    assert group.double([3, 4]) == [6, 8]
    with pytest.raises(AssertionError, match="each of the 2 ranks"):
        group.double([3])
    assert group.echo(["a", "b"]) == ["a", "b"] and group.echo("c") == ["c", "c"]
    assert group.who("!") == "0!" and group.first([1, 2]) == 2
    assert group.execute_all_sync("unregistered") == [0, 1]
    assert group.execute_rank_zero_sync("unregistered") == 0
    assert group.execute_func_rank_zero(max, 3, 7) == 7
    out = group.execute_with_func_generator(lambda worker, data: worker.metrics_only(data), rows(2))
    assert out.meta_info["metrics"] == {"rank": 0.0}


def test_worker_exception_arrives_with_type_and_message(group: WorkerGroup) -> None:
    with pytest.raises(UserError) as caught:
        group.fail("model folder /nowhere does not exist")
    assert str(caught.value) == "model folder /nowhere does not exist"
    assert "in fail" in str(caught.value.__cause__)  # the remote traceback
    assert group.double([1, 2]) == [2, 4]


def test_colocated_roles_share_a_process(ray_session: None) -> None:
    from verl.single_controller.ray import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        create_colocated_worker_cls,
    )

    pool = RayResourcePool([1], use_gpu=False)
    roles = {"calc": RayClassWithInitArgs(ColocatedCalculator, 5.0), "partner": RayClassWithInitArgs(Partner)}
    parent = RayWorkerGroup(pool, create_colocated_worker_cls(roles))
    try:
        groups = parent.spawn({"calc", "partner"})
        assert parent.calc_process() == groups["calc"].process() == groups["partner"].process() != [os.getpid()]
        assert groups["partner"].partner_scale() == [5.0]
        assert groups["calc"].scale_rows(rows(2)).batch["y"].tolist() == [0.0, 5.0]
        assert groups["calc"].execute_all_sync("unregistered") == [0]
        with pytest.raises(ValueError, match=r"no role 'critic'.*\['calc', 'partner'\]"):
            parent.spawn({"critic"})
        with pytest.raises(UserError, match="already holds 1 worker group"):
            RayWorkerGroup(pool, RayClassWithInitArgs(Partner))
    finally:
        parent.shutdown()
        pool.shutdown()


def test_dead_actor_is_an_error_and_stays_one(ray_session: None) -> None:
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    pool = RayResourcePool([2], use_gpu=False, cpus_per_rank=0.5)
    wg = RayWorkerGroup(pool, RayClassWithInitArgs(Calculator))
    try:
        with pytest.raises(RuntimeError, match=r"Calculator.*rank 1 of 2 died in die_in_collective"):
            wg.die_in_collective()
        with pytest.raises(RuntimeError, match="rank 1 of 2 died"):
            wg.all_reduce(1.0)
    finally:
        wg.shutdown()
    try:  # the pool is free for the next group; a rank that fails in __init__ does not leave the other one waiting
        with pytest.raises(UserError, match=r"^no such folder$"):
            RayWorkerGroup(pool, RayClassWithInitArgs(FailingInit, "no such folder"))
    finally:
        pool.shutdown()


def test_impossible_and_taken_resources(ray_session: None) -> None:
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, merge_resource_pool

    cls = RayClassWithInitArgs(Partner)
    with pytest.raises(UserError, match=r"requests \{CPU: 64\}.*\{CPU: 4\} in total, \{CPU: [\d.]+\} available"):
        RayWorkerGroup(RayResourcePool([64], use_gpu=False, name_prefix="big"), cls)
    with pytest.raises(UserError, match=r"requests \{CPU: 2, GPU: 2\}.*GPU: 0\} in total"):
        RayWorkerGroup(RayResourcePool([2], use_gpu=True), cls)
    holder, late = RayResourcePool([2], use_gpu=False), RayResourcePool([3], use_gpu=False, ready_timeout=1.0)
    try:
        holder.get_placement_groups()
        with pytest.raises(UserError, match="did not become free within 1 s"):
            RayWorkerGroup(late, cls)
    finally:
        holder.shutdown()
    with pytest.raises(AssertionError, match="use_gpu"):
        merge_resource_pool(RayResourcePool([1], use_gpu=False), RayResourcePool([1], use_gpu=True))


# ---- in process -------------------------------------------------------------------------------------------------


def test_local_group_equals_ray_group(group: WorkerGroup) -> None:
    local = LocalWorkerGroup(ClassWithInitArgs(Calculator, scale=2.0))
    data = rows(4)
    ours, theirs = local.scale_rows(data), group.scale_rows(data)
    assert ours.batch["y"].equal(theirs.batch["y"]) and ours.meta_info == theirs.meta_info
    assert data.meta_info == {"step": 3}
    assert ours.non_tensor_batch["name"].tolist() == theirs.non_tensor_batch["name"].tolist()
    later, theirs_later = local.scale_rows_later(data).get(), group.scale_rows_later(data).get()
    assert later.batch["x"].equal(theirs_later.batch["x"])
    assert local.submit("scale_rows", data).result().batch["y"].equal(theirs.batch["y"])
    assert local.who("!") == group.who("!") == local.submit("who", "!").result()
    assert local.echo("c") == ["c"] and local.execute_all_sync("unregistered") == [0]
    with pytest.raises(UserError, match=r"^wrong$"):
        local.fail("wrong")


def test_local_group_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    local = LocalWorkerGroup(ClassWithInitArgs(Calculator))
    assert local.worker.rank == 0 and local.environment()[0]["RANK"] == "0"
    assert os.environ["RANK"] == "7" and "WORLD_SIZE" not in os.environ
    with pytest.raises(UserError):
        local.fail("x")
    assert os.environ["RANK"] == "7"


def test_local_colocated() -> None:
    groups = create_local_colocated({"calc": ClassWithInitArgs(Calculator, 3.0), "partner": ClassWithInitArgs(Partner)})
    assert groups["partner"].partner_scale() == [3.0] and groups["calc"].all_reduce(2.0) == [2.0]


# ---- decorator --------------------------------------------------------------------------------------------------


def test_register_marks_and_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = getattr(Calculator.double, MAGIC_ATTR)
    assert marks == {"dispatch_mode": Dispatch.DP_COMPUTE, "execute_mode": Execute.ALL, "blocking": True}
    assert Calculator.double.__name__ == "double"
    monkeypatch.setattr(decorator_module, "DISPATCH_MODE_FN_REGISTRY", dict(DISPATCH_MODE_FN_REGISTRY))

    def to_all(group: WorkerGroup, *args: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple([a] * group.world_size for a in args), {}

    register_dispatch_mode("TEST_SUM", to_all, lambda group, output: sum(output))
    try:
        mode = Dispatch.TEST_SUM  # type: ignore[attr-defined]
        assert get_predefined_dispatch_fn(mode)["dispatch_fn"] is to_all

        class Adder(Worker):
            @register(dispatch_mode=mode)
            def add(self, x: int) -> int:
                return x + 1

        assert LocalWorkerGroup(ClassWithInitArgs(Adder)).add(4) == 5
        update_dispatch_mode(mode, to_all, lambda group, output: output)
        assert LocalWorkerGroup(ClassWithInitArgs(Adder)).add(4) == [5]
        with pytest.raises(ValueError, match="exists already"):
            register_dispatch_mode("TEST_SUM", to_all, lambda group, output: output)
    finally:
        delattr(Dispatch, "TEST_SUM")
    with pytest.raises(AssertionError, match="collect_fn"):
        register(dispatch_mode={"dispatch_fn": to_all})
    with pytest.raises(AssertionError, match="not a dispatch mode"):
        register(dispatch_mode="ONE_TO_ALL")  # type: ignore[arg-type]


def test_wrong_arguments_and_results() -> None:
    class Odd(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def none(self, data: DataProto) -> None:
            return None

        @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
        def direct(self) -> None:
            return None

    local = LocalWorkerGroup(ClassWithInitArgs(Odd))
    with pytest.raises(TypeError, match="DataProto arguments only, got int"):
        local.none(3)
    with pytest.raises(TypeError, match="must return a DataProto on every rank, got NoneType"):
        local.none(rows(1))
    with pytest.raises(NotImplementedError, match="on its worker"):
        local.direct()
