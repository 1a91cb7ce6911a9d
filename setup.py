# SPDX-License-Identifier: Apache-2.0
"""Packaging of TrajEvolve."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_requirements(name: str) -> list[str]:
    """Requirement lines of a file, without comments."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def read_version() -> str:
    """`__version__` of the verl package, read as text so that building imports nothing."""
    match = re.search(r'__version__ = "([^"]+)"', (ROOT / "verl" / "__init__.py").read_text(encoding="utf-8"))
    if match is None:
        raise RuntimeError("verl/__init__.py has no __version__ line")
    return match.group(1)


setup(
    name="trajevolve",
    version=read_version(),
    description="Reinforcement learning of language-model agents with hindsight step credit",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(
        include=[f"{top}{rest}" for top in ("verl", "agent_system", "recipe", "examples") for rest in ("", ".*")]
    ),
    package_data={"": ["*.yaml", "*.sh", "*.jinja"]},
    install_requires=read_requirements("requirements.txt"),
    extras_require={
        "vllm": ["vllm>=0.8.5"],
        "gpu": ["flash-attn>=2.7.4", "liger-kernel>=0.5"],
        "trackers": ["wandb>=0.18"],
        "webshop": ["spacy>=3.7"],
        "dev": ["pytest>=8", "hypothesis>=6.100", "ruff>=0.9", "mypy>=1.13"],
    },
)
