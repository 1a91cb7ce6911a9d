# SPDX-License-Identifier: Apache-2.0
"""WebShop prompts as a pure function, used by the environment manager and by SFT data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from agent_system.environments.env_package.webshop.pages import (
    Page,
    click,
    clicked,
    page_lines,
    parse_page,
)
from agent_system.environments.prompts.webshop import WEBSHOP_TEMPLATE, WEBSHOP_TEMPLATE_NO_HIS
from agent_system.memory.memory import format_action_history
from verl.utils.errors import UserError

__all__ = ["WebshopPromptBuilder"]

Turn = tuple[str, str]

_SUB_PAGES = frozenset(["description", "features", "reviews", "attributes"])
_SUB_ACTIONS = (click("back to search"), click("< prev"))
_STAYS_ON_ITEM = _SUB_PAGES | {"< prev"}
_OPENED = "(opened)"
_NO_EFFECT = "(nothing changed)"


class WebshopPromptBuilder:
    """Builds the user message of one turn.

    `full`: instructions, the last `history_length` (page, action) pairs, the page and every action, for pretrained
    models. `compact`: request, the last `history_length` actions (with what a sub-page said), the page with each
    product and option as the action that clicks it, the options chosen so far, the other actions, one a line; products
    opened before are marked; all in lower case, as actions are. No instructions; for a tokenizer trained on it.

    The request, the page and its actions are in every prompt, whatever the history shown.
    """

    def __init__(self, style: Literal["full", "compact"], history_length: int) -> None:
        """
        Args:
            style: `env.webshop.prompt_style`.
            history_length: past turns shown; <= 0 shows none.
        """
        if style not in ("full", "compact"):
            raise UserError(f"env.webshop.prompt_style={style}: choose full or compact.")
        self.style = style
        self.history_length = max(history_length, 0)

    def build(
        self,
        task_text: str,
        history: Sequence[Turn],
        obs: str,
        admissible: Sequence[str],
        max_history: int | None = None,
    ) -> str:
        """The message of one turn.

        Args:
            task_text: the request.
            history: all past (page, action) pairs, oldest first; empty at the first turn.
            obs: the page, as `pages.page_text` returns it.
            admissible: actions offered now.
            max_history: shows at most so many past turns instead of `history_length`.
        """
        limit = self.history_length if max_history is None else min(max_history, self.history_length)
        shown = min(max(limit, 0), len(history))
        if self.style == "compact":
            return _compact(task_text, history, shown, obs, admissible)
        return _full(task_text, history, shown, obs, admissible)


def _full(task: str, history: Sequence[Turn], shown: int, obs: str, admissible: Sequence[str]) -> str:
    available_actions = "\n".join(f"'{action}'," for action in admissible)
    if shown == 0:
        return WEBSHOP_TEMPLATE_NO_HIS.format(
            task_description=task, current_observation=obs, available_actions=available_actions
        )
    return WEBSHOP_TEMPLATE.format(
        task_description=task,
        step_count=len(history),
        history_length=shown,
        action_history=format_action_history(history, shown),
        current_step=len(history) + 1,
        current_observation=obs,
        available_actions=available_actions,
    )


def _compact(task: str, history: Sequence[Turn], shown: int, obs: str, admissible: Sequence[str]) -> str:
    page = parse_page(obs, admissible)
    outcomes = [text for text, _ in history[1:]] + [obs]
    start = len(history) - shown
    lines = [f"Task: {task.lower()}"]
    for position in range(start, len(history)):
        text, action = history[position]
        lines += [f">{action}", *_outcome(text, action, outcomes[position], position == len(history) - 1)]
    lines += [*_marked(page, history), *_chosen(page, history)]
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


def _chosen(page: Page, history: Sequence[Turn]) -> list[str]:
    """What was selected on an item page since the item was opened, if anything."""
    name_of = {value: name for name, values in page.options for value in values}
    chosen: dict[str, str] = {}
    for _, action in reversed(history):
        value = clicked(action)
        if value in name_of:
            chosen.setdefault(name_of[value], value)
        elif value not in _STAYS_ON_ITEM:
            break
    values = [chosen[name] for name, _ in page.options if name in chosen]
    return [f"Chosen: {', '.join(values)}"] if values else []
