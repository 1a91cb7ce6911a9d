# SPDX-License-Identifier: Apache-2.0
"""Which package may import which: training knows no environments, acting knows no trainers, the core no recipe."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def imports(package: str) -> Iterator[tuple[str, str]]:
    """(file relative to the repository, imported module) for every import, also inside functions."""
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((str(path.relative_to(ROOT)), alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                yield str(path.relative_to(ROOT)), node.module


def under(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_verl_knows_no_environment_except_in_its_entry_programs() -> None:
    found = [
        (file, module)
        for file, module in imports("verl")
        if under(module, "agent_system", "recipe", "examples", "tests") and not file.startswith("verl/trainer/main_")
    ]
    assert found == []


def test_agent_system_knows_no_trainer() -> None:
    allowed = ("verl.protocol", "verl.utils", "verl.workers.rollout")
    found = [
        (file, module)
        for file, module in imports("agent_system")
        if under(module, "recipe", "examples", "tests") or (under(module, "verl") and not under(module, *allowed))
    ]
    assert found == []


def test_the_walk_sees_what_is_there() -> None:
    assert ("verl/trainer/main_ppo.py", "agent_system.environments") in set(imports("verl"))
    assert any(module == "verl.utils.errors" for _, module in imports("agent_system"))
