# SPDX-License-Identifier: Apache-2.0
"""Files that are missing, cut short or of another form stop at the start, with file, product and field named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_system.environments.env_package.webshop import generate_catalogue, setup_data
from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.goals import GoalSet
from agent_system.environments.env_package.webshop.json_stream import iter_list, iter_object
from agent_system.environments.env_package.webshop.nouns import NounTable
from verl.utils.errors import UserError

PRODUCT: dict[str, Any] = {
    "asin": "B000000001",
    "name": "Oak Lamp",
    "full_description": "",
    "small_description": ["warm"],
    "pricing": "$1,234.50$2,000.00",
    "product_category": "Home \u203a Lamps",
    "category": "garden",
    "query": " Table Lamps ",
    "customization_options": {"Color": [{"value": " Red/Blue "}], "fit": None},
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a small-set folder; keyword arguments change or (by ...) drop fields of its one product."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)

    def make(attributes: Any = None, human: Any = None, products: Any = None, **fields: Any) -> Path:
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        record = {key: value for key, value in {**PRODUCT, **fields}.items() if value is not ...}
        (folder / "items_shuffle_1000.json").write_text(json.dumps(products or [record]), encoding="utf-8")
        entry = {
            "B000000001": {"attributes": ["solid wood"], "instruction": "Find me", "instruction_attributes": ["x"]}
        }
        (folder / "items_ins_v2_1000.json").write_text(json.dumps(attributes or entry), encoding="utf-8")
        if human is not None:
            (folder / "items_human_ins.json").write_text(json.dumps(human), encoding="utf-8")
        return folder

    return make


def _load(folder: Path) -> Catalogue:
    return Catalogue.load(folder, nouns=NounTable({}))


def test_fields_are_read_as_the_original_does(write: Callable[..., Path]) -> None:
    catalogue = _load(write())
    product = catalogue.product(0)
    assert product.options == (("color", ("red | blue",)),)
    assert product.prices == (1234.5, 2000.0) and product.price_tag == "$1234.5 to $2000.0"
    assert (product.query, product.attributes) == ("table lamps", ("solid wood",))
    assert GoalSet.load(catalogue)[0].instruction_text == "Find me with color: red | blue"
    plain = _load(
        write(
            pricing=None, small_description="one text", customization_options="", attributes={"X": {"attributes": []}}
        )
    )
    product = plain.product(0)
    assert (product.price_tag, product.bullets, product.attributes) == ("$100.0", ("one text",), ("DUMMY_ATTR",))


def test_products_without_a_usable_asin_are_left_out(write: Callable[..., Path]) -> None:
    asins = ["nan", "B0000000011", "B000000001", "B000000002", "B000000001"]
    products = [{**PRODUCT, "asin": asin, "name": f"lamp {place}"} for place, asin in enumerate(asins)]
    catalogue = _load(write(products=products))
    assert [catalogue.product(n).title for n in range(len(catalogue))] == ["lamp 2", "lamp 3"]
    assert catalogue.number_of("B000000002") == 1 and catalogue.number_of("B9") is None


@pytest.mark.parametrize(
    ("changes", "place", "field"),
    [
        ({"asin": ...}, "product 0", "asin"),
        ({"asin": 5}, "product 0", "asin"),
        ({"asin": "b0 x"}, "product 0", "asin"),
        ({"name": None}, "product 0 (B000000001)", "name"),
        ({"full_description": 3}, "product 0 (B000000001)", "full_description"),
        ({"small_description": ["a", 1]}, "product 0 (B000000001)", "small_description"),
        ({"pricing": "free"}, "product 0 (B000000001)", "pricing"),
        ({"pricing": "$1.2.3"}, "product 0 (B000000001)", "pricing"),
        ({"pricing": 12.5}, "product 0 (B000000001)", "pricing"),
        ({"query": ...}, "product 0 (B000000001)", "query"),
        ({"category": []}, "product 0 (B000000001)", "category"),
        ({"product_category": None}, "product 0 (B000000001)", "product_category"),
        ({"customization_options": ["x"]}, "product 0 (B000000001)", "customization_options"),
        ({"customization_options": {"size": "x"}}, "product 0 (B000000001)", "customization_options.size"),
        ({"customization_options": {"size": [{"val": 1}]}}, "product 0 (B000000001)", "customization_options.size"),
        ({"products": ["x"]}, "product 0", "(product)"),
    ],
)
def test_wrong_products(write: Callable[..., Path], changes: dict[str, Any], place: str, field: str) -> None:
    with pytest.raises(UserError) as error:
        _load(write(**changes))
    assert str(error.value).startswith(f"items_shuffle_1000.json: {place}") and f"`{field}" in str(error.value)


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ([], "(entry)"),
        ({}, "attributes"),
        ({"attributes": "x"}, "attributes"),
        ({"attributes": [], "instruction": 1}, "instruction"),
        ({"attributes": [], "instruction": "x"}, "instruction_attributes"),
    ],
)
def test_wrong_attributes(write: Callable[..., Path], entry: Any, field: str) -> None:
    with pytest.raises(UserError) as error:
        _load(write(attributes={"B000000001": entry}))
    assert str(error.value).startswith("items_ins_v2_1000.json: B000000001") and f"`{field}`" in str(error.value)


@pytest.mark.parametrize(
    ("human", "words"),
    [
        ({"B000000001": "x"}, "expected a list"),
        ({"B000000001": ["x"]}, "expected an object"),
        ({"B000000001": [{"instruction_attributes": []}]}, "`instruction`"),
        ({"B000000001": [{"instruction": "x", "instruction_attributes": "y"}]}, "`instruction_attributes`"),
        ({"B000000001": [{"instruction": "x", "instruction_attributes": ["y"]}]}, "`instruction_options`"),
        ({"B000000009": []}, "holds no goal"),
    ],
)
def test_wrong_human_goals(write: Callable[..., Path], human: Any, words: str) -> None:
    catalogue = _load(write(human=human))
    with pytest.raises(UserError, match=r"items_human_ins\.json") as error:
        GoalSet.load(catalogue, human_goals=True)
    assert words in str(error.value)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_truncated_files(write: Callable[..., Path], share: float) -> None:
    for name in ("items_shuffle_1000.json", "items_ins_v2_1000.json"):
        folder = write(products=[{**PRODUCT, "asin": f"B{place:09d}"} for place in range(40)])
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])
        with pytest.raises(UserError, match=name) as error:
            _load(folder)
        assert "complete entries" in str(error.value)
        assert not list((folder.parent / "cache").rglob("meta.json")), "nothing half-made is kept"


def test_missing_files_and_folders(write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"No WebShop data folder.*WEBSHOP_DATA.*setup_data.*source=generated"):
        Catalogue.load()
    with pytest.raises(UserError, match=r"nowhere does not exist"):
        Catalogue.load(tmp_path / "nowhere")
    folder = write()
    with pytest.raises(UserError, match=r"no items_shuffle\.json and no items_ins_v2\.json"):
        Catalogue.load(folder, small=False)
    monkeypatch.setenv("WEBSHOP_DATA", str(folder))
    assert len(Catalogue.load(nouns=NounTable({}))) == 1
    with pytest.raises(UserError, match="human_goals=False"):
        GoalSet.load(_load(folder), human_goals=True)
    (folder / "items_ins_v2_1000.json").unlink()
    with pytest.raises(UserError, match=r"no items_ins_v2_1000\.json"):
        Catalogue.load(folder)


@pytest.mark.parametrize("chunk", [1, 2, 7, 1 << 20])
def test_streams_do_not_depend_on_the_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr("agent_system.environments.env_package.webshop.json_stream._CHUNK", chunk)
    values = [1, -2.5e3, 'a\u203a"]', [], {"k": [1, {"x": None}]}, True, 123456]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")
    assert list(iter_list(path)) == values
    record = {f"k{place}": value for place, value in enumerate(values)}
    path.write_text(json.dumps(record), encoding="utf-8")
    assert list(iter_object(path)) == list(record.items())
    for text in ("[]", " [ ] ", "{}", "{ }"):
        path.write_text(text, encoding="utf-8")
        assert list(iter_list(path) if "[" in text else iter_object(path)) == []


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1", "[1,", "[1 2]", "[nul]", '["a', "[\xff]", "[] x", "[1] [2]", "[1]]", "[" + "9" * 10_000 + "]"],
)
def test_broken_streams(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"x\.json"):
        list(iter_list(path))


@pytest.mark.parametrize(
    "text", ["", "[]", "{1: 2}", '{"a": 1', '{"a" 1}', '{} {"B', '{"a": 1}}', '{"a": -%s}' % ("9" * 10_000)]
)
def test_broken_objects(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"x\.json"):
        list(iter_object(path))


def test_setup_program(write: Callable[..., Path], generated_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert setup_data.main(["--data-dir", str(generated_dir)]) == 0
    out = capsys.readouterr().out
    assert "1000 products" in out and "human goals for these products: 2000" in out and "bytes" in out
    assert setup_data.main(["--data-dir", str(write())]) == 2
    assert "1 usable products where the published file has 1000" in capsys.readouterr().err
    assert setup_data.main([]) == 2
    assert "WEBSHOP_DATA" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        setup_data.main(["--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in ("items_shuffle_1000.json", "items_ins_v2.json", "items_human_ins.json"))


def test_setup_program_on_the_original(
    original_dir: Path, write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup_data.main(["--data-dir", str(original_dir)]) == 0
    out = capsys.readouterr().out
    assert "synthetic goals: 6910" in out and "human goals for these products: 13" in out


@pytest.mark.parametrize(
    ("name", "kept", "message"),
    [
        ("items_ins_v2_1000.json", 500, r"items_ins_v2_1000\.json has no entry for 500 of 1000 products \(the first: "),
        ("items_human_ins.json", 3, r"items_human_ins\.json holds \d goals for these products where .* has 13"),
    ],
)
def test_setup_program_notices_missing_entries(
    original_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kept: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    for path in original_dir.glob("items_*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    entries = json.loads((folder / name).read_bytes())
    (folder / name).write_text(json.dumps(dict(list(entries.items())[:kept])), encoding="utf-8")
    assert setup_data.main(["--data-dir", str(folder)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_setup_program_notices_lost_instructions(
    original_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "items_shuffle_1000.json").write_bytes((original_dir / "items_shuffle_1000.json").read_bytes())
    entries = json.loads((original_dir / "items_ins_v2_1000.json").read_bytes())
    next(entry for entry in entries.values() if "instruction" in entry).pop("instruction")
    (folder / "items_ins_v2_1000.json").write_text(json.dumps(entries), encoding="utf-8")
    assert setup_data.main(["--data-dir", str(folder)]) == 2
    assert "synthetic goals where the published file has 6910" in capsys.readouterr().err


def test_generator_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--products", "5", "--goals", "4", "--out"]
    assert generate_catalogue.main([*arguments, str(tmp_path / "a")]) == 0
    assert f"WEBSHOP_DATA={tmp_path / 'a'}" in capsys.readouterr().out
    assert generate_catalogue.main(["--products", "0", "--out", str(tmp_path / "b")]) == 2
    assert "products=0" in capsys.readouterr().err and not (tmp_path / "b").exists()
