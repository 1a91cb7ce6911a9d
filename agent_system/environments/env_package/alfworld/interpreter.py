# SPDX-License-Identifier: Apache-2.0
"""Runs game files of any domain and grammar: the stock engine's rules over a translated problem, without its library.

What the stock engine keeps twice is kept twice here, because texts show the difference: the true state, and its
record of facts, which after an action lists every effect as if its condition had held, and keeps negations. Commands
are judged by the state, texts are made from the record.
"""

from __future__ import annotations

from hashlib import blake2b

from agent_system.environments.env_package.alfworld.interpreted import InterpretedGame, InterpreterState
from agent_system.environments.env_package.alfworld.textgen import Entity, GrammarError, Scope, Variable
from verl.utils.errors import UserError

__all__ = ["Interpreter"]

_NOTHING = "Nothing happens."


class Interpreter:
    """The current state of one game. `game` is shared and never changed.

    Raises:
        UserError: the grammar lacks what the first texts need; `path` names the file in it.
    """

    def __init__(self, game: InterpretedGame, path: str) -> None:
        self._game = game
        self._path = path
        self._state: InterpreterState = game.start
        self._refresh()

    # -- the interface, as the simulator's ----------------------------------------------------------------------

    def reset(self) -> str:
        """Go back to the start; returns the opening text."""
        self.restore(self._game.start)
        return self._derive("#intro#", Scope({}, {}))

    def step(self, command: str) -> str:
        """Apply a command and return the feedback; anything not admissible changes nothing."""
        number = self._by_command.get(command.strip())
        if number is None:
            return _NOTHING
        action = self._game.actions[number]
        before = true = self._state.true
        recorded, denied = self._state.recorded, self._state.denied
        for bit, value, mask, wanted in action.effects:
            if before & mask == wanted:
                true = true & ~bit | value
            recorded = recorded & ~bit | value
            denied = denied & ~bit | (bit ^ value)
        self._state = InterpreterState(self._game.settle(true), recorded, denied)
        text = self._derive(self._game.grammar.feedback[action.name], self._scope(number))
        self._refresh()
        return text

    def commands(self) -> list[str]:
        """The admissible commands, sorted, as a list of the caller's own."""
        return self._commands.copy()

    def state(self) -> InterpreterState:
        """The current state; immutable, picklable."""
        return self._state

    def restore(self, state: InterpreterState) -> None:
        """Continue from a state of the same game."""
        self._state = InterpreterState(*state)
        self._refresh()

    def state_id(self) -> tuple[int, int]:
        """Identifies the same facts as `state_key` does, among states of this game only."""
        return self._state.true & self._game.read, self._state.recorded & self._game.drifting

    def state_key(self) -> str:
        """Hash of the game and of every fact that a later command, the goal or a text can depend on; negations in the
        record, which only colour texts, are left out."""
        facts = f"{self._game.key}{self.state_id()}"
        return blake2b(facts.encode("ascii"), digest_size=16).hexdigest()

    # -- facts, as the grammar reads them -----------------------------------------------------------------------

    def matching(self, predicate: str, types: tuple[str, ...]) -> list[tuple[Variable, ...]]:
        """Facts of the record by predicate and argument types; see `textgen.Facts`."""
        game = self._game
        record = self._state.denied if predicate.startswith("not_") else self._state.recorded
        found: list[tuple[Variable, ...]] = []
        for signature in game.signatures(predicate, types):
            bits = record & game.fluent.get(signature, 0)
            while bits:
                lowest = bits & -bits
                found.append(game.atoms[lowest.bit_length() - 1])
                bits ^= lowest
            if not predicate.startswith("not_"):
                found += game.static.get(signature, ())
        return found

    def holds(self, predicate: str, types: tuple[str, ...], arguments: tuple[Variable, ...]) -> bool:
        """Whether `matching` has exactly these arguments."""
        game = self._game
        plain = predicate.removeprefix("not_")
        signature = (plain, tuple(kind for _, kind in arguments))
        if signature not in game.signatures(predicate, types):
            return False
        number = game.number_of.get((plain, arguments))
        if number is None:
            return plain == predicate and arguments in game.static.get(signature, ())
        record = self._state.recorded if plain == predicate else self._state.denied
        return bool(record >> number & 1)

    def entity(self, name: str) -> Entity:
        """What is known of an object."""
        return self._game.entities[name]

    # -- commands -----------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Work out the applicable actions, their commands (the first of equal ones counts) and whether it is won."""
        game, true = self._game, self._state.true
        seen: set[tuple[str, tuple[str, ...]]] = set()
        self._by_command: dict[str, int] = {}
        applicable: list[int] = []
        for bit, tests in game.tests:
            if true & bit == bit:
                applicable += [number for number, mask, wanted in tests if true & mask == wanted]
        # The stock engine takes the first of the actions with one command, in its own order.
        for number in sorted(applicable):
            action = game.actions[number]
            if (action.name, action.arguments) not in seen:
                seen.add((action.name, action.arguments))
                self._by_command.setdefault(self._command(number), number)
        self._commands = sorted(self._by_command)
        mask, wanted = game.goal
        self.won = true & mask == wanted

    def _command(self, number: int) -> str:
        game = self._game
        command = game.commands.get(number)
        if command is None:
            name = game.actions[number].name
            command = self._derive(game.grammar.templates[name], self._scope(number))
            try:
                constant = game.is_constant(name)
            except GrammarError as error:
                raise self._failure(error) from error
            if constant:
                game.commands[number] = command
        return command

    def _scope(self, number: int) -> Scope:
        action = self._game.actions[number]
        names: dict[str, Entity] = {}
        bound: dict[Variable, Variable] = {}
        for (placeholder, kind), argument in zip(self._game.parameters[action.name], action.arguments):
            names[placeholder] = self._entity_of(argument)
            # The stock engine gives an argument the parameter's type, not its own.
            bound[placeholder, kind] = (argument, kind)
        return Scope(names, bound)

    def _entity_of(self, name: str) -> Entity:
        entity = self._game.entities.get(name)
        if entity is None:
            raise self._failure(f"no fact names its object {name} at the start")
        return entity

    def _derive(self, text: str, scope: Scope) -> str:
        try:
            return self._game.grammar.derive(text, self, scope)
        except GrammarError as error:
            raise self._failure(error) from error

    def _failure(self, reason: object) -> UserError:
        return UserError(f"The game file {self._path} cannot be run: {reason}; download or generate the data again.")
