# SPDX-License-Identifier: Apache-2.0
"""Placeholder rows for scripts that name prompt files: `python -m examples.data_preprocess.prepare [flags]`.

No training run needs them: without `data.train_files` the environment defines the tasks. Rows carry no task either;
only their number counts (with as many training rows as `data.train_batch_size`, an epoch is one step). They are made
here, nothing is downloaded.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from verl.utils.errors import UserError

__all__ = ["main", "placeholder_rows", "write_placeholders"]

_IMAGE_SIDE = 32


def placeholder_rows(mode: str, split: str, count: int) -> list[dict[str, Any]]:
    """`count` rows with `data_source, prompt, ability, extra_info`, and a blank image in the mode `visual`."""
    content, images = ("<image>", {"images": [_blank_image()]}) if mode == "visual" else ("", {})
    return [
        {
            "data_source": mode,
            "prompt": [{"role": "user", "content": content}],
            "ability": "agent",
            "extra_info": {"split": split, "index": index},
            **images,
        }
        for index in range(count)
    ]


def _blank_image() -> dict[str, Any]:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (_IMAGE_SIDE, _IMAGE_SIDE)).save(buffer, format="PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def write_placeholders(mode: str, local_dir: str | Path, sizes: dict[str, int]) -> dict[str, Path]:
    """Write `{local_dir}/{mode}/{split}.parquet` for every split of `sizes`; the paths by split."""
    import pandas as pd

    from verl.utils.fs import atomic_write

    folder = Path(local_dir).expanduser() / mode
    paths = {split: folder / f"{split}.parquet" for split in sizes}
    for split, path in paths.items():
        buffer = io.BytesIO()
        pd.DataFrame(placeholder_rows(mode, split, sizes[split])).to_parquet(buffer)
        atomic_write(path, buffer.getvalue())
    return paths


def _size(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} rows; at least 1 is needed")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.data_preprocess.prepare", description="Placeholder rows; only their number counts."
    )
    parser.add_argument("--mode", choices=["visual", "text"], default="visual", help="visual rows hold a blank image")
    parser.add_argument("--local_dir", default="~/data/verl-agent/", help="files go to {local_dir}/{mode}/")
    parser.add_argument("--train_data_size", type=_size, default=256, help="training rows")
    parser.add_argument("--val_data_size", type=_size, default=256, help="validation rows")
    parser.add_argument("--hdfs_dir", default=None, help="not supported: copy the files yourself")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files; 0, or 2 after one line on stderr."""
    from verl.utils.programs import run_program

    return run_program(partial(_run, _parser().parse_args(arguments)))


def _run(args: argparse.Namespace) -> int:
    if args.hdfs_dir is not None:
        raise UserError(f"--hdfs_dir={args.hdfs_dir}: remote folders are not supported; copy --local_dir yourself")
    sizes = {"train": args.train_data_size, "test": args.val_data_size}
    for split, path in write_placeholders(args.mode, args.local_dir, sizes).items():
        print(f"{split}: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
