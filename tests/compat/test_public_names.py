# SPDX-License-Identifier: Apache-2.0
"""Names that outside code imports: each is here, or its import fails with one sentence that says why."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.names import NAMES, PROGRAMS
from verl.utils.absent import ABSENT, absent_name

UNREACHABLE = {
    "verl.workers.rollout.vllm_rollout.vllm_rollout": "the engine is one module, so Python looks for nothing below it",
}
"""Modules whose import fails before our sentence can be given, and why."""


def outcome(module: str, name: str | None) -> str | None:
    """None when `from module import name` works, else the ImportError's text. Other exceptions travel."""
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        return str(error)
    if name is None or name in vars(loaded):
        return None
    try:
        getattr(loaded, name)
    except ImportError as error:
        return str(error)
    except AttributeError:
        return outcome(f"{module}.{name}", None)
    return None


def check(module: str, name: str | None) -> str | None:
    reason = outcome(module, name)
    if reason is not None and module not in UNREACHABLE:
        assert " does not exist: " in reason, f"{module}.{name}: {reason}"
        sentence = reason.partition(" does not exist: ")[2]
        assert sentence.endswith(".") and ". " not in sentence and len(sentence) > 20
    return reason


@pytest.mark.parametrize("module", NAMES)
def test_names_of_the_contract(module: str) -> None:
    for name in NAMES[module].split():
        check(module, name)


def test_most_names_are_there() -> None:
    pairs = [(module, name) for module, names in NAMES.items() for name in names.split()]
    absent = [f"{module}.{name}" for module, name in pairs if outcome(module, name) is not None]
    print(f"{len(pairs)} names, {len(absent)} of them left out with a reason: {', '.join(absent)}")
    assert len(absent) < len(pairs) / 5


def test_everything_that_outside_code_imports(shared_dir: Path) -> None:
    listed = json.loads((shared_dir / "compat" / "public_names.json").read_text())["imported_outside_verl"]
    found = {"here": 0, "absent with a reason": 0}
    for module, names in listed.items():
        for name in names:
            reason = check(module, None if name in ("*", "<module>") else name)
            found["here" if reason is None else "absent with a reason"] += 1
    print(found)
    assert found["here"] > 150


@pytest.mark.parametrize("name", ABSENT)
def test_listed_names_are_absent_and_within_reach(name: str) -> None:
    """A name that appears later must leave the list, and one whose parent is missing would never be asked for."""
    parent, _, last = name.rpartition(".")
    if not parent or parent.startswith("examples."):
        assert check(name, None) is not None
        return
    assert outcome(parent, None) is None, f"{parent} is missing itself"
    assert check(parent, last) is not None


def test_unknown_names_fail_as_usual() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'verl\.nothing'"):
        importlib.import_module("verl.nothing")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        absent_name("verl.utils.torch_functional", "nothing")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from verl.utils.torch_functional import nothing  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize("module", PROGRAMS)
def test_programs_have_help_without_heavy_packages(module: str) -> None:
    code = (
        f"import runpy, sys; sys.argv = ['x', '--help']\n"
        f"try: runpy.run_module({module!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'ray', 'pandas', 'alfworld', 'spacy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower() or "config" in done.stdout.lower()
