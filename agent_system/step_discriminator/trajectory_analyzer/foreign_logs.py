# SPDX-License-Identifier: Apache-2.0
"""Parsers of foreign ALFWorld logs: text in, episodes (opening, actions, answers) out. No environment is needed."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.utils.errors import UserError

__all__ = ["FORMATS", "ForeignEpisode", "opening_key", "read_foreign_log"]


@dataclass(frozen=True)
class ForeignEpisode:
    """One episode as a log tells it."""

    place: str
    """File and position, for messages."""
    name: str
    """Id within the log."""
    opening: str
    """`opening_key` of the first observation."""
    actions: tuple[str, ...]
    responses: tuple[str, ...]
    """Raw model text of each action."""
    observations: tuple[str, ...]
    """The environment's answer to each action; may lack the last ones."""


# The room nearest to a task: what stands before it may be a worked example with a room and a task of its own.
_OPENING = re.compile(
    r"(You are in the middle of a room\.(?:(?!You are in the middle of a room\.).)*?Your task is to: [^\n]*)",
    re.DOTALL | re.IGNORECASE,
)
_ACTION = re.compile(r"Action:\s*(.+?)\s*$", re.DOTALL | re.IGNORECASE)
_TAGGED = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)

ParsedLog = tuple[list[ForeignEpisode], list[str]]


def opening_key(text: str) -> str | None:
    """Room sentence and task of an opening text, lowercased with single spaces; None when there is none.

    The last one, where the text holds several.
    """
    found = _OPENING.findall(text)
    return " ".join(found[-1].lower().split()).rstrip(".") if found else None


def read_foreign_log(path: Path, log_format: str) -> ParsedLog:
    """Episodes of one file and a sentence for each that could not be read.

    Raises:
        UserError: the file cannot be read at all.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the log {path}: {error}") from error
    return FORMATS[log_format](path, text)


def _json_items(path: Path, text: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """(place, item) of a JSON list or of JSON Lines."""
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is no valid JSON: {error}") from error
        yield from ((f"{path}, item {number}", item) for number, item in enumerate(items))
        return
    # Not splitlines(): a string of a JSON line may hold other line separators (U+2028, U+0085) as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}, line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append(f"{path}, line {number}: is no valid JSON ({error})")


def _read_sharegpt(path: Path, text: str) -> ParsedLog:
    episodes: list[ForeignEpisode] = []
    problems: list[str] = []
    for number, (place, item) in enumerate(_json_items(path, text, problems)):
        turns = _turns(item)
        start = _start(turns)
        if start is None:
            problems.append(f"{place}: no turn holds an opening text (room and `Your task is to: ...`)")
            continue
        episode = _conversation(place, str(item.get("item_id", item.get("id", number))), turns[start:])
        if episode is None:
            problems.append(f"{place}: no turn after the opening has an `Action: ...`")
            continue
        episodes.append(episode)
    return episodes, problems


def _start(turns: Sequence[tuple[str, str]]) -> int | None:
    """Where the episode begins: the first turn with the last opening text (earlier ones belong to examples)."""
    keys = [opening_key(said) if role == "user" else None for role, said in turns]
    last = next((key for key in reversed(keys) if key is not None), None)
    return None if last is None else keys.index(last)


def _turns(item: Any) -> list[tuple[str, str]]:
    """(user or assistant, text) of each turn, in ShareGPT's or in the chat API's keys."""
    if not isinstance(item, dict):
        return []
    raw = item.get("conversations", item.get("messages", item.get("conversation", [])))
    turns = []
    for turn in raw if isinstance(raw, list) else []:
        if not isinstance(turn, dict):
            continue
        role, said = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if isinstance(role, str) and isinstance(said, str):
            turns.append(("assistant" if role in ("gpt", "assistant") else "user", said))
    return turns


def _conversation(place: str, name: str, turns: Sequence[tuple[str, str]]) -> ForeignEpisode | None:
    actions, responses, observations = [], [], []
    for position, (role, said) in enumerate(turns):
        match = _ACTION.search(said) if role == "assistant" else None
        if match is None:
            continue
        actions.append(match[1].splitlines()[0])
        responses.append(said)
        if position + 1 < len(turns):
            observations.append(_answer(turns[position + 1][1]))
    if not actions:
        return None
    opening = opening_key(turns[0][1]) or ""
    return ForeignEpisode(place, name, opening, tuple(actions), tuple(responses), tuple(observations))


def _answer(text: str) -> str:
    """An environment turn without the label before it and the command list after it."""
    text = re.sub(r"^\s*Observation:\s*", "", text, flags=re.IGNORECASE)
    return re.split(r"\n\s*AVAILABLE ACTIONS:", text, flags=re.IGNORECASE)[0].strip()


# Two wordings: verl-agent's and this project's own full prompt.
_NOW = re.compile(
    r"(?:current observation is|What you see now):\s*(.*?)\s*(?:Your admissible actions|Actions you can take now)",
    re.DOTALL | re.IGNORECASE,
)
_TASK = re.compile(r"Your task is to: ([^\n]*)", re.IGNORECASE)
_TURN_NUMBER = re.compile(r"(?:now at|This is) step (\d+)", re.IGNORECASE)
_PAST = re.compile(r"\[Observation (\d+): '(.*?)', Action \1: '(.*?)'\]", re.DOTALL)


@dataclass
class _Row:
    """One dumped turn: prompt (`input`) and model text (`output`)."""

    place: str
    turn: int
    task: str
    observation: str
    last: tuple[str, str] | None
    """Observation and action of the turn before."""
    action: str
    response: str


def _read_verl_agent(path: Path, text: str) -> ParsedLog:
    """Chain the turns of a dump to episodes.

    The lines carry no episode id and their order is the training batch's. A turn follows the one whose number is one
    less, whose task is the same and whose observation and action it quotes as its latest history; where several
    fit (members of a group that did the same so far) they are taken in file order, which only swaps equal pasts.
    """
    problems: list[str] = []
    rows = []
    for place, item in _json_items(path, text, problems):
        row = _row(place, item)
        if isinstance(row, str):
            problems.append(f"{place}: {row}")
        else:
            rows.append(row)
    episodes, leftover = _chain_rows(rows, path)
    problems += [f"{row.place}: turn {row.turn} continues no episode of this file" for row in leftover]
    return episodes, problems


def _row(place: str, item: Any) -> _Row | str:
    """The parsed row, or why it is none."""
    if not isinstance(item, dict) or not isinstance(item.get("input"), str) or not isinstance(item.get("output"), str):
        return "has no texts `input` and `output`"
    prompt, output = item["input"], item["output"]
    now = _NOW.search(prompt)
    if now is None:
        return "its input shows no current observation followed by the admissible actions"
    number = _TURN_NUMBER.search(prompt)
    task = _TASK.search(prompt)
    tagged = _TAGGED.search(output)
    past = _PAST.findall(prompt)
    return _Row(
        place=place,
        turn=int(number[1]) if number else 1,
        task=" ".join(task[1].lower().split()).rstrip(".") if task else "",
        observation=now[1],
        last=(past[-1][1].strip(), past[-1][2].strip()) if past else None,
        action=tagged[1].strip().lower() if tagged else output[-30:].lower(),
        response=output,
    )


def _chain_rows(rows: Sequence[_Row], path: Path) -> tuple[list[ForeignEpisode], list[_Row]]:
    chains: list[list[_Row]] = []
    open_chains: dict[tuple[int, str, str, str], list[list[_Row]]] = defaultdict(list)
    leftover: list[_Row] = []
    for row in sorted(rows, key=lambda item: item.turn):
        if row.turn == 1:
            chain = [row]
            chains.append(chain)
        else:
            last = row.last or ("", "")
            waiting = open_chains[row.turn - 1, row.task, last[0], last[1]]
            if not waiting:
                leftover.append(row)
                continue
            chain = waiting.pop(0)
            chain.append(row)
        open_chains[row.turn, _task_of(chain), row.observation.strip(), row.action].append(chain)
    episodes = [
        ForeignEpisode(
            place=chain[0].place,
            name=f"{path.stem}-{number}",
            opening=opening_key(chain[0].observation) or "",
            actions=tuple(row.action for row in chain),
            responses=tuple(row.response for row in chain),
            observations=tuple(row.observation for row in chain[1:]),
        )
        for number, chain in enumerate(chains)
    ]
    return episodes, leftover


def _task_of(chain: Sequence[_Row]) -> str:
    return chain[0].task


FORMATS: dict[str, Callable[[Path, str], ParsedLog]] = {
    "sharegpt": _read_sharegpt,
    "verl-agent": _read_verl_agent,
}
