# SPDX-License-Identifier: Apache-2.0
"""Generated shops: the same bytes everywhere, the original's schema, what makes them worth playing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.generate import ensure_generated, generate_catalogue
from agent_system.environments.env_package.webshop.generated_products import MadeProduct, make_products
from agent_system.environments.env_package.webshop.goals import GoalSet
from agent_system.environments.env_package.webshop.request import parse_request, tokens
from agent_system.environments.env_package.webshop.shop_tables import CATEGORIES, FILLERS, LINES
from agent_system.environments.generated_folder import write_generated
from verl.utils.errors import UserError

# Of 60 products and 80 goals with seed 7. Changes only together with the generator's version.
_KNOWN = "afdf8f4d2dcf69046e431f66f8c4ecdda9bf3f4bc940ebf54b20a8152477d542"


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def test_same_bytes_everywhere(tmp_path: Path) -> None:
    generate_catalogue(tmp_path / "here", products=60, goals=80, seed=7)
    module = "agent_system.environments.env_package.webshop.generate_catalogue"
    command = [sys.executable, "-m", module, "--products", "60", "--goals", "80", "--seed", "7", "--out"]
    environment = {**os.environ, "PYTHONHASHSEED": "5", "LC_ALL": "C"}
    subprocess.run([*command, str(tmp_path / "there")], env=environment, check=True, capture_output=True)
    assert _digest(tmp_path / "here") == _digest(tmp_path / "there") == _KNOWN
    generate_catalogue(tmp_path / "other", products=60, goals=80, seed=8)
    assert _digest(tmp_path / "other") != _KNOWN


def test_the_same_shop_is_kept_and_anything_else_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = generate_catalogue(tmp_path / "shop", products=12, goals=12)
    before = _digest(out)
    assert generate_catalogue(out, products=12, goals=12) == out and _digest(out) == before
    with pytest.raises(UserError, match="other options"):
        generate_catalogue(out, products=12, goals=13)
    with (out / "items_shuffle.json").open("a", encoding="utf-8") as file:
        file.write(" ")
    with pytest.raises(UserError, match="changed after generation"):
        generate_catalogue(out, products=12, goals=12)
    (out / "generation.json").unlink()
    with pytest.raises(UserError, match="not empty"):
        generate_catalogue(out, products=12, goals=12)
    for bad in ({"products": 0}, {"goals": 0}, {"seed": -1}):
        with pytest.raises(UserError, match=next(iter(bad))):
            generate_catalogue(tmp_path / "bad", **bad)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="the folder you are in"):
        generate_catalogue(".", products=12, goals=12)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = ensure_generated(products=12, goals=12)
    assert ensure_generated(products=12, goals=12) == first != ensure_generated(products=12, goals=12, seed=1)


@pytest.mark.parametrize("empty", [False, True])
def test_generators_of_one_folder_do_not_disturb_each_other(tmp_path: Path, empty: bool) -> None:
    out, others = tmp_path / "out", 0
    if empty:
        out.mkdir()

    def write(folder: Path) -> dict[str, object]:
        nonlocal others
        others += 1
        if others < 3:
            write_generated(out, {"seed": 1}, "things", write, lambda *_: None)
        (folder / "thing").write_text(str(others))
        return {"hashes": {}}

    assert write_generated(out, {"seed": 1}, "things", write, lambda *_: None) == out
    assert others == 3 and list(tmp_path.iterdir()) == [out]
    assert sorted(path.name for path in out.iterdir()) == ["generation.json", "thing"]
    with pytest.raises(UserError, match="other options"):
        write_generated(out, {"seed": 2}, "things", write, lambda *_: None)


def test_numbers_and_families(generated_dir: Path, catalogue: Catalogue, goals: GoalSet) -> None:
    assert (len(catalogue), len(goals)) == (1000, 2000)
    products = [catalogue.product(number) for number in range(1000)]
    assert set(Counter(product.category for product in products)) == {category.name for category in CATEGORIES}
    assert min(Counter(product.category for product in products).values()) > 100
    assert len({product.query for product in products}) == 30
    assert len({name for product in products for name, _ in product.options}) >= 8
    assert 20 < sum(len(product.prices) == 2 for product in products) < 150
    families = json.loads((generated_dir / "generation.json").read_text(encoding="utf-8"))["families"]
    assert set(families) == {"single", "attribute", "option", "price", "crowd"} and min(families.values()) > 5
    assert sum(goals.winnable(index) for index in range(2000)) > 1980


def test_members_of_a_family_differ_in_one_thing() -> None:
    for family in make_products(3000, 1):
        assert len({product.title for product in family}) == 1
        if len(family) < 2:
            continue
        differing = {
            name: len({getattr(product, name) for product in family})
            for name in ("hidden", "options", "price", "fillers")
        }
        assert differing["fillers"] == 1
        kind = family[0].family
        assert (differing["hidden"] > 1) == (kind == "attribute")
        assert (differing["options"] > 1) == (kind == "option")
        assert kind in ("attribute", "price", "crowd") or differing["price"] == 1
        if kind in ("price", "crowd"):
            assert differing["price"] > 1
            assert max(p.price[0] for p in family) - min(p.price[0] for p in family) > 40, "no price limit covers all"
        if kind == "option":
            owners = Counter(value for product in family for _, values in product.options for value in set(values))
            assert all(owners[product.telling] == 1 for product in family)


def _sub_page_texts(product: MadeProduct) -> tuple[str, str]:
    record = product.record(1)
    return str(record["full_description"]).lower(), " ".join(record["small_description"]).lower()  # type: ignore[arg-type]


def test_hidden_attributes_are_on_sub_pages_only() -> None:
    places: Counter[str] = Counter()
    for family in make_products(400, 2):
        for product in family:
            description, features = _sub_page_texts(product)
            assert product.signature in product.title.lower()
            for attribute, in_description in product.hidden:
                assert attribute not in product.title.lower()
                assert attribute in (description if in_description else features)
                assert attribute not in (features if in_description else description)
                places["description" if in_description else "features"] += 1
            if product.family == "attribute":
                first = str(product.record(1)["small_description"][0])  # type: ignore[index]
                assert product.telling not in f"{description} {first.lower()}", "search must not find it"
    assert min(places.values()) > 50


def test_every_attribute_has_a_word_of_its_own() -> None:
    filler = {word for text in (*FILLERS, *LINES) for word in tokens(text)}
    for category in CATEGORIES:
        attributes = (*category.signatures, *category.hidden)
        others = filler | {
            word
            for kind in category.kinds
            for text in (kind.name, *kind.uses, *(v for name, values in kind.options for v in (name, *values)))
            for word in tokens(text)
        }
        for attribute in attributes:
            rest = {word for other in attributes if other != attribute for word in tokens(other)}
            assert set(tokens(attribute)) - rest - others, attribute


def test_requests_have_several_phrasings(goals: GoalSet) -> None:
    starts = Counter(" ".join(goals[index].instruction_text.split()[:2]) for index in range(len(goals)))
    assert len([start for start, count in starts.items() if count > 50]) >= 8
    texts = Counter(goals[index].instruction_text for index in range(len(goals)))
    assert sum(count - 1 for count in texts.values()) < 40
    assert {len(goals[index].goal_options) for index in range(200)} >= {0, 1, 2}
    assert {len(goals[index].attributes) for index in range(200)} >= {1, 2, 3}


def test_some_goals_need_later_pages(catalogue: Catalogue, goals: GoalSet) -> None:
    """No product on the first page wins, and one on a later page does."""
    found = Counter()
    for index in range(0, len(goals), 8):
        goal = goals[index]
        wins = []
        for number in catalogue.search(parse_request(goal.instruction_text).query).tolist():
            names = {value: name for name, values in catalogue.product(number).options for value in values}
            chosen = {names[value]: value for value in goal.goal_options if value in names}
            wins.append(goals.reward(index, number, chosen).score == 1.0)
        found["later" if any(wins) and not any(wins[:10]) else "first" if any(wins) else "none"] += 1
    assert found["later"] >= 4 and found["first"] > 200 and found["none"] <= 5, found
