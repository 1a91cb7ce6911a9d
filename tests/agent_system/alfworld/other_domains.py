# SPDX-License-Identifier: Apache-2.0
"""Game files of other domains than the known release, for the interpreter."""

from __future__ import annotations

import json
from pathlib import Path

# Subtypes, quantifiers, derived facts over two layers, conditional effects, and two actions with one command.
LAMPS_DOMAIN = """
(define (domain lamps)
  (:requirements :adl :typing :derived-predicates)
  (:types thing place agent - object box cup - thing)
  (:predicates (at ?a - agent ?p - place) (in ?t - thing ?p - place) (holding ?a - agent ?t - thing)
    (lit ?p - place) (wired ?p ?q - place) (bright ?p - place) (gloomy ?p - place) (heard ?a - agent)
    (worn ?p - place) (dusty ?p - place) (broken ?p - place))
  (:derived (bright ?p - place) (exists (?q - place) (and (wired ?q ?p) (lit ?q))))
  (:derived (bright ?p - place) (exists (?q - place) (and (wired ?q ?p) (bright ?q))))
  (:derived (gloomy ?p - place) (and (not (bright ?p)) (not (lit ?p))))
  (:action go :parameters (?a - agent ?p ?q - place)
    :precondition (and (at ?a ?p) (not (= ?p ?q)) (or (lit ?p) (not (broken ?q))))
    :effect (and (not (at ?a ?p)) (at ?a ?q)))
  (:action flip :parameters (?a - agent ?p - place) :precondition (at ?a ?p)
    :effect (and (when (lit ?p) (not (lit ?p))) (when (not (lit ?p)) (lit ?p))))
  (:action darken :parameters (?a - agent) :precondition (exists (?p - place) (bright ?p))
    :effect (forall (?p - place) (when (lit ?p) (not (lit ?p)))))
  (:action take :parameters (?a - agent ?t - thing ?p - place)
    :precondition (and (at ?a ?p) (in ?t ?p) (forall (?o - thing) (not (holding ?a ?o))))
    :effect (and (not (in ?t ?p)) (holding ?a ?t)))
  (:action drop :parameters (?a - agent ?t - thing ?p - place)
    :precondition (and (at ?a ?p) (holding ?a ?t)) :effect (and (in ?t ?p) (not (holding ?a ?t))))
  (:action shine :parameters (?a - agent ?p - place) :precondition (and (at ?a ?p) (lit ?p))
    :effect (and (worn ?p)))
  (:action rub :parameters (?a - agent ?p - place) :precondition (and (at ?a ?p) (not (dusty ?p)))
    :effect (and (dusty ?p) (not (worn ?p))))
  (:action shout :parameters (?a - agent) :precondition (exists (?p - place) (gloomy ?p)) :effect (heard ?a))
  (:action look :parameters (?a - agent ?p - place) :precondition (at ?a ?p) :effect (heard ?a)))
"""
LAMPS_PROBLEM = """
(define (problem one) (:domain lamps)
  (:objects me - agent hall_bar_1 hall_bar_2 cellar_bar__minus_1_dot_5 shed - place
    box_bar_1 box_bar_2 - box cup_bar_1 - cup)
  (:init (at me hall_bar_1) (in box_bar_1 hall_bar_1) (in cup_bar_1 hall_bar_1) (in box_bar_2 hall_bar_2)
    (lit hall_bar_2) (wired hall_bar_1 hall_bar_2) (wired hall_bar_2 cellar_bar__minus_1_dot_5) (wired shed shed)
    (broken shed))
  (:goal (and (exists (?t - box) (and (holding me ?t))) (forall (?p - place) (lit ?p)))))
"""
LAMPS_GRAMMAR = '''
grammar :: """
{
  "intro": [{"rhs": "Lamps.\\n\\n#look.feedback#\\n\\n#task#"}],
  "task": [{"rhs": "Your task is to: light everything."}],
  "look.feedback": [
    {"condition": "at(a:agent, p:place) & lit(p:place)", "rhs": "It is light. #things# #dark#"},
    {"rhs": "It is dark. #dark#"}],
  "things": [{"condition": "at(a:agent, p:place) & in(t:thing, p:place)",
     "rhs": "You see [{#overview(t)# | at(a:agent, p:place) & in(t:thing, p:place)}] and #boxes#."},
     {"rhs": "You see no thing."}],
  "boxes": [{"rhs": "[{b.name | in(b:box, p:place)}]"}],
  "dark": [{"condition": "not_lit(p:place)", "rhs": "Went dark: [{p.name | not_lit(p:place)}]."},
     {"condition": "bright(p:place)", "rhs": "Bright at first: [{p.indefinite + ' ' + p.name | bright(p:place)}]."},
     {"rhs": "Nothing went dark."}],
  "overview(t)": [{"rhs": "{t.indefinite} {t.name or t.id}"}],
  "list_empty": [{"rhs": "nothing"}],
  "list_separator": [{"condition": "lit(p:place)", "rhs": ", "}, {"rhs": " / "}],
  "list_last_separator": [{"rhs": ", and "}],
  "done": [{"rhs": "Done. #look.feedback#"}],
  "lamp": [{"condition": "lit(p:place)", "rhs": "The lamp in the {p.name} says {'on' if p.id == 'shed' else 'lit'}."},
     {"rhs": "The lamp in the {p.name} is out."}],
  "worn": [{"condition": "worn(p:place) & dusty(p:place)", "rhs": "Worn and dusty."},
     {"condition": "worn(p:place)", "rhs": "Worn."}, {"condition": "not_worn(p:place)", "rhs": "As new."},
     {"rhs": "Dusty."}]
}
""";
action go { template :: "go to {q}"; feedback :: "#done#"; }
action flip { template :: "flip the lamp of [{q.name | at(a:agent, p:place) & at(a:agent, q:place)}]{p}";
  feedback :: "#lamp#"; }
action darken { template :: "darken"; feedback :: "#done#"; }
action take { template :: "take {t} from {p}"; feedback :: "You take {t}."; }
action drop { template :: "drop {t}"; feedback :: "You drop {t.definite + ' ' + t.name} in {p}. #things#"; }
action shine { template :: "use {p}"; feedback :: "#worn#"; }
action rub { template :: "use {p}"; feedback :: "#worn#"; }
action shout { template :: "shout"; feedback :: "You shout loud; nobody hears."; }
action look { template :: "look"; feedback :: "#look.feedback#";
  grammar :: """
    {
      # a comment
      "unused": [{"rhs": "x"}]
    }
  """;
}
'''


def write_game(folder: Path, domain: str, grammar: str, problem: str) -> Path:
    """A game file in a folder of its own."""
    folder.mkdir(parents=True)
    path = folder / "game.tw-pddl"
    data = {"pddl_domain": domain, "grammar": grammar, "pddl_problem": problem, "solvable": True, "walkthrough": []}
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def lamps_game(folder: Path) -> Path:
    """A game that shares nothing with the known release."""
    return write_game(folder, LAMPS_DOMAIN, LAMPS_GRAMMAR, LAMPS_PROBLEM)


def altered_game(source: Path, folder: Path) -> Path:
    """A game of the known release with an older verb, another opening text, lamps that can be off, one more effect."""
    data = json.loads(source.read_text(encoding="utf-8"))
    domain = data["pddl_domain"].replace("(checked ?l)\n", "(checked ?l) (examined ?l)\n", 1)
    grammar = data["grammar"].replace("move {o} to {r}", "put {o} in/on {r}")
    grammar = grammar.replace("You open the {r.name}.", "You pull the {r.name} open.")
    grammar = grammar.replace(
        '"condition": "toggleable(o:object) & istoggled(o:object)"', '"condition": "ison(o:object)"'
    )
    assert grammar != data["grammar"] and domain != data["pddl_domain"]
    return write_game(folder / source.parent.parent.name / "trial", domain, grammar, data["pddl_problem"])
