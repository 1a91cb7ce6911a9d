# SPDX-License-Identifier: Apache-2.0
"""Small helpers that outside code imports by name."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from verl.utils import fs, hdfs_io
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.debug import GPUMemoryLogger, log_gpu_memory_usage
from verl.utils.distributed import initialize_process_group, own_process_group
from verl.utils.errors import UserError
from verl.utils.import_utils import deprecated, load_extern_type
from verl.utils.metric import reduce_metrics
from verl.utils.model import create_random_mask
from verl.utils.py_functional import append_to_dict, convert_to_regular_types, timeout_limit, union_two_dict
from verl.utils.reward_score import default_compute_score, gsm8k
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.torch_functional import distributed_masked_mean, distributed_mean_max_min_std


def test_dictionaries() -> None:
    data: dict[str, list[int]] = {"a": [1]}
    append_to_dict(data, {"a": 2, "b": 3})
    assert data == {"a": [1, 2], "b": [3]}
    assert reduce_metrics({"a": [1.0, 3.0]}) == {"a": 2.0}
    assert union_two_dict({"a": 1}, {"a": 1, "b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(AssertionError, match="'a' is in both"):
        union_two_dict({"a": 1}, {"a": 2})
    tree = OmegaConf.create({"a": [1, {"b": 2}]})
    plain = convert_to_regular_types({"x": [tree, (tree.a,)]})
    assert plain == {"x": [{"a": [1, {"b": 2}]}, ([1, {"b": 2}],)]}
    assert type(plain["x"][0]) is dict and type(plain["x"][1][0]) is list


def test_a_call_over_its_time_limit_is_stopped() -> None:
    @timeout_limit(0.1)
    def wait(seconds: float) -> str:
        time.sleep(seconds)
        return "done"

    assert wait(0.0) == "done"
    with pytest.raises(TimeoutError, match=r"wait took longer than 0\.1 s"):
        wait(5.0)
    with pytest.raises(ValueError, match="must be positive"):
        timeout_limit(0)


def test_files_are_local(tmp_path: Path) -> None:
    hdfs_io.makedirs(tmp_path / "a" / "b", exist_ok=True)
    (tmp_path / "a" / "b" / "x").write_text("1")
    hdfs_io.copy(tmp_path / "a", tmp_path / "c")
    assert hdfs_io.exists(tmp_path / "c" / "b" / "x")
    hdfs_io.copy(tmp_path / "a" / "b" / "x", tmp_path / "y")
    assert fs.copy_local_path_from_hdfs(str(tmp_path / "y")) == str(tmp_path / "y")
    for call in (hdfs_io.exists, hdfs_io.makedirs, lambda path: hdfs_io.copy(tmp_path, path)):
        with pytest.raises(UserError, match="remote folders are not supported"):
            call("hdfs://a/b")


def test_classes_from_files_and_warnings(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text("class Mine:\n    value = 3\n")
    assert load_extern_type(code, "Mine").value == 3
    with pytest.raises(UserError, match=r"data\.custom_cls\.name=Yours: .*defines no such name"):
        load_extern_type(code, "Yours", "data.custom_cls")
    with pytest.raises(UserError, match="does not exist"):
        load_extern_type(tmp_path / "no.py", "Mine")

    @deprecated("new_name")
    def old_name() -> int:
        return 1

    with pytest.warns(FutureWarning, match="use new_name instead"):
        assert old_name() == 1


def test_spellings_of_dtypes() -> None:
    assert PrecisionType.to_dtype("bf16") == PrecisionType.to_dtype(torch.bfloat16) == torch.bfloat16
    assert [PrecisionType.to_str(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)] == [
        "fp32", "fp16", "bf16",
    ]  # fmt: skip
    assert PrecisionType.is_fp16(16) and PrecisionType.is_fp32("float") and not PrecisionType.is_bf16("int8")
    with pytest.raises(UserError, match="dtype=int8: unknown dtype"):
        PrecisionType.to_dtype("int8")


def test_gsm8k_scores() -> None:
    assert gsm8k.extract_solution("1 + 1 = 2 #### 1,234.") == "1234"
    assert gsm8k.extract_solution("so 7, then -3.5") is None
    assert gsm8k.extract_solution("so 7, then -3.5", "flexible") == "-3.5"
    assert default_compute_score("openai/gsm8k", "#### 4", "4") == 1.0
    assert gsm8k.compute_score("#### 5", "4", format_score=0.1) == 0.1
    assert gsm8k.compute_score("four", "4") == 0.0
    with pytest.raises(NotImplementedError, match="no scorer for data_source='math'"):
        default_compute_score("math", "", "")


def test_statistics_over_ranks() -> None:
    in_group_before = dist.is_initialized()
    with own_process_group():
        initialize_process_group(torch.device("cpu"))
        values = torch.tensor([1.0, 2.0, 6.0])
        mean, largest, smallest, deviation = distributed_mean_max_min_std(values)
        assert (float(mean), float(largest or 0), float(smallest or 0)) == (3.0, 6.0, 1.0)
        assert deviation is not None and float(deviation) == pytest.approx(float(values.std()))
        assert distributed_mean_max_min_std(values, False, False, False)[1:] == (None, None, None)
        assert float(distributed_masked_mean(values, torch.tensor([1, 0, 1]))) == 3.5
    assert dist.is_initialized() == in_group_before


def test_random_masks_are_runs_of_ones() -> None:
    mask = create_random_mask(torch.zeros(50, 20, dtype=torch.int64), 0.6, 0.3, 0.1)
    sums = mask.sum(dim=1)
    assert int(sums.min()) >= 2 and int(sums.max()) <= 12 and len(set(sums.tolist())) > 3
    assert ((mask[:, 1:] - mask[:, :-1]).abs().sum(dim=1) <= 2).all()
    assert int(mask.argmax(dim=1).max()) <= 6


def test_memory_logging_without_a_device_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    @GPUMemoryLogger("actor", level=logging.WARNING)
    def work() -> int:
        return 3

    assert work() == 3
    if not torch.cuda.is_available():
        log_gpu_memory_usage("here", level=logging.WARNING)
        assert caplog.records == []


def test_prompt_files(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    chats = [[{"role": "user", "content": text}] for text in ("look", "go to cabinet 1, then look " * 4)]
    extra = [{"index": 7, "split": "train"}, {"index": 8, "split": "train"}]
    pd.DataFrame({"prompt": chats, "data_source": ["text", "text"], "extra_info": extra}).to_parquet(path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    config = {"max_prompt_length": 24, "return_raw_chat": True, "filter_overlong_prompts": True}
    data = RLHFDataset(str(path), tokenizer, OmegaConf.create(config))
    assert len(data) == 1
    row = data[0]
    assert row["input_ids"].shape == row["attention_mask"].shape == row["position_ids"].shape == (24,)
    assert row["input_ids"][row["attention_mask"].bool()].tolist() == row["raw_prompt_ids"]
    assert row["attention_mask"][0] == 0 and int(row["position_ids"][-1]) == len(row["raw_prompt_ids"]) - 1
    assert row["raw_prompt"] == [{"role": "user", "content": "look"}] and row["index"] == 7
    assert row["data_source"] == "text"
    both = RLHFDataset(str(path), tokenizer, {"max_prompt_length": 24, "truncation": "left"})
    batch = collate_fn([both[0], both[1]])
    assert batch["input_ids"].shape == (2, 24) and bool(batch["attention_mask"][1].all())
    assert batch["index"].dtype == object and batch["index"].tolist() == [7, 8]
    assert isinstance(batch["raw_prompt_ids"], np.ndarray)
    with pytest.raises(UserError, match=r"prompt 1 has .* more than data.max_prompt_length=24"):
        RLHFDataset(str(path), tokenizer, {"max_prompt_length": 24})[1]
    with pytest.raises(UserError, match="images"):
        RLHFDataset(str(path), tokenizer, {}, processor=object())
