# SPDX-License-Identifier: Apache-2.0
"""Compiled catalogues: damage is noticed and repaired, and processes that build at once do not disturb each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from agent_system.environments.env_package.webshop import store
from agent_system.environments.env_package.webshop.catalogue import Catalogue
from agent_system.environments.env_package.webshop.generate import generate_catalogue
from agent_system.environments.env_package.webshop.goals import GoalSet
from agent_system.environments.env_package.webshop.nouns import ContentWords

DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "second half zeroed": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "zeroed": lambda data: bytes(len(data)),
    "one bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b" ",
    "removed": lambda _: None,
}


def _build(folder: Path) -> None:
    np.save(folder / "numbers.npy", np.arange(1, 100))
    with store.RecordWriter(folder, "text") as writer:
        writer.add("a")
    store.write_meta(folder, {"hash": "x"})


@pytest.mark.parametrize("name", ["numbers.npy", "text_bytes.npy", "text_starts.npy", "meta.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_noticed_and_the_folder_built_again(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "compiled"
    meta = store.open_or_build(folder, _build)
    whole = (folder / name).read_bytes()
    assert store.open_or_build(folder, _build) == meta and not caplog.records
    changed = DAMAGES[damage](whole)
    if changed is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(changed)
    harmless = name == "meta.json" and damage in ("longer", "cut")  # its last character is a line end
    assert (store.read_meta(folder) is None) or harmless
    assert store.open_or_build(folder, _build) == meta
    if not harmless:
        assert "is damaged" in caplog.text and (folder / name).read_bytes() == whole
    assert list(tmp_path.iterdir()) == [folder]


def test_a_changed_description_is_damage(tmp_path: Path) -> None:
    folder = tmp_path / "compiled"
    store.open_or_build(folder, _build)
    text = (folder / "meta.json").read_text(encoding="utf-8")
    for other in (text.replace('"hash": "x"', '"hash": "y"'), "[]", "{}", '{"meta": [], "sum": 0}', "null"):
        (folder / "meta.json").write_text(other, encoding="utf-8")
        assert store.read_meta(folder) is None


def test_large_files_are_sampled_from_start_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_BLOCK", 16)
    monkeypatch.setattr(store, "_BLOCKS", 4)
    path = tmp_path / "large"
    data = bytes(range(1, 201)) * 2
    sums = set()
    for changed in (data, data[:200] + bytes(200), bytes(200) + data[200:], data[:-1] + b"\0", b"\0" + data[1:]):
        path.write_bytes(changed)
        sums.add(store._checksum.__wrapped__(path, len(changed), 0))
    assert len(sums) == 5
    path.write_bytes(data[:33] + b"\0" + data[34:])
    assert store._checksum.__wrapped__(path, len(data), 0) in sums, "between the blocks nothing is read"


def test_every_file_of_a_catalogue_is_checked(tmp_path: Path) -> None:
    shop, cache = generate_catalogue(tmp_path / "shop", products=12, goals=12), tmp_path / "cache"

    def look() -> object:
        catalogue = Catalogue.load(shop, nouns=ContentWords(), cache_dir=cache)
        goals = GoalSet.load(catalogue)
        hits = [catalogue.search(goals[index].instruction_text).tolist() for index in range(12)]
        return hits, [catalogue.product(number) for number in range(12)], goals.prices.tolist()

    expected = look()
    (folder,) = cache.iterdir()
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
        assert look() == expected, path.name
        assert path.read_bytes() == data


@pytest.mark.parametrize("damaged", [False, True])
def test_the_first_to_finish_wins(tmp_path: Path, damaged: bool, caplog: pytest.LogCaptureFixture) -> None:
    """What another process put there while this one was building stays: others may read it already."""
    folder = tmp_path / "compiled"
    if damaged:
        folder.mkdir()
        (folder / "meta.json").write_text("{", encoding="utf-8")
    first = -1

    def build(place: Path) -> None:
        nonlocal first
        store.open_or_build(folder, _build)
        first = folder.stat().st_ino
        _build(place)

    assert store.open_or_build(folder, build)["hash"] == "x"
    assert folder.stat().st_ino == first and list(tmp_path.iterdir()) == [folder]
    assert ("is damaged" in caplog.text) == damaged


def test_only_what_is_damaged_is_discarded(tmp_path: Path) -> None:
    """Another process may have built the folder again between a look at it and its removal."""
    folder = tmp_path / "compiled"
    meta = store.open_or_build(folder, _build)
    store._discard(folder)
    assert store.read_meta(folder) == meta
    (folder / "numbers.npy").unlink()
    store._discard(folder)
    store._discard(folder)
    assert list(tmp_path.iterdir()) == []
