# SPDX-License-Identifier: Apache-2.0
"""The same two steps with two ranks, on two Ray nodes of one CPU each and on one node.

`python -m tests.verl.trainer.two_nodes GAMES MODEL OUT` writes the runs `OUT/{two,one}` and `OUT/nodes.json`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from tests.verl.trainer.alfworld_run import ACTOR, alfworld_overrides
from verl.trainer.config.schema import load_config
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo import ray_trainer

COMMON = ("algorithm.adv_estimator=grpo", f"{ACTOR}.use_kl_loss=True")


def main(games: Path, model: Path, out: Path) -> None:
    nodes: list[str] = []
    plain_fit = ray_trainer.RayPPOTrainer.fit

    def fit(self: ray_trainer.RayPPOTrainer) -> None:
        """Writes down where the ranks live."""
        tables = ray.util.placement_group_table()
        nodes.extend(node for table in tables.values() for node in table["bundles_to_node_id"].values())
        plain_fit(self)

    ray_trainer.RayPPOTrainer.fit = fit  # type: ignore[method-assign]
    given = [*alfworld_overrides(games, model, out / "two"), *COMMON, "trainer.nnodes=2"]
    # A node with one CPU holds one rank.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    try:
        run_ppo(load_config("ppo_trainer", [*given, f"ray_init.address={cluster.address}"]))
    finally:
        cluster.shutdown()
    (out / "nodes.json").write_text(json.dumps(nodes))
    # The cluster leaves its address behind for later calls of ray.init.
    os.environ.pop("RAY_ADDRESS", None)
    given = [*alfworld_overrides(games, model, out / "one"), *COMMON, "trainer.n_gpus_per_node=2"]
    run_ppo(load_config("ppo_trainer", given))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:4]))
