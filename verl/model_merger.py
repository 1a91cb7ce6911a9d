# SPDX-License-Identifier: Apache-2.0
"""From the per-rank files of an FSDP checkpoint to a Hugging Face folder.

    python -m verl.model_merger merge --local_dir RUN/global_step_N/actor --target_dir DIR
    python -m verl.model_merger test  --local_dir RUN/global_step_N/actor --test_hf_dir DIR

Works on the files alone: no processes, no GPUs, any number of ranks, FSDP1 and FSDP2, sharded in one group or in
several. A checkpoint of adapters (LoRA) becomes the merged model, with the adapters alone in `lora_adapter/`.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["compare_weights", "main", "merge_checkpoint", "merged_weights", "read_shards"]

_SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_VALUE_HEADS = ("score.", "classifier.")
_DTYPES = ("stored", "fp32", "bf16", "fp16")
_TOLERANCE = 1e-6
_SHOWN = 5


def find_shards(folder: str | Path) -> list[Path]:
    """The model files of all ranks, in rank order.

    Raises:
        UserError: there are none, some are missing, or they are of runs with different numbers of ranks.
    """
    root = Path(folder).expanduser()
    found: dict[int, dict[int, Path]] = {}
    for path in root.glob("model_world_size_*_rank_*.pt"):
        match = _SHARD.fullmatch(path.name)
        if match:
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    if not found:
        raise UserError(f"--local_dir {folder}: {_without_shards(root)}")
    if len(found) > 1:
        sizes = ", ".join(map(str, sorted(found)))
        raise UserError(
            f"--local_dir {folder} holds files of runs with {sizes} ranks; leave only those of one run in the folder"
        )
    (size, ranks), *_ = found.items()
    missing = [rank for rank in range(size) if rank not in ranks]
    if missing:
        names = ", ".join(f"model_world_size_{size}_rank_{rank}.pt" for rank in missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise UserError(
            f"--local_dir {folder}: {names}{more} missing of {size} files; copy the files of every node into one folder"
        )
    return [ranks[rank] for rank in range(size)]


def _without_shards(root: Path) -> str:
    if not root.is_dir():
        return "no such folder; give the folder of one role, such as global_step_N/actor"
    roles = sorted(path.parent.name for path in root.glob("*/model_world_size_*_rank_0.pt"))
    if roles:
        return f"the files are one folder deeper; give {root / roles[0]}"
    if list(root.glob("*.safetensors")):
        return "it holds a whole Hugging Face model already, there is nothing to merge"
    return "no model_world_size_W_rank_r.pt in it; give the folder of one role, such as global_step_N/actor"


def read_shards(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Whole weights by name from the files of all ranks.

    Raises:
        UserError: a file is damaged, or the files do not fit together.
    """
    from verl.utils.checkpoint.checkpoint_manager import read_tensors

    with _quiet_meshes():
        states = [read_tensors(path, mmap=True) for path in paths]
    names = list(states[0])
    for path, state in zip(paths, states):
        if state.keys() != states[0].keys():
            raise UserError(f"{path} and {paths[0]} hold weights of different models; take the files of one run")
    return {name: _join(name, [state[name] for state in states], paths[0]) for name in names}


@contextmanager
def _quiet_meshes() -> Iterator[None]:
    """Hides a notice per tensor that the processes of the run are not there."""
    mesh_logger = logging.getLogger("torch.distributed.device_mesh")
    level = mesh_logger.level
    mesh_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        mesh_logger.setLevel(level)


def _join(name: str, parts: Sequence[Any], path: Path) -> Tensor:
    """The whole of a tensor whose `parts[r]` is what rank r holds."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    first = parts[0]
    if not isinstance(first, DTensor):
        return first
    mesh = first.device_mesh.mesh
    sharded = {axis: placement.dim for axis, placement in enumerate(first.placements) if isinstance(placement, Shard)}
    if len(sharded) > 1:
        raise UserError(f"{path}: {name} is cut along several axes, which this program does not join")
    # Ranks along the other axes of the mesh hold copies.
    ranks = mesh[tuple(slice(None) if axis in sharded else 0 for axis in range(mesh.ndim))].reshape(-1).tolist()
    if not sharded:
        return first.to_local()
    (dim,) = sharded.values()
    whole = torch.cat([parts[rank].to_local() for rank in ranks], dim=dim)
    if whole.shape != first.shape:
        raise UserError(
            f"{path}: the parts of {name} join to {tuple(whole.shape)}, not to {tuple(first.shape)}; take the files of "
            "one run"
        )
    return whole


def merged_weights(folder: str | Path, base_model: str | None = None) -> dict[str, Tensor]:
    """The plain model's weights of a checkpoint; adapters are merged into those of their base model.

    Args:
        folder: a role's folder of a checkpoint.
        base_model: base of the adapters, when it is no longer where the checkpoint says.

    Raises:
        UserError: see `find_shards` and `read_shards`; or the base model cannot be loaded.
    """
    from verl.utils.lora import merge_adapters

    root = Path(folder).expanduser()
    weights = read_shards(find_shards(root))
    adapted = {name.partition(".lora_")[0] for name in weights if ".lora_A." in name}
    if not adapted:
        return weights
    settings, named_base = _adapter_settings(root)
    base = _base_weights(base_model or named_base, weights)
    whole = {
        (f"{layer}.base_layer.weight" if (layer := name.removesuffix(".weight")) in adapted else name): weight
        for name, weight in base.items()
    }
    return dict(merge_adapters({**whole, **weights}.items(), settings))


def _adapter_settings(root: Path) -> tuple[Any, str]:
    from verl.utils.lora import ADAPTER_FOLDER, LoRASettings

    path = root / ADAPTER_FOLDER / "adapter_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return LoRASettings(int(config["r"]), int(config["lora_alpha"])), str(config["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); it says how the adapters of this checkpoint are scaled"
        ) from error


def _base_weights(base_model: str, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    from verl.workers.model_builder import load_plain_model

    dtype = next(weight.dtype for name, weight in trained.items() if ".lora_A." in name)
    model = load_plain_model(base_model, dtype=dtype, value_head=_is_value_model(trained), config_key="--hf_model_path")
    return dict(model.state_dict())


def _is_value_model(weights: dict[str, Tensor]) -> bool:
    return any(name.startswith(_VALUE_HEADS) for name in weights)


def merge_checkpoint(
    local_dir: str | Path,
    target_dir: str | Path,
    *,
    hf_model_path: str | None = None,
    dtype: str = "stored",
    trust_remote_code: bool = False,
) -> Path:
    """Write the model of a checkpoint as a Hugging Face folder with its tokenizer; whole or absent.

    Args:
        local_dir: a role's folder of a checkpoint, such as `global_step_N/actor`.
        target_dir: absent or empty.
        hf_model_path: folder or id that stands in for the checkpoint's own configuration and tokenizer, and for the
            base model of adapters.
        dtype: of the written weights: `stored`, `fp32`, `bf16` or `fp16`.

    Raises:
        UserError: the checkpoint is not whole, the target is not empty, or a model cannot be loaded.
    """
    from verl.utils.checkpoint.fsdp_checkpoint_manager import write_hf_folder
    from verl.utils.lora import ADAPTER_FOLDER
    from verl.utils.model import get_generation_config
    from verl.utils.programs import check_output
    from verl.utils.tokenizer import hf_tokenizer
    from verl.utils.torch_dtypes import PrecisionType
    from verl.workers.model_builder import load_config

    target = check_output(target_dir, "--target_dir", folder=True)
    if target.exists() and any(target.iterdir()):
        raise UserError(f"--target_dir {target_dir} is not empty; give a folder that does not exist yet")
    root = Path(local_dir).expanduser()
    weights = merged_weights(root, hf_model_path)
    if dtype != "stored":
        wanted = PrecisionType.to_dtype(dtype, "--dtype")
        weights = {name: weight.to(wanted) for name, weight in weights.items()}
    source = hf_model_path or str(root)
    write_hf_folder(
        target,
        weights,
        load_config(source, trust_remote_code=trust_remote_code, config_key="--hf_model_path"),
        tokenizer=hf_tokenizer(source, config_key="--hf_model_path", trust_remote_code=trust_remote_code),
        generation_config=get_generation_config(source, trust_remote_code),
        trust_remote_code=trust_remote_code,
        value_head=_is_value_model(weights),
    )
    if (root / ADAPTER_FOLDER).is_dir():
        shutil.copytree(root / ADAPTER_FOLDER, target / ADAPTER_FOLDER)
    return target


def compare_weights(
    local_dir: str | Path, hf_dir: str | Path, *, hf_model_path: str | None = None, trust_remote_code: bool = False
) -> int:
    """Number of weights of a checkpoint that equal those of a Hugging Face folder, which is all of them.

    Values may differ by 1e-6, or by what the folder's dtype rounds away.

    Raises:
        UserError: a weight is missing on one side, or differs; names the first few.
    """
    from verl.workers.model_builder import load_plain_model

    ours = merged_weights(local_dir, hf_model_path)
    model = load_plain_model(
        str(hf_dir),
        dtype="auto",
        value_head=_is_value_model(ours),
        trust_remote_code=trust_remote_code,
        config_key="--test_hf_dir",
    )
    theirs = dict(model.state_dict())
    again = _tied_names(model)
    lone = sorted((set(ours) - again) ^ (set(theirs) - again))
    problems = [f"{name} is in only one of the two" for name in lone]
    for name in sorted(set(ours) & set(theirs)):
        left, right = ours[name], theirs[name]
        if left.shape != right.shape:
            problems.append(f"{name} is {tuple(left.shape)} here and {tuple(right.shape)} there")
            continue
        distance = float((left.to(right.dtype).double() - right.double()).abs().max())
        if distance > _TOLERANCE:
            problems.append(f"{name} differs by {distance:.3g}")
    if problems:
        shown = "; ".join(problems[:_SHOWN])
        raise UserError(f"{local_dir} and {hf_dir} differ in {len(problems)} of {len(ours)} weights: {shown}")
    return len(ours)


def _tied_names(model: Any) -> set[str]:
    """Names under which a weight occurs a second time; files may leave them out."""
    seen: dict[int, str] = {}
    again = set()
    for name, weight in model.named_parameters(remove_duplicate=False):
        if id(weight) in seen:
            again.add(name)
        seen[id(weight)] = name
    return again


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--backend", choices=["fsdp"], default="fsdp", help="kind of checkpoint; only fsdp is known")
    common.add_argument("--local_dir", required=True, help="a role's folder of a checkpoint: global_step_N/actor")
    common.add_argument(
        "--hf_model_path", default=None, help="instead of the checkpoint's configuration, and the base of adapters"
    )
    common.add_argument("--trust_remote_code", action="store_true", help="allow a model's own code")
    parser = argparse.ArgumentParser(
        prog="python -m verl.model_merger", description="FSDP checkpoint files -> Hugging Face folder."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    merge = commands.add_parser("merge", parents=[common], help="write the model as a Hugging Face folder")
    merge.add_argument("--target_dir", required=True, help="absent or empty")
    merge.add_argument("--dtype", choices=_DTYPES, default="stored", help="of the written weights")
    test = commands.add_parser("test", parents=[common], help="compare the model with a Hugging Face folder")
    test.add_argument("--test_hf_dir", required=True, help="folder to compare with")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `merge` or `test`; the exit status, 2 after one line on stderr."""
    from verl.utils.programs import run_program

    return run_program(partial(_run, _parser().parse_args(arguments)))


def _run(args: argparse.Namespace) -> int:
    options = {"hf_model_path": args.hf_model_path, "trust_remote_code": args.trust_remote_code}
    if args.command == "merge":
        target = merge_checkpoint(args.local_dir, args.target_dir, dtype=args.dtype, **options)
        sys.stdout.write(f"wrote {target}\n")
    else:
        count = compare_weights(args.local_dir, args.test_hf_dir, **options)
        sys.stdout.write(f"all {count} weights are equal\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
