# SPDX-License-Identifier: Apache-2.0
"""Goals that people wrote for products, from `items_human_ins.json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from agent_system.environments.env_package.webshop.json_stream import iter_object
from agent_system.environments.env_package.webshop.products import string_list
from verl.utils.errors import UserError

if TYPE_CHECKING:
    from agent_system.environments.env_package.webshop.catalogue import Catalogue

__all__ = ["HumanGoal", "parse_human_entry", "read_human_goals"]


class HumanGoal(NamedTuple):
    """A request in someone's words, without a price limit. product: its number in the catalogue."""

    product: int
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]


def parse_human_entry(entry: Any, place: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Instruction, attributes and option values of one entry.

    Raises:
        UserError: the entry has another form; names `place` (file and product) and the field.
    """
    if not isinstance(entry, dict):
        raise UserError(f"{place}: an entry is {type(entry).__name__}, expected an object.")
    if not isinstance(entry.get("instruction"), str):
        raise UserError(f"{place}: field `instruction` is missing or not a string.")
    return (
        entry["instruction"],
        string_list(entry, "instruction_attributes", place),
        string_list(entry, "instruction_options", place),
    )


def read_human_goals(catalogue: Catalogue) -> tuple[HumanGoal, ...]:
    """The goals of the products that the catalogue holds, in the order of the product file.

    Entries without attributes are left out, as in the original.

    Raises:
        UserError: the file is missing, truncated or of another form.
    """
    path = catalogue.files.human
    if not path.is_file():
        raise UserError(f"Human goals are asked for, but {path} does not exist; get it, or set human_goals=False.")
    found: list[HumanGoal] = []
    for asin, entries in iter_object(path):
        place = f"{path.name}: {asin}"
        if not isinstance(entries, list):
            raise UserError(f"{place}: {type(entries).__name__} found, expected a list of instructions.")
        number = catalogue.number_of(asin)
        for position, entry in enumerate(entries):
            text, attributes, options = parse_human_entry(entry, f"{place}[{position}]")
            if number is not None and attributes:
                found.append(HumanGoal(number, text.strip("."), attributes, options))
    if not found:
        raise UserError(f"{path} holds no goal for the {len(catalogue)} products of {catalogue.files.products.name}.")
    # The sort is stable: the goals of one product stay in the order of the file.
    return tuple(sorted(found, key=lambda goal: goal.product))
