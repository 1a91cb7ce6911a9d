# SPDX-License-Identifier: Apache-2.0
"""Foreign logs become trajectories by replaying their actions in the games they come from."""

from __future__ import annotations

import json

import pytest

from agent_system.step_discriminator.trajectory_analyzer import importers
from agent_system.step_discriminator.trajectory_analyzer.foreign_logs import opening_key, read_foreign_log
from agent_system.trajectory import load_trajectories

pytest.importorskip("alfworld", reason="games are generated from alfworld's tables")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    from agent_system.environments.env_package.alfworld.generate import generate_games

    return generate_games(tmp_path_factory.mktemp("games") / "data", train=6, valid_seen=0, valid_unseen=0, seed=11)


@pytest.fixture(scope="module")
def episodes(data_dir):
    """(opening, actions, answers) of the oracle's plan in each game."""
    from agent_system.environments.env_package.alfworld import AlfworldGame, load_manifest
    from agent_system.environments.env_package.alfworld.experts import Oracle

    found = []
    for entry in load_manifest(data_dir, "train").games:
        game = AlfworldGame(data_dir / entry.path)
        opening, _ = game.reset()
        actions = list(Oracle(game))
        game.reset()
        found.append((opening, actions, [game.step(action)[0] for action in actions]))
    return found


def old_verb(action: str) -> str:
    words = action.split(" to ")
    return f"put {words[0].removeprefix('move ')} in/on {words[1]}" if action.startswith("move ") else action


def old_answer(answer: str) -> str:
    return answer.replace("You move the", "You put the").replace(" to the ", " in/on the ")


def run(data_dir, *arguments: object) -> int:
    return importers.main([*map(str, arguments), "--data-dir", str(data_dir), "--quiet"])


@pytest.mark.parametrize(
    ("action", "modern", "old"),
    [
        ("put mug 1 in/on shelf 2", "move mug 1 to shelf 2", True),
        ("put mug 1 on shelf 2", "move mug 1 to shelf 2", True),
        ("move mug 1 to shelf 2", "move mug 1 to shelf 2", False),
        ("go to shelf 2", "go to shelf 2", False),
    ],
)
def test_old_put(action, modern, old):
    assert importers.modern_action(action) == (modern, old)


def test_opening_key_ignores_banner_case_and_spacing():
    text = "-= Welcome =-\n\nYou are in the middle of a room. Looking, you see a bed.\n\nYour task is to: put a pen.\n"
    assert opening_key(text) == "you are in the middle of a room. looking, you see a bed. your task is to: put a pen"
    assert opening_key("Nothing happens.") is None


@pytest.mark.parametrize(
    "keys", [("conversations", "from", "value", "gpt"), ("messages", "role", "content", "assistant")]
)
def test_sharegpt_with_old_verbs(keys, data_dir, episodes, tmp_path, capsys):
    turns_key, role, said, assistant = keys
    items = []
    for number, (opening, actions, answers) in enumerate(episodes):
        turns = [{role: "human", said: "Interact with a household."}, {role: assistant, said: "OK"}]
        turns.append({role: "human", said: opening})
        for action, answer in zip(actions, answers):
            turns.append({role: assistant, said: f"Thought: I must.\nAction: {old_verb(action)}"})
            turns.append({role: "human", said: f"Observation: {old_answer(answer)}"})
        items.append({"item_id": f"alfworld_{number}", turns_key: turns})
    log = tmp_path / "log.json"
    log.write_text(json.dumps(items))
    assert run(data_dir, log, "--format", "sharegpt", "--out", tmp_path / "t.jsonl") == 0
    loaded, report = load_trajectories(tmp_path / "t.jsonl")
    assert len(loaded) == 6 and not report.bad and all(item.success for item in loaded)
    assert [[step.action for step in item.steps] for item in loaded] == [actions for _, actions, _ in episodes]
    moves = sum(action.startswith("move ") for _, actions, _ in episodes for action in actions)
    assert f"{moves} old verbs" in (text := capsys.readouterr().out) and "0 observations differ" in text


@pytest.mark.parametrize("in_turns", [True, False])
def test_worked_examples_before_the_episode_are_not_the_episode(in_turns, data_dir, episodes, tmp_path):
    (example, tried, _), (opening, actions, answers) = episodes[:2]
    turns = [("human", f"Interact with a household. {'' if in_turns else f'An example: {example} > {tried[0]} '}\n")]
    if in_turns:
        turns += [("human", example), ("gpt", f"Thought: an example. Action: {tried[0]}"), ("human", "You arrive.")]
        turns.append(("human", opening))
    else:
        turns[0] = ("human", f"{turns[0][1]}Now it is your turn. {opening}")
    for action, answer in zip(actions, answers):
        turns += [("gpt", f"Thought: I must.\nAction: {action}"), ("human", answer)]
    log = tmp_path / "log.json"
    log.write_text(json.dumps([{"id": "eto", "conversations": [{"from": who, "value": said} for who, said in turns]}]))
    assert run(data_dir, log, "--format", "sharegpt", "--out", tmp_path / "t.jsonl") == 0
    (loaded,), _ = load_trajectories(tmp_path / "t.jsonl")
    assert loaded.success and [step.action for step in loaded.steps] == actions


def test_unknown_room_and_broken_items_are_named(data_dir, episodes, tmp_path, capsys):
    opening, actions, _ = episodes[0]
    good = [{"from": "human", "value": opening}, *({"from": "gpt", "value": f"Action: {a}"} for a in actions)]
    strange = [{"from": "human", "value": opening.replace("room. ", "room. A dragon sits here. ")}, *good[1:]]
    log = tmp_path / "log.jsonl"
    lines = [json.dumps({"conversations": turns}) for turns in (good, strange, [])]
    log.write_text("\n".join([*lines, "{broken"]) + "\n")
    assert run(data_dir, log, "--format", "sharegpt", "--out", tmp_path / "t.jsonl") == 1
    err = capsys.readouterr().err
    assert f"{log}, line 2: no game" in err and f"{log}, line 3" in err and f"{log}, line 4: is no valid JSON" in err
    assert len(load_trajectories(tmp_path / "t.jsonl")[0]) == 1


def test_nothing_imported_writes_nothing(data_dir, tmp_path, capsys):
    (tmp_path / "log.json").write_text("[]")
    assert run(data_dir, tmp_path / "log.json", "--format", "sharegpt", "--out", tmp_path / "t.jsonl") == 2
    assert not (tmp_path / "t.jsonl").exists() and "log.json" in capsys.readouterr().err


def dump_lines(episodes, style: str) -> list[dict]:
    """Turns as a training run dumps them, in the shuffled order of a batch."""
    from agent_system.environments.env_package.alfworld.prompt_builder import AlfworldPromptBuilder

    rows = []
    for opening, actions, answers in episodes:
        task = opening.split("Your task is to: ")[1]
        history, observation = [], opening
        for action, answer in zip(actions, answers):
            if style == "ours":
                prompt = AlfworldPromptBuilder("full", 2).build(task, history, observation, ["look"])
            else:
                past = list(enumerate(history, start=1))[-2:]
                lines = "\n".join(f"[Observation {k}: '{o}', Action {k}: '{a}']" for k, (o, a) in past)
                head = (
                    f"Your task is to: {task}\nmost recent:\n{lines}\nYou are now at step {len(history) + 1} and your"
                )
                prompt = f"{head if history else 'Your'} current observation is: {observation}\nYour admissible actions"
            rows.append(
                {"input": prompt, "output": f"<think>x</think><action>{action}</action>", "score": 0, "step": 1}
            )
            history.append((observation, action))
            observation = answer
    return rows[::-1]


@pytest.mark.parametrize("style", ["ours", "reference"])
def test_training_dump_is_chained_to_episodes(style, data_dir, episodes, tmp_path):
    log = tmp_path / "5.jsonl"
    # Two members of one group that did the same stay two episodes.
    log.write_text("".join(json.dumps(row) + "\n" for row in dump_lines([*episodes, episodes[0]], style)))
    found, problems = read_foreign_log(log, "verl-agent")
    assert not problems and len(found) == 7
    assert run(data_dir, log, "--format", "verl-agent", "--out", tmp_path / "t.jsonl") == 0
    loaded, _ = load_trajectories(tmp_path / "t.jsonl")
    assert all(item.success for item in loaded)
    wanted = sorted(actions for _, actions, _ in [*episodes, episodes[0]])
    assert sorted([step.action for step in item.steps] for item in loaded) == wanted
