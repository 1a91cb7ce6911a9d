# SPDX-License-Identifier: Apache-2.0
"""Common sense: where things are usually kept. Our own words, no table of the data set."""

from __future__ import annotations

__all__ = ["CLOSED_HOMES", "likely_homes"]

CLOSED_HOMES = frozenset({"cabinet", "drawer", "fridge", "microwave", "safe"})
"""Receptacle classes that have to be opened first."""


_KITCHEN_TOPS = "countertop diningtable sidetable"
_GROUPS: tuple[tuple[str, str], ...] = (
    ("apple bread egg lettuce potato tomato", f"fridge {_KITCHEN_TOPS} sinkbasin microwave garbagecan"),
    ("bowl cup mug plate", f"{_KITCHEN_TOPS} cabinet shelf sinkbasin fridge microwave coffeemachine dresser desk"),
    ("glassbottle winebottle", f"{_KITCHEN_TOPS} cabinet fridge shelf garbagecan dresser"),
    ("pan pot kettle", f"stoveburner {_KITCHEN_TOPS} cabinet sinkbasin fridge shelf"),
    ("butterknife fork knife ladle spatula spoon", f"{_KITCHEN_TOPS} drawer sinkbasin"),
    ("peppershaker saltshaker", f"{_KITCHEN_TOPS} cabinet drawer shelf"),
    ("dishsponge cloth handtowel soapbar soapbottle spraybottle tissuebox candle",
     "sinkbasin countertop cabinet drawer toilet bathtubbasin shelf handtowelholder cart sidetable garbagecan"),
    ("towel", "towelholder bathtubbasin"),
    ("toiletpaper", "toiletpaperhanger toilet cabinet drawer countertop garbagecan shelf"),
    ("plunger scrubbrush", "cart cabinet toilet"),
    ("papertowel papertowelroll", "countertop diningtable garbagecan toilet"),
    ("book laptop newspaper pillow remotecontrol cellphone creditcard keychain basketball",
     "sofa armchair bed coffeetable sidetable desk dresser diningtable drawer shelf ottoman"),
    ("alarmclock cd pen pencil watch box vase statue",
     "desk dresser sidetable coffeetable shelf drawer diningtable cabinet safe sofa armchair garbagecan"),
    ("baseballbat tennisracket", "bed desk dresser sidetable coffeetable diningtable"),
    ("wateringcan", "cabinet shelf drawer sidetable coffeetable desk dresser"),
    ("desklamp floorlamp",
     "desk sidetable dresser shelf coffeetable diningtable tvstand countertop"),
)  # fmt: skip
_HOMES = {kind: frozenset(places.split()) for kinds, places in _GROUPS for kind in kinds.split()}


def likely_homes(object_class: str) -> frozenset[str]:
    """Receptacle classes in which a thing of this class (as players read it, `mug`) may well be; empty if unknown."""
    return _HOMES.get(object_class, frozenset())
