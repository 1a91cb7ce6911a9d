# SPDX-License-Identifier: Apache-2.0
"""Goals: one order for all, splits that hold out what they say, the same after travelling to another process."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.goals import GoalSet
from agent_system.environments.env_package.webshop.splits import SplitMode
from verl.utils.errors import UserError


def _names(goals: GoalSet, indices: np.ndarray) -> set[tuple[str, str]]:
    return {(goals[int(i)].asin, goals[int(i)].instruction_text.rpartition(", and price")[0]) for i in indices}


@pytest.mark.parametrize("mode", ["goal", "product"])
def test_splits_are_disjoint_and_complete(goals: GoalSet, mode: SplitMode) -> None:
    split = goals.split(mode)
    together = np.concatenate([split["train"], split["val"]])
    assert sorted(together.tolist()) == list(range(len(goals)))
    assert len(split["val"]) >= 500 and len(split["train"]) > 1000
    shared = goals.overlap(split)
    assert (shared["shared_products"] == 0) == (mode == "product")
    products = {side: {goals.product_of(int(i)) for i in indices} for side, indices in split.items()}
    assert len(products["train"] & products["val"]) == shared["shared_products"]
    assert shared["val_products"] == len(products["val"])
    on_shared = [goals.product_of(int(i)) in products["train"] for i in split["val"]]
    assert shared["val_goals_on_shared_products"] == pytest.approx(np.mean(on_shared))


def test_the_fixed_order_holds_out_the_first_goals(goals: GoalSet) -> None:
    split = goals.split("goal")
    assert split["val"].tolist() == list(range(500)) and split["train"].tolist() == list(range(500, 2000))
    order = list(range(2000))
    random.Random(233).shuffle(order)
    assert goals.file_order.tolist() == order


@pytest.mark.parametrize("mode", ["goal", "product"])
def test_splits_do_not_depend_on_the_order_of_the_set(catalogue: Catalogue, goals: GoalSet, mode: SplitMode) -> None:
    """A goal is held out or not whatever seed the set was shuffled with: what one slot trains on, none validates on."""
    other = GoalSet.load(catalogue, seed=7)
    assert other.file_order.tolist() != goals.file_order.tolist()
    for side in ("train", "val"):
        assert _names(goals, goals.split(mode)[side]) == _names(other, other.split(mode)[side])
    again = goals.split(mode, seed=5)
    assert set(again["val"].tolist()) != set(goals.split(mode)["val"].tolist())


@pytest.mark.parametrize("val_goals", [0, -1, 2000, 1999])
def test_impossible_splits_are_refused(goals: GoalSet, val_goals: int) -> None:
    with pytest.raises(UserError, match="2000"):
        goals.split("product", val_goals=val_goals)
    with pytest.raises(UserError, match="choose goal or product"):
        goals.split("family")  # type: ignore[arg-type]


def test_small_sets_hold_out_a_quarter(generated_dir: Path, shop_cache: Path) -> None:
    few = Catalogue.load(generated_dir, num_products=20, cache_dir=shop_cache)
    goals = GoalSet.load(few)
    assert len(goals.split("goal")["val"]) == len(goals) // 4
    assert 0 < len(goals.split("product")["train"]) < len(goals)


def test_goals_travel(goals: GoalSet, catalogue: Catalogue) -> None:
    packed = pickle.dumps(goals)
    assert len(packed) < 1_000_000
    copy = pickle.loads(packed)
    assert copy.hash == goals.hash and copy.catalogue.hash == catalogue.hash
    assert [copy[i] for i in range(50)] == [goals[i] for i in range(50)]
    assert np.array_equal(copy.prices, goals.prices)
    assert copy.metadata() == goals.metadata()


def test_travelling_to_other_files_is_refused(generated_dir: Path, shop_cache: Path, tmp_path: Path) -> None:
    import shutil

    folder = shutil.copytree(generated_dir, tmp_path / "shop")
    packed = pickle.dumps(Catalogue.load(folder, num_products=25, cache_dir=tmp_path / "cache"))
    shutil.rmtree(tmp_path / "cache")
    assert len(pickle.loads(packed)) == 25, "another machine compiles the files again"
    shutil.rmtree(tmp_path / "cache")
    (folder / "items_ins_v2.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="not those that this run started with"):
        pickle.loads(packed)


def test_the_record_names_what_matters(goals: GoalSet) -> None:
    record = goals.metadata()
    assert record["products"] == 1000 and record["goals"] == 2000 and record["catalogue"] == "generated"
    assert record["nouns"] == "table:title_nouns.json" and record["option_match"] == "upstream"
    assert GoalSet.load(goals.catalogue, option_match="fixed").hash != goals.hash


def test_price_limits_are_above_the_price(goals: GoalSet) -> None:
    for index in range(300):
        goal, price = goals[index], float(goals.prices[goals.product_of(index)])
        assert price < goal.price_upper <= price + 40 or goal.price_upper == 1_000_000
        assert goal.instruction_text.endswith(f", and price lower than {goal.price_upper:.2f} dollars")


def test_synthetic_goals_of_a_generated_shop_are_refused(catalogue: Catalogue) -> None:
    with pytest.raises(UserError, match="no synthetic goal"):
        GoalSet.load(catalogue, human_goals=False)


def test_weights_sum_over_attributes(original: Catalogue) -> None:
    goals = GoalSet.load(original, human_goals=False)
    total = sum(goals[index].weight for index in range(len(goals)))
    # Each attribute gives 1 / (its goals' numbers of attributes) in all, so the sum is below their number.
    assert 0 < total < len({attribute for place in range(415) for attribute in original.instruction(place)[1]})
