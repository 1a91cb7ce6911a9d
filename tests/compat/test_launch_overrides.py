# SPDX-License-Identifier: Apache-2.0
"""Every launch script of verl-agent against our config; the table is printed by `python -m tests.compat.report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compat.launches import (
    NO_CONFIG,
    OUT_OF_SCOPE,
    Verdict,
    build,
    compose,
    config_of,
    counts,
    in_scope,
    judge,
    meaning,
)


@pytest.fixture(scope="module")
def launches(shared_dir: Path) -> dict[str, list[str]]:
    loaded: dict[str, list[str]] = json.loads((shared_dir / "compat" / "launch_overrides.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def verdicts(launches: dict[str, list[str]]) -> list[Verdict]:
    return [judge(script, overrides) for script, overrides in in_scope(launches).items()]


def _value(built: Any, key: str) -> Any:
    for part in key.split("."):
        built = built[part] if isinstance(built, dict) else getattr(built, part)
    return built


def test_every_entry_is_in_scope_or_left_out_for_a_reason(launches: dict[str, list[str]]) -> None:
    assert set(OUT_OF_SCOPE) <= set(launches)
    assert all(OUT_OF_SCOPE.values())
    parts = {script.rpartition("/")[0] for script in in_scope(launches)}
    for kind in ("grpo", "gigpo", "gigpo_dynamic", "gspo", "dapo", "rloo", "ppo"):
        assert f"examples/{kind}_trainer" in parts
    assert {
        "examples/sft/gsm8k",
        "examples/sft/multiturn",
        "examples/generation",
        "recipe/hgpo",
        "recipe/dapo",
    } <= parts


def test_every_key_reaches_the_typed_config(verdicts: list[Verdict], launches: dict[str, list[str]]) -> None:
    """Also of the scripts of other environments, which forks bring along."""
    configs = {verdict.script: verdict.config for verdict in verdicts}
    for script, overrides in launches.items():
        if script.startswith(NO_CONFIG) or "megatron" in script:
            continue
        built = configs[script] if script in configs else build(script, compose(script, overrides))
        for override in overrides:
            key, _, text = override.lstrip("+").partition("=")
            assert _value(built, key) is not None or text == "null", (script, key)


def test_refusals_are_one_sentence_that_we_mean(verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        for refusal in (verdict.refusal, verdict.with_hf):
            if refusal is not None:
                assert "\n" not in refusal
                assert meaning(refusal) is not None, (verdict.script, refusal)


def test_agent_training_runs_with_the_engine_that_runs_anywhere(verdicts: list[Verdict]) -> None:
    """Every script that trains or evaluates an agent is accepted as it is or with rollout.name=hf."""
    agents = [v for v in verdicts if "_trainer/" in v.script or v.script.startswith("recipe/hgpo")]
    assert len(agents) == 24
    for verdict in agents:
        assert verdict.with_hf is None, (verdict.script, verdict.with_hf)


def test_counts_add_up(verdicts: list[Verdict], launches: dict[str, list[str]]) -> None:
    found = counts(verdicts, len(launches))
    print(found)
    assert found["scripts"] == 55 and found["in scope"] == 39
    assert sum(found[name] for name in ("accepted as they are", "accepted with rollout.name=hf", "refused")) == 39
    assert found["refused"] <= 9
    assert {config_of(v.script)[1] for v in verdicts if v.refusal is None} >= {"sft_trainer"}
