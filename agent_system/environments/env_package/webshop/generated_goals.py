# SPDX-License-Identifier: Apache-2.0
"""Requests for products of a generated shop, in several phrasings."""

from __future__ import annotations

from agent_system.environments.env_package.webshop.generated_products import MadeProduct
from agent_system.environments.env_package.webshop.random_source import Draws

__all__ = ["make_goal"]

# {before}: attributes that stand before the product, {after}: those that follow it, {options}: option values.
_PHRASINGS = (
    "i am looking for {before}{kind}{after}{options}",
    "find me {before}{kind}{after}{options}",
    "i need {before}{kind}{after}{options}",
    "i want to buy {before}{kind}{after}{options}",
    "please show me {before}{kind}{after}{options}",
    "can you help me find {before}{kind}{after}{options}",
    "i would like {before}{kind}{after}{options}",
    "my friend asked for {before}{kind}{after}{options}",
    "looking to get {before}{kind}{after}{options}, thanks",
)
_AFTER = (" that is {}", " with {}", ", it should be {}", " which is {}", " and it must be {}")
_OPTIONS = ("{name}: {value}", "{value} {name}", "the {name} {value}", "{name} {value}")
_OPTION_STARTS = (" with ", ", ", " in ", ", i prefer ")
_NUM_ATTRIBUTES = ((1, 0.35), (2, 0.45), (3, 0.2))
_NUM_OPTIONS = ((0, 0.15), (1, 0.5), (2, 0.35))


def make_goal(product: MadeProduct, draws: Draws) -> dict[str, object]:
    """A goal in the schema of the file of human instructions.

    The title's attribute is always asked for, and what tells the product from its family.
    """
    told_by_attribute = product.family == "attribute"
    others = [attribute for attribute in product.attributes[1:] if attribute != product.telling]
    wanted = [product.signature, *([product.telling] if told_by_attribute else [])]
    missing = max(draws.weighted(_NUM_ATTRIBUTES) - len(wanted), 0)
    wanted = draws.shuffled(wanted + draws.sample(others, missing))
    options = _choose_options(product, draws)
    return {
        "asin": product.asin,
        "instruction": _phrase(product, wanted, options, draws),
        "attributes": list(product.attributes),
        "options": [f"{name}: {value}" for name, value in options],
        "instruction_attributes": wanted,
        "instruction_options": [value for _, value in options],
        "assignment_id": "generated",
        "worker_id": "generated",
    }


def _choose_options(product: MadeProduct, draws: Draws) -> list[tuple[str, str]]:
    count = draws.weighted(_NUM_OPTIONS)
    told = [
        (name, product.telling)
        for name, values in product.options
        if product.family == "option" and product.telling in values
    ]
    names = {name for name, _ in told}
    others = [(name, draws.pick(values)) for name, values in product.options if name not in names]
    return told + draws.sample(others, max(count - len(told), 0))


def _phrase(product: MadeProduct, attributes: list[str], options: list[tuple[str, str]], draws: Draws) -> str:
    num_before = draws.integer(0, min(2, len(attributes)))
    before = attributes[:num_before]
    after = attributes[num_before:]
    # Plurals and goods without a count take no article.
    first = (before or [product.kind.name])[0]
    article = "an " if first[0] in "aeiou" else "a "
    if product.kind.name.endswith("s") or product.category.name == "grocery":
        article = ""
    texts = [form.format(name=name, value=value) for (name, value), form in _forms(options, draws)]
    return draws.pick(_PHRASINGS).format(
        before=article + "".join(f"{attribute}, " for attribute in before[:-1]) + "".join(f"{a} " for a in before[-1:]),
        kind=product.kind.name,
        after=draws.pick(_AFTER).format(" and ".join(after)) if after else "",
        options=draws.pick(_OPTION_STARTS) + " and ".join(texts) if texts else "",
    )


def _forms(options: list[tuple[str, str]], draws: Draws) -> list[tuple[tuple[str, str], str]]:
    return [(option, draws.pick(_OPTIONS)) for option in options]
