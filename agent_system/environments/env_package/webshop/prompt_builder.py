# SPDX-License-Identifier: Apache-2.0
"""WebShop prompts as a pure function, used by the environment manager and by SFT data."""

from __future__ import annotations

from collections.abc import Sequence

from agent_system.environments.env_package.webshop.pages import (
    Page,
    click,
    clicked,
    is_item_page,
    page_lines,
    parse_page,
)
from agent_system.environments.prompt_builder import PromptBuilder, Turn
from agent_system.environments.prompts.webshop import WEBSHOP_TEMPLATE, WEBSHOP_TEMPLATE_NO_HIS

__all__ = ["WebshopPromptBuilder"]

_SUB_PAGES = frozenset(["description", "features", "reviews", "attributes"])
_SUB_ACTIONS = (click("back to search"), click("< prev"))
_STAYS_ON_ITEM = _SUB_PAGES | {"< prev"}
_OPENED = "(opened)"
_NO_EFFECT = "(nothing changed)"


class WebshopPromptBuilder(PromptBuilder):
    """Builds the user message of one turn; observations are pages as `pages.page_text` returns them.

    `full`: instructions, the last `history_length` (page, action) pairs, the page and every action. `compact`: request,
    the last `history_length` actions (with what a sub-page said), the page with each product and option as the action
    that clicks it, the options chosen so far, the other actions, one a line; products opened before are marked; all in
    lower case, as actions are.
    """

    style_key = "env.webshop.prompt_style"

    def full(self, task: str, history: Sequence[Turn], shown: int, obs: str, admissible: Sequence[str]) -> str:
        """See `PromptBuilder.full`."""
        available_actions = "\n".join(f"'{action}'," for action in admissible)
        if shown == 0:
            return WEBSHOP_TEMPLATE_NO_HIS.format(
                task_description=task, current_observation=obs, available_actions=available_actions
            )
        return WEBSHOP_TEMPLATE.format(
            **self.history_fields(task, history, shown),
            current_observation=obs,
            available_actions=available_actions,
        )

    def compact(self, task: str, history: Sequence[Turn], shown: int, obs: str, admissible: Sequence[str]) -> str:
        """See `PromptBuilder.compact`."""
        page = parse_page(obs, admissible)
        outcomes = [*(text for text, _ in history), obs][1:]
        lines = [f"Task: {task.lower()}"]
        for position in range(len(history) - shown, len(history)):
            text, action = history[position]
            lines += [f">{action}", *_outcome(text, action, outcomes[position], position == len(history) - 1)]
        lines += [*_marked(page, history), *_chosen(page, history, outcomes)]
        listed = {asin for asin, _, _ in page.products} | {value for _, values in page.options for value in values}
        lines += ["Actions:", *(action for action in admissible if clicked(action) not in listed)]
        return "\n".join(lines)


def _outcome(before: str, action: str, after: str, is_last: bool) -> list[str]:
    """What to say of a past action beside itself: that it did nothing, or what the sub-page said that it led to."""
    if before == after and not _selects(action, before):
        return [_NO_EFFECT]
    if is_last or clicked(action) not in _SUB_PAGES:
        return []
    return [part.lower() for part in parse_page(after, _SUB_ACTIONS).text]


def _selects(action: str, page: str) -> bool:
    """Whether the action may have selected an option, which text mode does not show."""
    value = clicked(action)
    return value not in (None, "search") and f"'{value}'" in page.lower()


def _marked(page: Page, history: Sequence[Turn]) -> list[str]:
    """The page's lines, with a mark at products that were opened before."""
    opened = {action for _, action in history} if page.kind == "results" else set()
    return [f"{line} {_OPENED}" if line.rpartition(" ")[2] in opened else line for line in page_lines(page)]


def _chosen(page: Page, history: Sequence[Turn], outcomes: Sequence[str]) -> list[str]:
    """What was selected on an item page since the item was opened, if anything.

    An action that the page did not offer selects nothing and leaves nothing: the page stays as it is.
    """
    name_of = {value: name for name, values in page.options for value in values}
    chosen: dict[str, str] = {}
    for (text, action), outcome in zip(reversed(history), reversed(outcomes), strict=True):
        value = clicked(action)
        if value in name_of and is_item_page(text):
            chosen.setdefault(name_of[value], value)
        elif value not in _STAYS_ON_ITEM and text != outcome:
            break
    values = [chosen[name] for name, _ in page.options if name in chosen]
    return [f"Chosen: {', '.join(values)}"] if values else []
