# SPDX-License-Identifier: Apache-2.0
"""Every member of DataProto, with properties over random records where a law can be stated."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from verl.protocol import (
    DataProto,
    DataProtoConfig,
    DataProtoFuture,
    DataProtoItem,
    all_gather_data_proto,
    collate_fn,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)

fast = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def test_short_public_names_are_the_same_objects() -> None:
    import verl
    import verl.utils
    from verl.utils.tokenizer import hf_processor, hf_tokenizer

    assert verl.DataProto is DataProto
    assert verl.utils.hf_tokenizer is hf_tokenizer and verl.utils.hf_processor is hf_processor
    for module in (verl, verl.utils):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = module.nothing


def make(n: int, kind: str = "both") -> DataProto:
    """Rows that carry their own number in every column."""
    tensors = {"id": torch.arange(n), "grid": torch.arange(n * 6.0).view(n, 6)} if kind != "arrays" else None
    arrays: dict[str, Any] = {"name": [f"r{i}" for i in range(n)], "list": [[i, i] for i in range(n)]}
    if kind == "tensors":
        arrays = {}
    return DataProto.from_dict(tensors, arrays, {"step": 1, "shared": [n]})


def ids(data: DataProto) -> list[int]:
    """The rows' numbers; all columns must agree on them."""
    if data.batch is None:
        return [int(name[1:]) for name in data.non_tensor_batch["name"]]
    numbers = data.batch["id"].tolist()
    assert (data.batch["grid"][:, 0] / 6).tolist() == numbers
    if data.non_tensor_batch:
        assert data.non_tensor_batch["name"].tolist() == [f"r{i}" for i in numbers]
        assert data.non_tensor_batch["list"].tolist() == [[i, i] for i in numbers]
    return numbers


kinds = st.sampled_from(["both", "tensors", "arrays"])

# ---- construction -----------------------------------------------------------------------------------------------


def test_lengths() -> None:
    assert len(make(3)) == 3 and len(make(3, "arrays")) == 3 and len(DataProto()) == 0
    assert len(DataProto(meta_info={"metrics": {}})) == 0


def test_from_dict_makes_one_element_a_row() -> None:
    data = make(2)
    assert data.non_tensor_batch["list"].shape == (2,) and data.non_tensor_batch["list"].dtype == object
    assert data.non_tensor_batch["list"][1] == [1, 1]


def test_from_single_dict() -> None:
    meta = {"a": 1}
    data = DataProto.from_single_dict({"x": torch.zeros(2), "n": np.array([1, 2])}, meta, auto_padding=True)
    assert set(data.batch.keys()) == {"x"} and set(data.non_tensor_batch) == {"n"}
    assert data.is_padding_enabled() and meta == {"a": 1}
    with pytest.raises(ValueError, match="'l' is a list"):
        DataProto.from_single_dict({"l": [1, 2]})


def test_inconsistent_records_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"'b' starts with dimensions \(3,\)"):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(AssertionError, match=r"\(3,\), the batch has 2 rows"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"n": [1, 2, 3]})
    with pytest.raises(AssertionError, match="must be a numpy array"):
        DataProto(non_tensor_batch={"n": [1]})  # type: ignore[dict-item]
    with pytest.raises(AssertionError, match="one batch dimension"):
        DataProto(batch=TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2, 3]))
    with pytest.raises(AssertionError, match="lacks a batch dimension"):
        DataProto.from_dict({"a": torch.tensor(1.0)})


# ---- rows -------------------------------------------------------------------------------------------------------


def test_int_gives_one_row() -> None:
    data = make(4)
    item = data[np.int64(-1)]
    assert isinstance(item, DataProtoItem) and item.batch["id"] == 3
    assert item.non_tensor_batch == {"name": "r3", "list": [3, 3]} and item.meta_info is data.meta_info
    assert ids(collate_fn([data[2], data[0]])) == [2, 0]
    with pytest.raises(TypeError, match="str"):
        data["id"]  # type: ignore[call-overload]


@fast
@given(n=st.integers(0, 9), kind=kinds, data=st.data())
def test_indexing_equals_list_indexing(n: int, kind: str, data: st.DataObject) -> None:
    proto, plain = make(n, kind), list(range(n))
    bound = st.none() | st.integers(-10, 10)
    window = slice(data.draw(bound), data.draw(bound), data.draw(st.none() | st.integers(-3, 3).filter(bool)))
    assert ids(proto[window]) == plain[window]
    picks = data.draw(st.lists(st.integers(-n, n - 1), max_size=12)) if n else []
    mask = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    for index, expected in ((picks, [plain[i] for i in picks]), (mask, [i for i in plain if mask[i]])):
        for form in (list, np.array, torch.tensor):
            part = proto[form(index)]
            assert ids(part) == expected and part.meta_info is proto.meta_info


def test_wrong_indices() -> None:
    with pytest.raises(AssertionError, match="mask of shape"):
        make(3).select_idxs([True, False])
    with pytest.raises(TypeError, match="float"):
        make(3).select_idxs(np.array([0.5]))
    with pytest.raises(IndexError):
        make(3).select_idxs([3])


@fast
@given(n=st.integers(1, 8), kind=kinds, times=st.integers(1, 4), data=st.data())
def test_repeat_and_reorder(n: int, kind: str, times: int, data: st.DataObject) -> None:
    proto, plain = make(n, kind), list(range(n))
    assert ids(proto.repeat(times)) == [i for i in plain for _ in range(times)]
    assert ids(proto.repeat(times, interleave=False)) == plain * times
    counts = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    assert ids(proto.sample_level_repeat(torch.tensor(counts))) == [i for i in plain for _ in range(counts[i])]
    order = data.draw(st.permutations(plain))
    proto.reorder(torch.tensor(order))
    assert ids(proto) == list(order)


def test_unfold_column_chunks() -> None:
    out = make(2).unfold_column_chunks(3, ["grid"])
    assert out.batch["grid"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert out.batch["id"].tolist() == [0, 0, 0, 1, 1, 1] and out.non_tensor_batch["name"].tolist()[2:4] == ["r0", "r1"]
    with pytest.raises(AssertionError, match="6 wide"):
        make(2).unfold_column_chunks(4, ["grid"])


# ---- columns ----------------------------------------------------------------------------------------------------


def test_select() -> None:
    data = make(2)
    part = data.select(["id"], ["name"], ["step"])
    assert set(part.batch.keys()) == {"id"} and set(part.non_tensor_batch) == {"name"} and part.meta_info == {"step": 1}
    assert data.select().meta_info is data.meta_info
    copied = data.select(deepcopy=True)
    copied.batch["id"] += 5
    copied.meta_info["shared"].append(0)
    assert data.batch["id"].tolist() == [0, 1] and data.meta_info["shared"] == [2]
    for other in (part, data.select()):
        other.batch["new"], other.non_tensor_batch["new"] = torch.zeros(2), np.zeros(2)
    assert "new" not in data.batch and "new" not in data.non_tensor_batch


def test_pop_and_rename() -> None:
    data = make(2)
    out = data.pop(["id"], ["name"], ["step"])
    assert set(out.batch.keys()) == {"id"} and out.meta_info == {"step": 1} and len(out) == 2
    assert (
        set(data.batch.keys()) == {"grid"} and set(data.non_tensor_batch) == {"list"} and "step" not in data.meta_info
    )
    with pytest.raises(AssertionError, match=r"no entry \['nope'\] among \['grid'\]"):
        data.pop(["grid", "nope"])
    assert "grid" in data.batch and len(data.pop()) == 0
    assert data.rename("grid", "g") is data and set(data.batch.keys()) == {"g"}
    with pytest.raises(ValueError, match="2 old names for 1"):
        data.rename(["g", "h"], ["i"])


def test_rename_swaps() -> None:
    data = DataProto.from_dict({"a": torch.zeros(1), "b": torch.ones(1)})
    data.rename(["a", "b"], ["b", "a"])
    assert data.batch["a"] == 1 and data.batch["b"] == 0


def test_union() -> None:
    nan = np.array([np.nan, {"a": np.array([1, 2])}], dtype=object)
    left = DataProto.from_dict({"a": torch.tensor([1, 2])}, {"o": nan}, {"m": 1})
    right = DataProto.from_dict({"a": torch.tensor([1, 2]), "b": torch.zeros(2)}, {"o": nan.copy()}, {"k": [1]})
    assert left.union(right) is left
    assert set(left.batch.keys()) == {"a", "b"} and left.meta_info == {"m": 1, "k": [1]}
    for other, where in (
        (DataProto.from_dict({"a": torch.tensor([1, 3]), "c": torch.zeros(2)}), "batch key 'a'"),
        (DataProto.from_dict({"c": torch.zeros(2)}, {"o": [1, 2]}), "non_tensor_batch key 'o'"),
        (DataProto.from_dict({"c": torch.zeros(2)}, None, {"m": 2}), "meta_info key 'm'"),
        (DataProto.from_dict({"c": torch.zeros(3)}), "2 rows and 3 rows"),
        (DataProto.from_dict(None, {"p": [1]}), "2 rows and 1 rows"),
    ):
        with pytest.raises(AssertionError, match=where):
            left.union(other)
        assert set(left.batch.keys()) == {"a", "b"} and left.meta_info == {"m": 1, "k": [1]}
    left.union(DataProto(meta_info={"extra": 1}))
    assert left.meta_info["extra"] == 1


def test_union_leaves_the_other_record_alone() -> None:
    source = make(2, "tensors")
    merged = DataProto(meta_info={}).union(source)
    merged.batch["new"] = torch.zeros(2)
    assert "new" not in source.batch and ids(merged) == [0, 1]


def test_union_helpers() -> None:
    a, b = np.array([1.0, np.nan]), np.array([1.0, np.nan])
    assert set(union_numpy_dict({"x": a}, {"x": b, "y": b})) == {"x", "y"}
    with pytest.raises(AssertionError):
        union_numpy_dict({"x": a}, {"x": np.array([1.0, 2.0])})
    one = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
    assert union_tensor_dict(one, TensorDict({"y": torch.ones(2)}, batch_size=[2])) is one and "y" in one
    with pytest.raises(AssertionError):
        union_tensor_dict(one, TensorDict({"x": torch.ones(2)}, batch_size=[2]))
    assert list_of_dict_to_dict_of_list([{"a": 1}, {"a": 2}]) == {"a": [1, 2]}
    assert list_of_dict_to_dict_of_list([]) == {}
    with pytest.raises(AssertionError, match="entry 1"):
        list_of_dict_to_dict_of_list([{"a": 1}, {"b": 2}])


def test_to_is_in_place() -> None:
    data = make(2)
    assert data.to("meta") is data and data.batch["id"].device.type == "meta"


# ---- splitting and joining --------------------------------------------------------------------------------------


@fast
@given(parts=st.integers(1, 6), size=st.integers(0, 4), kind=kinds)
def test_chunk_concat_round_trip(parts: int, size: int, kind: str) -> None:
    data = make(parts * size, kind)
    chunks = data.chunk(parts)
    assert [len(c) for c in chunks] == [size] * parts and all(c.meta_info is data.meta_info for c in chunks)
    joined = DataProto.concat(chunks)
    assert ids(joined) == list(range(parts * size)) and joined.meta_info is data.meta_info


@fast
@given(n=st.integers(0, 20), parts=st.integers(1, 7), kind=kinds)
def test_uneven_chunks_follow_torch(n: int, parts: int, kind: str) -> None:
    data = make(n, kind)
    if n % parts:
        with pytest.raises(AssertionError, match=f"{n} rows cannot be split equally over {parts}"):
            data.chunk(parts)
    data.meta_info[DataProtoConfig.auto_padding_key] = True
    chunks = data.chunk(parts)
    assert [len(c) for c in chunks] == [len(c) for c in torch.arange(n).chunk(parts)]
    assert ids(DataProto.concat(chunks)) == list(range(n))


def test_concat_checks() -> None:
    with pytest.raises(AssertionError, match="at least one"):
        DataProto.concat([])
    with pytest.raises(AssertionError, match=r"part 1 .* columns \['non_tensor:list', 'non_tensor:name'\]"):
        DataProto.concat([make(1), make(1, "tensors")])
    first = DataProto(meta_info={"metrics": {"a": 1.0}})
    assert DataProto.concat([first, DataProto(meta_info={"metrics": {"a": 2.0}})]).meta_info == {"metrics": {"a": 1.0}}


@fast
@given(n=st.integers(1, 9), divisor=st.integers(1, 24), kind=kinds)
def test_pad_unpad(n: int, divisor: int, kind: str) -> None:
    data = make(n, kind)
    padded, pad = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) == n + pad and len(padded) % divisor == 0 and 0 <= pad < divisor
    assert ids(padded) == [i % n for i in range(n + pad)]
    assert ids(unpad_dataproto(padded, pad)) == list(range(n)) and ids(data) == list(range(n))


def test_pad_empty() -> None:
    assert pad_dataproto_to_divisor(DataProto(), 4)[1] == 0


def test_padding_in_place_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make(2)
    data.padding(2, "first")
    data.padding(1)
    assert ids(data) == [0, 1, 0, 0, 0]
    with pytest.raises(ValueError, match="middle"):
        data.padding(1, "middle")
    assert not data.is_padding_enabled()
    monkeypatch.setenv("VERL_AUTO_PADDING", "TRUE")
    assert data.is_padding_enabled()
    monkeypatch.delenv("VERL_AUTO_PADDING")
    DataProtoConfig.auto_padding = True
    try:
        assert data.is_padding_enabled()
    finally:
        DataProtoConfig.auto_padding = False
    with pytest.raises(TypeError):
        DataProtoConfig.auto_padding = 1  # type: ignore[assignment]


def test_make_iterator() -> None:
    data = make(6)
    batches = list(data.make_iterator(2, epochs=2))
    assert [ids(b) for b in batches] == [[0, 1], [2, 3], [4, 5]] * 2
    assert all(b.meta_info is data.meta_info for b in batches)
    state = torch.get_rng_state()

    def shuffled(seed: int | None) -> list[list[int]]:
        return [ids(b) for b in data.make_iterator(3, 2, seed, {"shuffle": True})]

    assert shuffled(1) == shuffled(1) != shuffled(2)
    assert shuffled(None) == shuffled(0)
    first = shuffled(1)
    assert sorted(first[0] + first[1]) == sorted(first[2] + first[3]) == list(range(6)) and first[:2] != first[2:]
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(AssertionError, match="mini-batches of 4"):
        next(data.make_iterator(4, 1))


def test_fold_unfold() -> None:
    data = make(6)
    folded = fold_batch_dim(data, 2)
    assert (
        len(folded) == 2 and folded.batch["grid"].shape == (2, 3, 6) and folded.non_tensor_batch["name"].shape == (2, 3)
    )
    assert ids(unfold_batch_dim(folded)) == list(range(6))
    with pytest.raises(AssertionError, match="6 rows"):
        fold_batch_dim(data, 4)


# ---- storage ----------------------------------------------------------------------------------------------------


@fast
@given(n=st.integers(0, 6), kind=kinds)
def test_save_load_round_trip(tmp_path: Path, n: int, kind: str) -> None:
    data = make(n, kind)
    data.save_to_disk(tmp_path / "d.pkl")
    again = DataProto.load_from_disk(tmp_path / "d.pkl")
    assert ids(again) == list(range(n)) and again.meta_info == data.meta_info
    assert [p.name for p in tmp_path.iterdir()] == ["d.pkl"]


def test_pickle_keeps_dtypes_and_writes_only_the_slice() -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.int32, torch.bool)
    data = DataProto.from_dict({str(d): torch.ones(2000, 8).to(d) for d in dtypes})
    again = pickle.loads(pickle.dumps(data))
    assert all(again.batch[str(d)].dtype == d and again.batch[str(d)].equal(data.batch[str(d)]) for d in dtypes)
    assert len(pickle.dumps(data[:2])) < len(pickle.dumps(data)) / 10
    columns = DataProto(data.batch.apply(lambda t: t[:, ::2]))
    assert pickle.loads(pickle.dumps(columns)).batch["torch.int32"].shape == (2000, 4)


def test_load_refuses_other_pickles(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="holds a dict"):
        DataProto.load_from_disk(tmp_path / "x.pkl")


def test_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    make(2).save_to_disk(tmp_path / "d.pkl")
    with pytest.raises(TypeError):
        DataProto(meta_info={"open": io.TextIOWrapper(io.BytesIO())}).save_to_disk(tmp_path / "d.pkl")
    assert [p.name for p in tmp_path.iterdir()] == ["d.pkl"] and len(DataProto.load_from_disk(tmp_path / "d.pkl")) == 2


def test_print_size_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="verl.protocol"):
        DataProto.from_dict({"x": torch.zeros(2**18)}).print_size("batch")
    assert "batch tensors 1.00 MiB" in caplog.text


# ---- futures and collectives ------------------------------------------------------------------------------------


def test_future_selects_its_part(ray_session: None) -> None:
    import ray

    refs = [ray.put(part) for part in make(4).chunk(2)]
    future = DataProtoFuture.concat(refs)
    assert ids(future.get()) == [0, 1, 2, 3]
    parts = future.chunk(2)
    assert [ids(p.get()) for p in parts] == [[0, 1], [2, 3]]
    assert [ids(p.get()) for p in parts[1].chunk(2)] == [[2], [3]]


def _gather(rank: int, store: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    data = make(5)[[0, 1, 2]] if rank == 0 else make(5)[[3, 4]]
    all_gather_data_proto(data, dist.group.WORLD)
    data.save_to_disk(Path(folder) / f"{rank}.pkl")
    dist.destroy_process_group()


def test_all_gather(tmp_path: Path) -> None:
    # Spawned: a forked process would inherit the process group of tests that ran before.
    mp.start_processes(_gather, (str(tmp_path / "store"), str(tmp_path)), nprocs=2, start_method="spawn")
    for rank in range(2):
        assert ids(DataProto.load_from_disk(tmp_path / f"{rank}.pkl")) == [0, 1, 2, 3, 4]
