# SPDX-License-Identifier: Apache-2.0
"""Statistics of several answers to a prompt, by hand and against exact expectations."""

from __future__ import annotations

import numpy as np
import pytest

from verl.trainer.ppo.metric_utils import bootstrap_metric, calc_maj_val, process_validation_metrics


def test_bootstrap_approaches_the_exact_expectation() -> None:
    data = [0.0, 0.0, 0.0, 1.0]
    best, mean = bootstrap_metric(data, 2, [max, np.mean], n_bootstrap=20000)
    assert best[0] == pytest.approx(1 - 0.75**2, abs=0.02) and mean[0] == pytest.approx(0.25, abs=0.02)
    assert mean[1] == pytest.approx(np.std(data) / np.sqrt(2), abs=0.02)
    assert bootstrap_metric(data, 2, [max]) == bootstrap_metric(data, 2, [max])
    assert bootstrap_metric(data, 2, [max]) != bootstrap_metric(data, 2, [max], seed=7)


def test_majority_takes_the_first_of_equal_counts() -> None:
    votes = [{"pred": "b", "val": 0.0}, {"pred": "a", "val": 1.0}, {"pred": "a", "val": 0.5}, {"pred": "b", "val": 2.0}]
    assert calc_maj_val(votes, "pred", "val") == 0.0
    assert calc_maj_val(votes[:3], "pred", "val") == 1.0


def test_grouping_by_source_and_prompt() -> None:
    sources = ["x", "x", "x", "x", "y"]
    prompts = ["p", "q", "p", "q", "p"]
    infos = {"score": [1.0, 0.0, 3.0, 4.0, 5.0], "pred": ["a", "b", "a", "c", "d"]}
    found = process_validation_metrics(sources, prompts, infos)
    assert set(found) == {"x", "y"} and set(found["x"]) == {"score"}
    x = found["x"]["score"]
    assert x["mean@2"] == 2.0 and x["std@2"] == 1.5
    assert x["worst@2/mean"] < x["mean@2"] < x["best@2/mean"]
    assert found["y"]["score"] == {"mean@1": 5.0}
    assert {"maj@2/mean", "maj@2/std", "best@2/std"} <= set(x)
    many = process_validation_metrics(["x"] * 6, ["p"] * 6, {"acc": [0, 1, 1, 0, 1, 1]})["x"]["acc"]
    assert {name.split("/")[0] for name in many} == {
        "mean@6", "std@6", "best@2", "best@4", "best@6", "worst@2", "worst@4", "worst@6",
    }  # fmt: skip
