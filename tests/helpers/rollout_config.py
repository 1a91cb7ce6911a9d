# SPDX-License-Identifier: Apache-2.0
"""A configuration with just the sections that the agent loop reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def rollout_config(**changes: Any) -> Any:
    """`max_steps, prompt, truncation, seed, val_n, val_sample, local_dir, val_files, mode` by keyword."""
    values = {
        "max_steps": 4,
        "prompt": 256,
        "truncation": "error",
        "seed": 0,
        "val_n": 1,
        "val_sample": False,
        "local_dir": "unused",
        "val_files": None,
        "mode": "sync",
    } | changes
    val_kwargs = SimpleNamespace(do_sample=values["val_sample"], temperature=0.5, top_p=0.9, top_k=7, n=values["val_n"])
    engine = SimpleNamespace(
        mode=values["mode"], do_sample=True, temperature=1.0, top_p=1.0, top_k=-1, val_kwargs=val_kwargs, seed=None
    )
    data = SimpleNamespace(
        max_prompt_length=values["prompt"],
        truncation=values["truncation"],
        apply_chat_template_kwargs={},
        val_files=values["val_files"],
    )
    return SimpleNamespace(
        env=SimpleNamespace(max_steps=values["max_steps"], seed=values["seed"]),
        data=data,
        actor_rollout_ref=SimpleNamespace(model=SimpleNamespace(path="fake"), rollout=engine),
        trainer=SimpleNamespace(default_local_dir=values["local_dir"]),
    )
