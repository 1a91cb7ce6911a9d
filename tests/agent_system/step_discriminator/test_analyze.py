# SPDX-License-Identifier: Apache-2.0
"""The analysis program: files, bad input, interruption, workers."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import toy_credit_game
from toy_credit_game import ToyGame, toy_reveals, toy_trajectories, toy_trajectory

from agent_system.step_discriminator.trajectory_analyzer import (
    EnvAdapter,
    load_credit_analysis,
    register_adapter,
)
from agent_system.step_discriminator.trajectory_analyzer import analyze as program
from agent_system.step_discriminator.trajectory_analyzer.parallel import WorkerLostError, run_jobs
from agent_system.trajectory import save_trajectories
from verl.utils.errors import UserError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def toy_adapter(env_name, data_dir):
    return EnvAdapter(make_game=ToyGame, reveals=toy_reveals, versions={"toy": "1"})


def analyze(source, out, **options):
    return program.analyze([source], out, adapter_for=toy_adapter, **options)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    save_trajectories(path, toy_trajectories(40))
    return path


def output_bytes(folder: Path) -> tuple[bytes, bytes]:
    return (folder / program.ANALYSIS_FILE).read_bytes(), (folder / program.SUMMARY_FILE).read_bytes()


def test_document_has_all_fields_and_adds_up(source, tmp_path):
    analyze(source, tmp_path / "out")
    document = load_credit_analysis(tmp_path / "out" / program.ANALYSIS_FILE)
    header, items = document["header"], document["trajectories"]
    counts = header["counts"]
    assert counts["trajectories"] == 40 == counts["labelled"] + counts["failed"]
    assert 10 < counts["labelled"] == len(items)
    assert [item["status"] for item in document["excluded"]] == ["failed"] * counts["failed"]
    assert header["versions"] == {"toy": "1"} and header["env_names"] == ["toy"]
    assert header["options"]["mode"] == "single" and header["options"]["label_source"] == "single"
    assert header["env_steps_used"] == sum(item["env_steps_used"] for item in items) < header["env_steps_naive"]
    assert counts["steps"] == sum(len(item["steps"]) for item in items)
    assert counts["redundant_steps"] == sum(counts["redundant_by_kind"].values())
    for item in items:
        labels = [step["credit"] for step in item["steps"]]
        assert item["redundancy"] == labels.count(0) / len(labels)
        assert all(
            step["ablated_success"] == (step["credit"] == 0) == (not step["necessary_single"])
            and step["in_minimal"] is None
            for step in item["steps"]
        )
        assert set(item) >= {"schema_version", "traj_uid", "task", "policy", "evolved_indices", "final_observation"}
        assert set(item["steps"][0]) >= {"observation", "action", "admissible_actions", "state_key", "ablated_steps"}


def test_minimal_mode_keeps_both_labels_and_credit_follows_the_source(source, tmp_path):
    documents = {}
    for name, label_source in (("by_single", "single"), ("by_minimal", "minimal")):
        options = ["--mode", "minimal", "--label-source", label_source, "--quiet"]
        assert run_main(source, "--out-dir", tmp_path / name, *options) == 0
        documents[name] = load_credit_analysis(tmp_path / name / program.ANALYSIS_FILE)
        assert documents[name]["header"]["options"]["label_source"] == label_source
    for name, field in (("by_single", "necessary_single"), ("by_minimal", "in_minimal")):
        for item in documents[name]["trajectories"]:
            assert [step["credit"] for step in item["steps"]] == [int(step[field]) for step in item["steps"]]
            kept = [step["step_index"] for step in item["steps"] if step["in_minimal"]]
            assert kept == item["evolved_indices"] and item["succeeded"] and item["final_score"] == 1.0
    pairs = zip(*(documents[name]["trajectories"] for name in documents))
    assert any(left["redundancy"] != right["redundancy"] for left, right in pairs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--label-source", "minimal"], "error: label_source=minimal needs"),
        (["--mode", "minimal", "--no-evolve"], "error: mode=minimal"),
        (["--success-threshold", "0"], "error: success_threshold=0.0"),
        (["--workers", "-1"], "error: --workers -1"),
    ],
)
def test_options_that_cannot_work_are_one_line(options, message, source, tmp_path, capsys):
    assert run_main(source, "--out-dir", tmp_path / "out", *options) == 2
    assert capsys.readouterr().err.startswith(message) and not (tmp_path / "out").exists()


def test_output_is_cut_at_the_first_success(tmp_path):
    path = tmp_path / "t.jsonl"
    save_trajectories(path, [toy_trajectory([*toy_credit_game.PLAN, "look", "go red"])])
    analyze(path, tmp_path / "out")
    item = load_credit_analysis(tmp_path / "out" / program.ANALYSIS_FILE)["trajectories"][0]
    assert len(item["steps"]) == len(toy_credit_game.PLAN)
    assert item["final_observation"] == "You put the apple down."


def test_same_bytes_again_and_the_time_is_kept_apart(source, tmp_path):
    analyze(source, tmp_path / "a")
    analyze(source, tmp_path / "b")
    assert output_bytes(tmp_path / "a") == output_bytes(tmp_path / "b")
    assert json.loads((tmp_path / "a" / program.TIMING_FILE).read_text())["wall_time_s"] > 0
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(
        [program.ANALYSIS_FILE, program.SUMMARY_FILE, program.TIMING_FILE]
    )


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
from toy_credit_game import ToyGame, toy_reveals
from agent_system.step_discriminator.trajectory_analyzer import EnvAdapter
from agent_system.step_discriminator.trajectory_analyzer.analyze import analyze
left = int(sys.argv[4])
def make_game(task):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return ToyGame(task)
adapter = EnvAdapter(make_game=make_game, reveals=toy_reveals, versions={"toy": "1"})
analyze([sys.argv[1]], sys.argv[2], adapter_for=lambda name, folder: adapter)
"""


def test_killed_analysis_continues_and_ends_with_the_same_bytes(source, tmp_path):
    analyze(source, tmp_path / "straight")
    out = tmp_path / "killed"
    for allowed in (5, 7):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(source), str(out), str(HERE), str(allowed)], cwd=ROOT, timeout=120
        )
        assert done.returncode == -signal.SIGKILL
        assert [path.name for path in out.iterdir()] == [program.JOURNAL_FILE]
    # As if the kill had come in the middle of a write.
    with (out / program.JOURNAL_FILE).open("ab") as handle:
        handle.write(b'{"key": "abc", "rec')
    result = analyze(source, out)
    assert result.resumed >= 12
    assert output_bytes(out) == output_bytes(tmp_path / "straight")
    assert not (out / program.JOURNAL_FILE).exists()


SLOW_TOY = """
import time
from agent_system.step_discriminator.trajectory_analyzer import EnvAdapter, register_adapter
from toy_credit_game import ToyGame, toy_reveals

def slow(task):
    time.sleep(0.03)
    return ToyGame(task)

register_adapter("toy", lambda data_dir: EnvAdapter(make_game=slow, reveals=toy_reveals))
"""


def test_program_killed_from_outside_continues_and_ends_with_the_same_bytes(source, tmp_path):
    (tmp_path / "slow_toy.py").write_text(SLOW_TOY)
    out = tmp_path / "killed"
    command = [sys.executable, "-m", program.__name__, str(source), "--out-dir", str(out), "--quiet"]
    command += ["--import", "slow_toy", "--mode", "minimal"]
    paths = os.pathsep.join(map(str, (tmp_path, HERE, ROOT)))
    environment = {**os.environ, "PYTHONPATH": paths}
    journal = out / program.JOURNAL_FILE
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as process:
        deadline = time.monotonic() + 60
        while not (journal.is_file() and journal.read_bytes().count(b"\n") >= 5):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        process.kill()
    assert process.returncode == -signal.SIGKILL and not (out / program.ANALYSIS_FILE).exists()
    # As if the kill had come while a file was being written.
    (out / f".{program.ANALYSIS_FILE}.tmp-{process.pid}-abcd_123").write_text("half")
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert "continuing an interrupted analysis" in again.stderr
    command[command.index(str(out))] = str(tmp_path / "straight")
    assert subprocess.run(command, cwd=tmp_path, env=environment, timeout=120).returncode == 0
    assert output_bytes(out) == output_bytes(tmp_path / "straight")
    names = {program.ANALYSIS_FILE, program.SUMMARY_FILE, program.TIMING_FILE}
    assert {path.name for path in out.iterdir()} == names


def test_journal_of_other_options_or_input_is_not_used(source, tmp_path):
    out = tmp_path / "killed"
    subprocess.run([sys.executable, "-c", KILLED, str(source), str(out), str(HERE), "5"], cwd=ROOT, timeout=120)
    result = analyze(source, out, options=program.CreditOptions(evolve=False))
    assert result.resumed == 0


def test_two_analyses_with_one_output_folder_are_refused(source, tmp_path):
    with program.Journal(tmp_path / program.JOURNAL_FILE), pytest.raises(UserError, match="in use"):
        analyze(source, tmp_path)


def run_main(*arguments: object) -> int:
    register_adapter("toy", partial(toy_adapter, "toy"))
    return program.main([str(item) for item in arguments])


def test_a_journal_that_its_last_holder_removes_is_opened_anew(tmp_path, monkeypatch):
    """Another analysis may finish between the opening of its journal here and the lock."""
    path, lock, locked = tmp_path / program.JOURNAL_FILE, fcntl.flock, []

    def flock(file, operation):
        if not locked:
            path.unlink()
        locked.append(operation)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with program.Journal(path) as journal:
        assert len(locked) == 2 and path.samefile(f"/proc/self/fd/{journal._file.fileno()}")
        with pytest.raises(UserError, match="in use"), program.Journal(path):
            pass
    assert not path.exists()


def test_broken_line_is_named_and_the_rest_analysed(source, tmp_path, caplog, capsys):
    lines = source.read_text().splitlines()
    lines[3] = lines[3][: len(lines[3]) // 2]
    second = json.loads(lines[10])
    second["steps"][1]["reward"] = "much"
    lines[10] = json.dumps(second)
    source.write_text("\n".join(lines) + "\n")
    status = run_main(source, "--out-dir", tmp_path / "out", "--quiet")
    assert status == 1
    assert "line 4" in caplog.text and "line 11, field steps[1].reward" in caplog.text and str(source) in caplog.text
    document = load_credit_analysis(tmp_path / "out" / program.ANALYSIS_FILE)
    assert document["header"]["counts"]["bad_records"] == 2
    assert document["header"]["counts"]["trajectories"] == 38
    assert [item["line"] for item in document["bad_records"]] == [4, 11]
    assert "2 broken lines" in capsys.readouterr().err


def test_repeated_id_is_left_out_and_counted(tmp_path):
    save_trajectories(tmp_path / "t.jsonl", toy_trajectories(5))
    assert run_main(tmp_path / "t.jsonl", tmp_path / "t.jsonl", "--out-dir", tmp_path / "o", "--quiet") == 1
    counts = load_credit_analysis(tmp_path / "o" / program.ANALYSIS_FILE)["header"]["counts"]
    assert counts["trajectories"] == counts["bad_records"] == 5


@pytest.mark.parametrize("content", [None, "", "no json\n"])
def test_nothing_readable_writes_nothing(content, tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_text(content)
    assert run_main(path, "--out-dir", tmp_path / "out", "--quiet") == 2
    assert str(path) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_unknown_environment_names_the_known_ones(tmp_path):
    trajectory = dataclasses.replace(toy_trajectory(toy_credit_game.PLAN), env_name="chess/Blitz")
    save_trajectories(tmp_path / "t.jsonl", [trajectory])
    with pytest.raises(UserError, match=r"chess/Blitz.*alfworld"):
        program.analyze([tmp_path / "t.jsonl"], tmp_path / "out")


def _some_missing(task):
    if task.get("missing"):
        raise UserError("the game x does not exist")
    return ToyGame(task)


def test_unreadable_games_are_counted_and_looked_at_again(tmp_path):
    path = tmp_path / "t.jsonl"
    save_trajectories(path, [toy_trajectory(toy_credit_game.PLAN, uid=str(i), missing=i == 1) for i in range(3)])
    adapter = EnvAdapter(make_game=_some_missing)
    result = program.analyze([path], tmp_path / "out", adapter_for=lambda name, folder: adapter)
    document = load_credit_analysis(tmp_path / "out" / program.ANALYSIS_FILE)
    assert result.num_problems == 1
    assert document["excluded"] == [
        {"traj_uid": "1", "status": "unreadable_game", "reason": "the game x does not exist"}
    ]


def test_no_game_at_all_writes_nothing(tmp_path):
    path = tmp_path / "t.jsonl"
    save_trajectories(path, [toy_trajectory(toy_credit_game.PLAN, missing=True)])
    adapter = EnvAdapter(make_game=_some_missing)
    with pytest.raises(UserError, match=r"none of the 1 games could be read.*does not exist"):
        program.analyze([path], tmp_path / "out", adapter_for=lambda name, folder: adapter)
    assert list((tmp_path / "out").iterdir()) == []


def test_two_workers_same_bytes(source, tmp_path, ray_session):
    ray_session_pickles_toys()
    analyze(source, tmp_path / "one")
    analyze(source, tmp_path / "two", workers=2)
    assert output_bytes(tmp_path / "one") == output_bytes(tmp_path / "two")


def ray_session_pickles_toys() -> None:
    """Ray workers cannot import test modules: send what is defined in them."""
    import ray

    ray.cloudpickle.register_pickle_by_value(toy_credit_game)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def _dies_once(folder: Path, job: int) -> int:
    marker = folder / f"{job}"
    if job % 3 == 0 and not marker.exists():
        marker.touch()
        os._exit(1)
    return job * job


def _dies_always(job: int) -> int:
    if job == 2:
        os._exit(1)
    return job


def test_a_dead_worker_costs_only_its_current_job(tmp_path, ray_session):
    ray_session_pickles_toys()
    results = dict(run_jobs(range(8), partial(partial, _dies_once, tmp_path), workers=2))
    assert results == {job: job * job for job in range(8)}


def _logs_and_dies_once(folder: Path, job: int) -> int:
    """Every run of a job leaves a line; job 150 and job 151 kill their worker the first time."""
    with (folder / f"runs-{os.getpid()}").open("a") as log:
        log.write(f"{job}\n")
    marker = folder / f"died-{job}"
    if job in (150, 151) and not marker.exists():
        marker.touch()
        os._exit(1)
    return job * job


def test_a_death_costs_only_the_current_one_of_many_short_jobs(tmp_path, ray_session):
    """Short jobs are sent in bundles; those of a bundle that were done are not done again."""
    ray_session_pickles_toys()
    results = dict(run_jobs(range(300), partial(partial, _logs_and_dies_once, tmp_path), workers=2))
    assert results == {job: job * job for job in range(300)}
    lines = [line for path in tmp_path.glob("runs-*") for line in path.read_text().split()]
    assert Counter(map(int, lines)) == {**dict.fromkeys(range(300), 1), 150: 2, 151: 2}


def _raises(job: int) -> int:
    raise UserError(f"job {job} has no game")


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_job_arrives_as_it_is(workers, ray_session):
    ray_session_pickles_toys()
    with pytest.raises(UserError) as caught:
        list(run_jobs([7, 7], partial(partial, _raises), workers=workers))
    assert str(caught.value) == "job 7 has no game"


def test_a_job_that_always_kills_its_worker_is_named(ray_session):
    ray_session_pickles_toys()
    with pytest.raises(WorkerLostError, match="job 2"):
        list(run_jobs(range(4), partial(partial, _dies_always), workers=2, retries=1, describe="job {}".format))


@pytest.mark.parametrize("name", ["analyze", "collect", "report", "importers"])
def test_help_needs_no_heavy_package(name):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['x', '--help']\n"
        "try:\n"
        f"    runpy.run_module('agent_system.step_discriminator.trajectory_analyzer.{name}', run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code\n"
        "heavy = {'torch', 'ray', 'alfworld', 'textworld', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
