# SPDX-License-Identifier: Apache-2.0
"""Table of verl-agent's launch scripts against our config: `python -m tests.compat.report [launch_overrides.json]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.compat.launches import ENGINE_KEYS, OUT_OF_SCOPE, config_of, counts, in_scope, judge, meaning

DEFAULT = Path(__file__).resolve().parents[3] / "shared" / "compat" / "launch_overrides.json"


def main() -> int:
    """Print a Markdown table of all scripts and the counts; 0, or 2 without the file."""
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    if not source.is_file():
        sys.stderr.write(f"error: {source} is not a file; name the launch_overrides.json to read\n")
        return 2
    launches = json.loads(source.read_text(encoding="utf-8"))
    verdicts = [judge(script, overrides) for script, overrides in in_scope(launches).items()]
    print("| script | as it is | with rollout.name=hf |\n|---|---|---|")
    for verdict in verdicts:
        first = "accepted" if verdict.refusal is None else f"refused: {meaning(verdict.refusal) or verdict.refusal}"
        second = "accepted" if verdict.with_hf is None else f"refused: {meaning(verdict.with_hf) or verdict.with_hf}"
        if verdict.refusal is None or config_of(verdict.script)[1] not in ENGINE_KEYS:
            second = ""
        print(f"| `{verdict.script}` | {first} | {second} |")
    for script, reason in OUT_OF_SCOPE.items():
        print(f"| `{script}` | out of scope: {reason} | |")
    print()
    for name, number in counts(verdicts, len(launches)).items():
        print(f"{name}: {number}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
