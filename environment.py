"""The world: K independent copies of one ALFWorld game, served by worker processes to one asyncio loop.

What it owns: reading and compiling `game.tw-pddl`, the state of every branch, and the worker processes.

A game is compiled once, from PDDL and text grammar to plain tables: ground operators, the goal, the facts that texts
ask about, and the texts as small trees. fast_downward's translator grounds the PDDL, textworld parses the grammar,
alfworld names the objects; only what runs at every step is written here. Nothing of a game file is ever evaluated as
code, so a game from anyone needs no trust. A branch is one integer, the bit set of its facts, so a clone costs nothing.

The invariant: texts, the order of everything in them, admissible commands, score, won and done are byte for byte those
of stock alfworld/TextWorld, whatever process, order or worker a branch runs in. Stock iterates over sorted facts, so
its texts do not depend on PYTHONHASHSEED. A finished game stays as it is, as in TextWorld's batch environments.
`tests/test_world_texts.py` holds both against each other, `tests/bench_environment.py` measures them.

    python environment.py --data-root datasets/alfworld    # compile every game below that folder ahead of a run
    python environment.py --play random                    # play one in the terminal
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import functools
import gc
import hashlib
import importlib.metadata
import io
import itertools
import json
import math
import os
import pickle
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
import types
import zlib
from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

from data import (
    GAME_FILE, GET_DATA, OLDER_RELEASE, SPLITS, TASK_FILE, TASK_PREFIX, DataError, Language, NotUnderstood,
    how_to_get_games, is_older_release, json_object, parse_language, read_file, read_game, save, saved, shown,
    split_task, told_by_kind, write_any_text,
)  # fmt: skip

CACHE_NAME = ".game.compiled"  # beside each game.tw-pddl
# A game with more than this is refused before much is done with it; behind each number the most of any official game.
LARGEST_TEXTS = {"pddl_domain": 200_000, "grammar": 200_000, "pddl_problem": 1_000_000}  # 17,200; 13,111; 104,757
MOST_OBJECTS = 5_000  # 363
MOST_LITERALS = 1_000  # of a condition (the goal, for one) with its alternatives written out; 14
MOST_PARAMETERS = 30  # that an action, an effect or a goal binds; 6
MOST_ATOMS = 500_000  # that grounding meets, each as often as it does; 70,144
MOST_PAIRS = 10_000_000  # of effects of one ground action, over all of them; 59,071
MOST_SUBTYPES = 10_000  # combinations in which the arguments of a fact that texts ask for may be typed; 49
CACHE_FORMAT = 2  # part of the cache key: raise it whenever the tables or the way they are made change
LARGEST_WORLD = 64 * 2**20  # bytes of JSON; official games have up to 0.6 MB
MOST_MEMORY = 4 * 2**30  # bytes for a worker's data; official games need 0.2 GB while they are compiled
PACKAGES = ("alfworld", "textworld", "fast-downward-textworld")  # their versions are part of the cache key


class GameError(DataError):
    """A game file that cannot be played: missing, broken, of an older release, or in a language not known here."""


class EnvironmentFault(RuntimeError):
    """Workers were lost more often than the settings allow, one raised, or a replay did not repeat the past."""


@dataclass(frozen=True)
class WorldState:
    """What one branch shows at its start or after a command."""

    observation: str  # at the start stock's whole first text, the task at its end
    admissible: tuple[str, ...]  # sorted, without repeats; holds `help`, `inventory` and `look` too
    score: int  # 1 once won, else 0
    won: bool
    done: bool
    state_id: str  # digest of the branch's facts: equal in all branches, workers and replays of a game


@dataclass(frozen=True)
class EnvironmentSettings:
    """Processes and limits of a `WorldPool`."""

    workers: int = field(default=1, metadata={"help": "processes that step branches; each serves many"})
    compilers: int = field(default=2, metadata={"help": "processes that compile games ahead of their use"})
    step_timeout_seconds: float = field(
        default=30.0, metadata={"help": "a worker silent for longer is killed and its branches are replayed elsewhere"}
    )
    compile_timeout_seconds: float = field(default=120.0, metadata={"help": "the same for a compiler"})
    max_faults: int = field(
        default=10, metadata={"help": "workers that may be lost (killed, hung, died) before the run stops with the reason"}
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            numeric = type(value) is int or (each.type == "float" and type(value) is float)
            if not numeric or value < 0 or (value == 0 and each.name != "max_faults"):
                raise ValueError(f"--{each.name.replace('_', '-')} is {value!r}; it must be a positive {each.type}")


# -------------------------------------------------------------------------------------------------- game files


def _read_game(game_file: Path) -> tuple[dict[str, str], str]:
    """The game's texts and the cache key: a hash of the file's bytes, the libraries' versions and our format."""
    try:
        texts, content = read_game(game_file)
    except DataError as error:
        raise GameError(str(error)) from None
    if is_older_release(texts["grammar"]):
        raise GameError(f"{game_file}: {OLDER_RELEASE}")
    return texts, hashlib.sha256(content + _versions()).hexdigest()


@functools.cache
def _versions() -> bytes:
    return repr([CACHE_FORMAT, *(importlib.metadata.version(name) for name in PACKAGES)]).encode()


def compile_game(game_file: Path, ground: bool = True) -> bytes:
    """Compile one game, or read it back from its cache. Returns JSON under zlib, the input of `World`.

    Without `ground` a game that has no cache is only checked, as far as that takes milliseconds: b"" is returned.
    Raises GameError, in one line that names the file and the remedy.
    """
    texts, key = _read_game(game_file)
    if (cached := saved(game_file.parent / CACHE_NAME, key)) is not None:
        return cached
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):  # translators talk
            compiled = _compile(texts, ground)
    except (Exception, SystemExit) as error:  # the libraries' parsers answer bad text with whatever they trip over
        missing = isinstance(error.__cause__, StopIteration)  # where fast_downward's parsers wanted to read on
        reason = "a part of the PDDL is missing" if missing else " ".join(str(error).split())[:300]
        known = isinstance(error, NotUnderstood)
        what = f"not understood: {reason}" if known else f"cannot be compiled ({type(error).__name__}: {reason})"
        raise GameError(f"{game_file}: {what}; {GET_DATA}") from error
    if ground:
        save(game_file.parent / CACHE_NAME, key, compiled)
    return compiled


def _compile(texts: dict[str, str], ground: bool) -> bytes:
    for name, most in LARGEST_TEXTS.items():
        if len(texts[name]) > most:
            raise NotUnderstood(f"{name} has more than {most:,} characters")
    template, task = split_task(texts["grammar"])
    language = parse_language(template)
    problem = _parse_problem(texts["pddl_domain"], texts["pddl_problem"])
    said = _action_texts(problem, language)
    if not ground:
        return b""
    game = {**_ground(problem, said, language), "task": task, "rules": language.rules}
    compiled = zlib.compress(json.dumps(game, separators=(",", ":")).encode(), 1)
    World(compiled).start()  # a text that cannot be said shows here, not in an episode
    return compiled


# ---------------------------------------------------------------------------------------------------- grounding
#
# A text is a list of nodes, each a JSON list:
#   ["text", string]           itself
#   ["attr", variable, name]   the entity's "name" or "id"
#   ["either", node, node]     the first that is not empty
#   ["rule", name]             the first alternative of that rule whose condition has a match
#   ["each", nodes, query]     the nodes once for every match of the query
#   ["list", nodes, query]     the same with the separators of the rules list_empty, list_separator, list_last_separator
# A query is a list of [predicate, variables, types]; it is matched from left to right.


def _action_texts(task, language: Language) -> dict[str, tuple[list, list]]:
    """The texts of the domain's actions, once each is known to have some that can always be said."""
    for action in task.actions:
        texts = language.actions.get(action.name, f"the grammar has no action {action.name!r}")
        if isinstance(texts, str):
            raise NotUnderstood(texts)
        parameters = action.parameters[: action.num_external_parameters]
        for parameter in parameters:
            if language.types.get(parameter.name[1:], parameter.type_name) != parameter.type_name:
                raise NotUnderstood(f"{parameter.name} has another type in the texts of {action.name!r}")
        bound = frozenset(parameter.name[1:] for parameter in parameters)
        unknown = sorted({variable for variable, free in _named(texts[1], bound, language.rules, set()) if free})
        if unknown:
            raise NotUnderstood(f"the feedback of {action.name!r} names {unknown}, which nothing stands for")
    return {action.name: language.actions[action.name] for action in task.actions}


def _parse_problem(domain: str, problem: str):
    """fast_downward's task, parsed and normalised as its own `pddl2sas` does."""
    arguments, sys.argv = sys.argv, ["translate.py", "domain", "task"]  # its `options` reads the command line
    try:
        from fast_downward.translate import normalize
        from fast_downward.translate.pddl_parser import lisp_parser, parsing_functions
    finally:
        sys.argv = arguments

    parse = lisp_parser.parse_nested_list
    sections = parse(problem.split("\n"))
    for name in (":domain", ":init", ":goal"):
        if [name] not in [section[:1] for section in sections]:
            raise NotUnderstood(f"the problem has no {name}")
    task = parsing_functions.parse_task(parse(domain.split("\n")), sections)
    if len(task.objects) > MOST_OBJECTS:
        raise NotUnderstood(f"more than {MOST_OBJECTS:,} objects")
    for proxy in normalize.all_conditions(task):
        if _written_out(proxy.condition)[1] > MOST_LITERALS:
            whose = "the goal" if proxy.owner is task else "a condition of the domain"
            raise NotUnderstood(f"{whose} has more than {MOST_LITERALS:,} literals with its alternatives written out")
    normalize.normalize(task)
    binders = [*task.actions, *task.axioms, *(effect for action in task.actions for effect in action.effects)]
    if any(len(binder.parameters) > MOST_PARAMETERS for binder in binders):
        raise NotUnderstood(f"an action or a condition binds more than {MOST_PARAMETERS} variables")
    return task


def _written_out(condition) -> tuple[int, int]:
    """How many alternatives a condition becomes when its disjunctions are pulled to the front; the literals in them."""
    from fast_downward.translate import pddl

    if isinstance(condition, pddl.UniversalCondition):  # the translator replaces it by what makes it false
        return _written_out(condition.parts[0].negate())
    sizes = [_written_out(part) for part in condition.parts]
    if isinstance(condition, pddl.Conjunction):
        alternatives = math.prod(count for count, _ in sizes)
        return alternatives, sum(alternatives // count * literals for count, literals in sizes)
    return (sum(count for count, _ in sizes), sum(literals for _, literals in sizes)) if sizes else (1, 1)


def _explore(task) -> tuple[list, list, set]:
    """Ground actions and axioms, and the atoms that change: fast_downward's `instantiate.explore`, with bounds."""
    from fast_downward.translate import build_model, instantiate, pddl, pddl_to_prolog

    program = pddl_to_prolog.translate(task)
    unifier = build_model.Unifier(build_model.convert_rules(program))
    queue = build_model.Queue(sorted(fact.atom for fact in program.facts))

    def push(predicate, arguments: list[str]) -> None:
        if queue.num_pushes >= MOST_ATOMS:
            raise NotUnderstood(f"grounding meets more than {MOST_ATOMS:,} atoms")
        queue.push(predicate, arguments)

    while queue:
        atom = queue.pop()
        for rule, place in unifier.unify(atom):
            rule.update_index(atom, place)
            rule.fire(atom, place, push)
    things = instantiate.get_objects_by_type(task.objects, task.types)
    effects = {
        action: sum(math.prod(len(things[each.type_name]) for each in effect.parameters) for effect in action.effects)
        for action in task.actions
    }
    found = collections.Counter(atom.predicate for atom in queue.queue if isinstance(atom.predicate, pddl.Action))
    if sum(count * effects[action] ** 2 for action, count in found.items()) > MOST_PAIRS:  # each is held against each
        raise NotUnderstood(f"the ground actions have more than {MOST_PAIRS:,} pairs of effects")
    reachable, changing, actions, axioms, _ = instantiate.instantiate(task, queue.queue)
    if not reachable:
        raise NotUnderstood("the goal cannot be reached")
    return actions, axioms, changing


def _ground(task, said: dict[str, tuple[list, list]], language: Language) -> dict:
    """Ground the task with fast_downward and lay it out as tables.

    The translator's later step to finite-domain variables is left out: with the options TextWorld gives it every
    variable is one atom, so what the step does to operators comes down to `_effects`.
    """
    initial = _initial_atoms(task)
    ground_actions, axioms, changing = _explore(task)
    goal = _goal(task, axioms, changing)
    parameters = {action.name: action.parameters[: action.num_external_parameters] for action in task.actions}
    operators = _operators(ground_actions, parameters)
    bits = _bits(goal, operators, {predicate for predicate, _ in language.queries})

    def numbers(atoms: Iterable) -> list[int]:
        return sorted(bits[atom] for atom in atoms if atom in bits)

    type_of = {thing.name: thing.type_name for thing in task.objects}
    names = _names(sorted({argument for _, arguments in initial for argument in arguments}))
    # In stock an argument has the type of its parameter, and facts know things by their own. Where the two differ, what
    # the texts call by the variable is in no fact: it gets a number of its own, as if it were another thing.
    numbered = {(entity, type_of[entity]): number for number, entity in enumerate(names)}
    started = collections.Counter(predicate for predicate, _ in initial)
    kinds = collections.Counter(atom[0] for atom in set().union(*(operator.needs for operator in operators)))
    actions = sorted(said)
    meanings: dict[str, list] = {}
    rows = []
    for operator in operators:
        command = _command(said[operator.action][0], operator, names, type_of, initial)
        meanings.setdefault(command, []).append(operator)
        # An operator is filed under one atom it needs, of a predicate that is true of few things at a time (where
        # the agent is, what it holds): a step opens only the files of true atoms.
        watch = min(operator.needs, key=lambda atom: (max(1, started[atom[0]]), -kinds[atom[0]], atom), default=None)
        row = [numbers(operator.needs - {watch}), numbers(operator.forbids), *_changes(operator, numbers)]
        arguments = [numbered.setdefault(typed, len(numbered)) for typed in operator.binding.values()]
        rows.append((bits.get(watch, -1), command, [*row, actions.index(operator.action), arguments]))
    words = {name: dict(_named(feedback, frozenset(), language.rules, set())) for name, (_, feedback) in said.items()}
    _refuse_ambiguous(meanings, initial, words)
    ranks = {command: rank for rank, command in enumerate(sorted(meanings))}
    files: dict[int, dict[int, list]] = {}
    for watch, command, row in rows:
        files.setdefault(watch, {}).setdefault(ranks[command], []).append(row)
    return {
        "entities": {"name": [names[entity] for entity, _ in numbered], "id": [entity for entity, _ in numbered]},
        "commands": list(ranks),
        "actions": [[[parameter.name[1:] for parameter in parameters[name]], said[name][1]] for name in actions],
        "files": [[watch, list(by_rank.items())] for watch, by_rank in files.items()],
        "start": numbers(initial),
        "goal": [[numbers(needs), numbers(forbids)] for needs, forbids in goal],
        "facts": _fact_tables(task, language, initial, bits, numbered),
    }


def _key(literal) -> tuple[str, tuple[str, ...]]:
    return literal.predicate, literal.args


def _initial_atoms(task) -> set[tuple[str, tuple[str, ...]]]:
    """The true atoms at the start. Numbers (costs, distances) say nothing in a text and are left out, as in stock."""
    from fast_downward.translate import pddl

    atoms = set()
    for fact in task.init:
        if isinstance(fact, pddl.Assign):
            if fact.fluent.symbol != "total-cost" and not str(fact.expression.value).isdigit():
                raise NotUnderstood(f"the initial value {fact.expression.value} of {fact.fluent.symbol!r}")
        elif fact.predicate != "=":
            atoms.add(_key(fact))
    return atoms


@dataclass(frozen=True)
class _Operator:
    """A ground action. An atom is (predicate, arguments); an effect (atom, new value, condition)."""

    action: str
    binding: dict[str, tuple[str, str]]  # variable -> (argument, the parameter's type)
    needs: set[tuple]
    forbids: set[tuple]
    effects: list[tuple]


def _operators(ground_actions: list, parameters: dict[str, list]) -> list[_Operator]:
    """The actions that can be done and change something."""
    operators = []
    for action in ground_actions:
        name, *arguments = action.name.strip("()").split()
        needs = {_key(literal) for literal in action.precondition if not literal.negated}
        forbids = {_key(literal) for literal in action.precondition if literal.negated}
        effects = _effects(action, needs, forbids)
        if effects and not needs & forbids:
            given = zip(parameters[name], arguments, strict=True)
            binding = {parameter.name[1:]: (argument, parameter.type_name) for parameter, argument in given}
            operators.append(_Operator(name, binding, needs, forbids, effects))
    return operators


def _bits(goal: list, operators: list[_Operator], asked: set[str]) -> dict[tuple, int]:
    """Bits for the atoms that anything reads; what is only written (`checked`) leaves no trace in a state."""
    bits: dict[tuple, int] = {}
    for needs, forbids in itertools.chain(goal, ((operator.needs, operator.forbids) for operator in operators)):
        for atom in sorted(needs | forbids):
            bits.setdefault(atom, len(bits))
    for operator in operators:
        for atom, value, condition in operator.effects:
            for part in sorted(condition):
                bits.setdefault(part[:2], len(bits))
            for predicate in {atom[0], f"not_{atom[0]}"} & asked:
                if condition:
                    raise NotUnderstood(f"texts ask for {predicate!r}, which has a conditional effect")
                bits.setdefault((predicate, atom[1]), len(bits))
    return bits


def _effects(action, needs: set, forbids: set) -> list[tuple]:
    """What a ground action changes, as (atom, new value, condition); empty if nothing: stock drops such actions.

    A condition is a set of (predicate, arguments, value). As in the translator, an effect that its precondition
    already states is no effect, one against its precondition never happens, and an added atom is not deleted.
    """
    effects = []
    always_added = {_key(atom) for condition, atom in action.add_effects if not condition}
    for value, pairs in ((True, action.add_effects), (False, action.del_effects)):
        for condition, literal in pairs:
            atom = _key(literal)
            if atom in (needs if value else forbids | always_added):
                continue
            holds = {(*_key(part), not part.negated) for part in condition}
            if any(part[:2] in (forbids if part[2] else needs) for part in holds):
                continue
            effects.append((atom, value, {part for part in holds if part[:2] not in needs | forbids}))
    return effects


def _goal(task, axioms: list, changing: set) -> list[tuple[set, set]]:
    """The goal as alternatives (atoms that must be true, atoms that must be false).

    An axiom the goal names stands for the alternatives of its condition; axioms elsewhere are not known here. Of other
    goals stock keeps what an action can change, also where what it drops is never met, and cannot load what is empty.
    """
    from fast_downward.translate import pddl

    derived = {axiom.name for axiom in task.axioms}
    literals = task.goal.parts if isinstance(task.goal, pddl.Conjunction) else [task.goal]
    if len(literals) == 1 and literals[0].predicate in derived and not literals[0].negated:
        conditions = [axiom.condition for axiom in axioms if axiom.effect == literals[0]]
    else:
        conditions = [[literal for literal in literals if pddl.Atom(*_key(literal)) in changing]]
        if not conditions[0] or {literal.negate() for literal in conditions[0]} & set(conditions[0]):
            raise NotUnderstood("a goal that is always or never met")
    if any(literal.predicate in derived for condition in conditions for literal in condition):
        raise NotUnderstood("a goal with nested or negated conditions")
    if len(derived) > 1 or any(_key(axiom.effect) != _key(literals[0]) for axiom in axioms):
        raise NotUnderstood("derived predicates beside the goal")
    return [
        ({_key(part) for part in condition if not part.negated}, {_key(part) for part in condition if part.negated})
        for condition in conditions
    ]


def _changes(operator: _Operator, numbers) -> list:
    """[bits set, bits cleared, [[bits needed, bits forbidden, bits set, bits cleared] for every condition]]."""
    changes: dict[tuple, tuple[set, set]] = {(): (set(), set())}
    for atom, value, condition in operator.effects:
        change = changes.setdefault(tuple(sorted(condition)), (set(), set()))
        change[0 if value else 1].add(atom)
        change[1 if value else 0].add((f"not_{atom[0]}", atom[1]))
    plain = changes.pop(())
    conditional = [
        [numbers(part[:2] for part in condition if part[2]), numbers(part[:2] for part in condition if not part[2])]
        + [numbers(change[0]), numbers(change[1])]
        for condition, change in sorted(changes.items())
    ]
    return [numbers(plain[0]), numbers(plain[1]), conditional]


def _names(entities: list[str]) -> dict[str, str]:
    """The names alfworld gives to all entities that occur in a fact ("mug 2")."""
    from alfworld.agents.utils.misc import Demangler

    demangler = Demangler(game_infos={entity: types.SimpleNamespace(id=entity) for entity in entities})
    return {entity: demangler.demangle_alfred_name(entity) for entity in entities}


def _command(nodes: list, operator: _Operator, names: dict[str, str], type_of: dict[str, str], initial: set) -> str:
    """A command's text. The query in stock's "go to [{r.name | ...}]" may only repeat what the operator needs."""
    text = ""
    for kind, *node in nodes:
        if kind == "text":
            text += node[0]
        elif kind == "attr":
            entity = operator.binding[node[0]][0]
            text += names[entity] if node[1] == "name" else entity
        elif kind == "list":
            for predicate, variables, _ in node[1]:
                typed = [operator.binding.get(variable, ("", "")) for variable in variables]
                atom = (predicate, tuple(entity for entity, type_ in typed if type_of.get(entity) == type_))
                if atom not in initial and atom not in operator.needs:
                    raise NotUnderstood(f"the command of {operator.action!r} depends on {predicate!r}")
            text += _command(node[0], operator, names, type_of, initial)
        else:
            raise NotUnderstood(f"the command of {operator.action!r} depends on the rule {node[0]!r}")
    return text


def _refuse_ambiguous(meanings: dict[str, list], initial: set, words: dict[str, dict]) -> None:
    """Refuse games in which one command could mean different things in one state: stock's pick is its planner's.

    Harmless are operators with the same effects and the same words, and those that need different atoms of a
    predicate which is always true of exactly one thing (where the agent is): whatever adds such an atom deletes the
    one it needed.
    """
    operators = [operator for same in meanings.values() for operator in same]

    def moves_one(predicate: str) -> bool:
        for operator in operators:
            changed = [(atom, value) for atom, value, _ in operator.effects if atom[0] == predicate]
            deleted = [atom for atom, value in changed if not value]
            if changed and (len(changed) != 2 or len(deleted) != 1 or deleted[0] not in operator.needs):
                return False
        return sum(atom[0] == predicate for atom in initial) == 1

    single = {name for name in {atom[0] for operator in operators for atom in operator.needs} if moves_one(name)}
    for command, same in meanings.items():
        outcomes: dict[frozenset, list] = {}
        for operator in same:
            said = sorted(pair for pair in operator.binding.items() if pair[0] in words[operator.action])
            place = frozenset(atom for atom in operator.needs if atom[0] in single)
            outcomes.setdefault(place, []).append((operator.action, said, operator.effects))
        if any(each != same[0] for same in outcomes.values() for each in same):
            raise NotUnderstood(f"the command {command!r} has two meanings in one place")
        if len(outcomes) > 1 and len({len(place) for place in outcomes}) > 1:
            raise NotUnderstood(f"the command {command!r} has two meanings")


def _named(nodes: list, bound: frozenset, rules: dict, seen: set) -> Iterator[tuple[str, bool]]:
    """The variables that a text, with the rules it uses, names anywhere.

    With each comes whether it is shown there without having an entity, if `bound` have one.
    """
    for kind, *node in nodes:
        if kind == "attr":
            yield node[0], node[0] not in bound
        elif kind == "either":
            yield from _named(node, bound, rules, seen)
        elif kind in ("each", "list"):
            asked = frozenset(variable for step in node[1] for variable in step[1])
            yield from ((variable, False) for variable in asked)
            yield from _named(node[0], bound | asked, rules, seen)
        elif kind == "rule" and (node[0], bound) not in seen:
            seen.add((node[0], bound))
            for query, inner in rules[node[0]]:
                yield from ((variable, False) for step in query or [] for variable in step[1])
                yield from _named(inner, bound, rules, seen)


def _fact_tables(task, language: Language, initial: set, bits: dict, numbered: dict) -> list:
    """For every (predicate, types) that texts ask for: its possible facts in stock's order, [arguments, bit or -1].

    Stock goes through the subtypes of the asked types in a fixed order, and through the facts of each sorted by
    their arguments' names and types.
    """
    from textworld.logic import Type, TypeHierarchy

    hierarchy = TypeHierarchy()
    for type_ in task.types:
        with contextlib.suppress(ValueError):  # the domain declares the built-in type `object` again
            hierarchy.add(Type(type_.name, type_.supertype_names))
    type_of = {thing.name: thing.type_name for thing in task.objects}
    by_signature: dict[tuple, list] = {}
    for predicate, arguments in set(initial) | set(bits):
        signature = (predicate, tuple(type_of[argument] for argument in arguments))
        by_signature.setdefault(signature, []).append(arguments)
    tables = []
    for predicate, asked in language.queries:
        if not set(asked) <= {type_.name for type_ in hierarchy}:
            raise NotUnderstood(f"a text asks for {predicate}{asked}, a type the domain lacks")
        wanted = [hierarchy.get(name) for name in asked]
        if math.prod(len(list(type_.subtypes)) for type_ in wanted) > MOST_SUBTYPES:
            raise NotUnderstood(f"a text asks for {predicate}{asked}, which has more than {MOST_SUBTYPES:,} subtypes")
        rows = []
        for subtypes in hierarchy.multi_subtypes(wanted):
            signature = (predicate, tuple(type_.name for type_ in subtypes))
            for arguments in sorted(by_signature.get(signature, ())):
                numbers = [numbered[argument, type_of[argument]] for argument in arguments]
                rows.append([numbers, bits.get((predicate, arguments), -1)])
        tables.append([predicate, list(asked), rows])
    return tables


# ------------------------------------------------------------------------------------------------- playing it

Reply = tuple[str, tuple[str, ...], int, bool, bool, str]  # the fields of WorldState, plain for the way between processes


class _Facts:
    """The possible facts of one (predicate, types) in stock's order, found by the arguments already known."""

    def __init__(self, rows: list) -> None:
        self._rows = [(arguments, 0 if bit < 0 else 1 << bit) for arguments, bit in rows]  # mask 0: always true
        self._indexes: dict[tuple[int, ...], dict[tuple[int, ...], list]] = {}

    def find(self, known: list[int | None]) -> list[tuple[list[int], int]]:
        places = tuple(place for place, entity in enumerate(known) if entity is not None)
        index = self._indexes.get(places)
        if index is None:
            index = self._indexes[places] = {}
            for row in self._rows:
                index.setdefault(tuple(row[0][place] for place in places), []).append(row)
        return index.get(tuple(known[place] for place in places), [])


def _state_id(state: int) -> str:
    return hashlib.blake2b(b"%x" % state, digest_size=6).hexdigest()


class World:
    """A compiled game. It holds no state: a branch is an integer with a bit for every fact, and the last reply."""

    def __init__(self, compiled: bytes) -> None:
        inflated = zlib.decompressobj()
        game = json.loads(inflated.decompress(compiled, LARGEST_WORLD))
        if not inflated.eof:
            raise ValueError(f"a compiled game of more than {LARGEST_WORLD:,} bytes")
        self.task: str = game["task"][len(TASK_PREFIX) :]
        self._entities = game["entities"]
        self._commands = game["commands"]
        self._ranks = {command: rank for rank, command in enumerate(self._commands)}
        self._facts = {(predicate, tuple(asked)): _Facts(rows) for predicate, asked, rows in game["facts"]}
        self._rules = {
            name: [(self._query(query), self._nodes(nodes)) for query, nodes in alternatives]
            for name, alternatives in game["rules"].items()
        }
        self._rules["task"] = [(None, [["text", game["task"]]])]
        self._actions = [(variables, self._nodes(nodes)) for variables, nodes in game["actions"]]
        self._files = {-1: [], **dict(game["files"])}  # as read, a list; when first looked into, its masks are made
        self._watched = _mask(bit for bit in self._files if bit >= 0)
        self._goal = [(_mask(needs), _mask(forbids)) for needs, forbids in game["goal"]]
        self._goal_bits = functools.reduce(int.__or__, (needs | forbids for needs, forbids in self._goal), 0)
        self._start = _mask(game["start"])

    def _query(self, query: list | None) -> list | None:
        return query and [(self._facts[predicate, tuple(asked)], variables) for predicate, variables, asked in query]

    def _nodes(self, nodes: list) -> list:
        """The same nodes with their queries tied to this game's facts."""
        return [
            [node[0], self._nodes(node[1]), self._query(node[2])] if node[0] in ("each", "list") else node
            for node in nodes
        ]

    def start(self) -> tuple[int, Reply]:
        """A new branch: its state and what it shows. As in stock, a game won at its start still goes on."""
        state = self._start
        text = self._text([["rule", "intro"]], {}, state)
        return state, (text, self._admissible(state), 0, self._won(state), False, _state_id(state))

    def step(self, state: int, last: Reply, action: str) -> tuple[int, Reply]:
        """What a branch in `state`, showing `last`, is and shows after a command. A finished game stays as it is."""
        if last[4]:
            return state, last
        row = self._applicable(state, self._ranks.get(action.strip(), -1))
        if row is None:
            return state, ("Nothing happens.", last[1], int(last[3]), last[3], last[3], last[5])
        _, _, on, off, conditional, (variables, nodes), arguments = row
        for needs, forbids, more_on, more_off in conditional:
            if state & needs == needs and not state & forbids:
                on, off = on | more_on, off | more_off
        new = state & ~off | on
        text = self._text(nodes, dict(zip(variables, arguments)), new)
        admissible = last[1] if new == state else self._admissible(new)
        won = self._won(new) if (new ^ state) & self._goal_bits else last[3]
        return new, (text, admissible, int(won), won, won, _state_id(new))

    def _won(self, state: int) -> bool:
        return any(state & needs == needs and not state & forbids for needs, forbids in self._goal)

    def _open_files(self, state: int) -> Iterator[dict[int, list]]:
        """The files whose watched atom is true, and the one of operators without: command rank -> operators."""
        watched = state & self._watched
        bit = -1
        while True:
            file = self._files[bit]
            if isinstance(file, list):
                file = self._files[bit] = {rank: [self._row(row) for row in rows] for rank, rows in file}
            yield file
            if not watched:
                return
            bit = watched.bit_length() - 1
            watched ^= 1 << bit

    def _row(self, row: list) -> tuple:
        needs, forbids, on, off, conditional, action, arguments = row
        masks = [tuple(map(_mask, change)) for change in conditional]
        return _mask(needs), _mask(forbids), _mask(on), _mask(off), masks, self._actions[action], arguments

    def _applicable(self, state: int, rank: int) -> tuple | None:
        rows = (row for file in self._open_files(state) for row in file.get(rank, ()))
        return next((row for row in rows if state & row[0] == row[0] and not state & row[1]), None)

    def _admissible(self, state: int) -> tuple[str, ...]:
        ranks = set()
        for file in self._open_files(state):
            for rank, rows in file.items():
                for row in rows:
                    if state & row[0] == row[0] and not state & row[1]:
                        ranks.add(rank)
                        break
        return tuple([self._commands[rank] for rank in sorted(ranks)])

    def _text(self, nodes: list, binding: dict[str, int], state: int) -> str:
        parts = []
        for kind, *node in nodes:
            if kind == "text":
                parts.append(node[0])
            elif kind == "attr":
                parts.append(self._entities[node[1]][binding[node[0]]])
            elif kind == "either":
                parts.append(self._text(node[:1], binding, state) or self._text(node[1:], binding, state))
            elif kind == "rule":
                parts.append(self._rule(node[0], binding, state))
            else:
                items = [self._text(node[0], match, state) for match in _matches(node[1], 0, binding, state)]
                if kind == "list" and not items:
                    items = [self._rule("list_empty", binding, state)]
                elif kind == "list" and len(items) > 1:
                    comma = self._rule("list_separator", binding, state)
                    items = [comma.join(items[:-1]), self._rule("list_last_separator", binding, state), items[-1]]
                parts += items
        return "".join(parts)

    def _rule(self, name: str, binding: dict[str, int], state: int) -> str:
        for query, nodes in self._rules[name]:
            if not query or next(_matches(query, 0, binding, state), None) is not None:
                return self._text(nodes, binding, state)
        raise AssertionError(f"no alternative of the rule {name!r} applies")


def _mask(bits: Iterable[int]) -> int:
    return functools.reduce(int.__or__, (1 << bit for bit in bits), 0)


def _matches(query: list, depth: int, binding: dict[str, int], state: int) -> Iterator[dict[str, int]]:
    """Every way to bind the query's variables to true facts, in stock's order; no two variables bind one entity."""
    if depth == len(query):
        yield binding
        return
    facts, variables = query[depth]
    for arguments, mask in facts.find([binding.get(variable) for variable in variables]):
        if mask and not state & mask:
            continue
        match = dict(binding)
        for variable, entity in zip(variables, arguments):
            if variable not in match and entity not in match.values():
                match[variable] = entity
            elif match.get(variable) != entity:
                break
        else:
            yield from _matches(query, depth + 1, match, state)


# ------------------------------------------------------------------------------------------------- a worker
#
# A message is a length and a pickled list: requests (method, arguments) one way, replies (kind, value) the other.

_LENGTH = struct.Struct("!Q")


class _Server:
    """What a worker process does: one method a request."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}
        self._branches: dict[int, dict[int, tuple[int, Reply]]] = {}  # group -> branch -> (state, last reply)

    def compile(self, game_file: str, ground: bool) -> bytes:
        try:
            return compile_game(Path(game_file), ground)
        finally:  # free what compiling left in cycles, and set what stays (modules, caches) aside from the next sweep
            gc.collect()
            gc.freeze()

    def open(self, group: int, compiled: bytes, histories: dict[int, list[str]]) -> tuple[str, dict, Reply]:
        """Start a branch for every history and replay it. Returns the task, the branches' last replies, the first."""
        try:
            world = World(compiled)
            start = world.start()
        except Exception as error:  # of our making it cannot be: compiling ends with the same two calls
            raise GameError(f"{CACHE_NAME} beside it is damaged ({type(error).__name__}); remove it") from error
        self._worlds[group] = world
        self._branches[group] = dict.fromkeys(histories, start)
        for branch, actions in histories.items():
            for action in actions:
                self.step(group, branch, action)
        return world.task, {branch: last for branch, (_, last) in self._branches[group].items()}, start[1]

    def step(self, group: int, branch: int, action: str) -> Reply:
        self._branches[group][branch] = self._worlds[group].step(*self._branches[group][branch], action)
        return self._branches[group][branch][1]

    def finish(self, group: int, branch: int) -> None:
        self._branches.get(group, {}).pop(branch, None)

    def close(self, group: int) -> None:
        self._worlds.pop(group, None)
        self._branches.pop(group, None)


def _serve(descriptor: int) -> None:
    """Answer requests until the other end closes, which it also does when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    with contextlib.suppress(ValueError):  # there is a tighter limit already
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    gc.disable()  # worlds and branches make no cycles, and there are many objects to look through for none
    server = _Server()
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as stream:
        while len(header := stream.read(_LENGTH.size)) == _LENGTH.size:
            replies = []
            for method, arguments in pickle.loads(stream.read(*_LENGTH.unpack(header))):
                try:
                    replies.append(("value", getattr(server, method)(*arguments)))
                except GameError as error:
                    replies.append(("game", str(error)))
                except Exception:  # a defect: it would come back on every other worker, so it goes to the caller
                    replies.append(("defect", "\n".join(map(shown, traceback.format_exc().splitlines()))))
            message = pickle.dumps(replies)
            with contextlib.suppress(ConnectionError):
                connection.sendall(_LENGTH.pack(len(message)) + message)


# ------------------------------------------------------------------------------------------------- the parent


class _WorkerLost(Exception):
    """The worker behind a request is gone; the request can be made again, of another one."""

    def __init__(self, reason: str, begun: bool) -> None:
        super().__init__(reason)
        self.begun = begun  # the worker may have been at this very request


class _Worker:
    """One worker process. Requests that gather while a batch is under way go out together as the next."""

    def __init__(self, timeout_seconds: float, batch_size: int) -> None:
        self.lost = ""  # the reason, once the process is gone
        self.failed = False  # gone by itself, not closed
        self.groups = 0
        self.timeout_seconds, self.batch_size = timeout_seconds, batch_size
        self._queue: list[tuple[tuple, asyncio.Future | None]] = []
        self._under_way: list[tuple[tuple, asyncio.Future | None]] = []  # what the process is at
        self._filled = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        # A fresh interpreter on this file: safe whatever threads or CUDA contexts the parent has, and quick, as it
        # does not import the parent's script again.
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, "--serve", str(theirs.fileno())]
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=os.environ | {"OMP_NUM_THREADS": "1"}
            )

    @property
    def load(self) -> int:
        return len(self._queue) + len(self._under_way) + self.groups

    def ask(self, method: str, *arguments) -> asyncio.Future:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop, self._task = loop, loop.create_task(self._exchange())
        elif self._loop is not loop:
            self.close("its event loop has ended")
        future = loop.create_future()
        if self.lost:
            future.set_exception(_WorkerLost(self.lost, begun=False))
        else:
            self._queue.append(((method, arguments), future))
            self._filled.set()
        return future

    def tell(self, method: str, *arguments) -> None:
        """A request nobody waits for."""
        if not self.lost:
            self._queue.append(((method, arguments), None))
            self._filled.set()

    async def _exchange(self) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=self._socket)
        try:
            while True:
                await self._filled.wait()
                self._under_way, self._queue = self._queue[: self.batch_size], self._queue[self.batch_size :]
                if not self._queue:
                    self._filled.clear()
                message = pickle.dumps([request for request, _ in self._under_way])
                async with asyncio.timeout(self.timeout_seconds):
                    writer.write(_LENGTH.pack(len(message)) + message)
                    await writer.drain()
                    length = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                    replies = pickle.loads(await reader.readexactly(*length))
                for (_, future), (kind, value) in zip(self._under_way, replies, strict=True):
                    if future is None or future.done():
                        continue
                    if kind == "value":
                        future.set_result(value)
                    else:
                        error = GameError(value) if kind == "game" else EnvironmentFault(f"a worker raised\n{value}")
                        future.set_exception(error)
                self._under_way = []
        except TimeoutError:
            self.failed = not self.lost
            self.close(f"worker {self.process.pid} did not answer within {self.timeout_seconds:g} s")
        except (EOFError, OSError):
            self.failed = not self.lost
            self.process.kill()
            self.close(f"worker {self.process.pid} died with exit status {self.process.wait()}")
        finally:
            self.close("its event loop has ended")
            writer.close()
            for requests in (self._under_way, self._queue):
                for _, future in requests:
                    if future is not None and not future.done():
                        future.set_exception(_WorkerLost(self.lost, begun=requests is self._under_way))

    def hang_up(self, reason: str) -> None:
        self.lost = self.lost or reason
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self, reason: str, patience_seconds: float = 0.0) -> None:
        """End the process: by hanging up, on which it leaves after what it is doing, or else by force."""
        self.hang_up(reason)
        try:
            self.process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._loop is None:
            self._socket.close()


class Group:
    """K branches of one game, all starting alike. Branches are independent; each takes one step at a time."""

    def __init__(self, pool: WorldPool, number: int, compiled: bytes, size: int) -> None:
        self.size = size
        self.task = ""  # the sentence after "Your task is to: "
        self.first: WorldState
        self._pool, self._number, self._compiled = pool, number, compiled
        self._histories: dict[int, list[str]] = {branch: [] for branch in range(size)}
        self._last: dict[int, Reply] = {}
        self._busy: set[int] = set()
        self._worker: _Worker | None = None
        self._placing = asyncio.Lock()

    async def _place(self) -> _Worker:
        """The worker that holds the branches; if it is gone, another, with every branch brought to where it was."""
        async with self._placing:
            while self._worker is None or self._worker.lost:
                worker = self._pool._pick(self._pool._workers)
                worker.groups += 1
                try:
                    self.task, replies, first = await worker.ask("open", self._number, self._compiled, self._histories)
                except _WorkerLost:
                    continue
                except BaseException:
                    worker.groups -= 1
                    raise
                for branch in self._histories.keys() & self._last.keys():
                    if replies[branch] != self._last[branch]:
                        raise EnvironmentFault(f"branch {branch} of {self.task!r} is not the same after its replay")
                self.first = WorldState(*first)
                self._worker = worker
            return self._worker

    async def step(self, branch: int, action: str) -> WorldState:
        """Do one command in one branch. If its worker is lost, the branch is replayed on another and goes on.

        Raises EnvironmentFault if more workers are lost than the settings allow.
        """
        if branch not in self._histories or branch in self._busy:
            state = "has a step under way" if branch in self._busy else "is finished or unknown"
            raise ValueError(f"branch {branch!r} of {self.task!r} {state}")
        self._busy.add(branch)
        try:
            while True:
                worker = await self._place()
                with contextlib.suppress(_WorkerLost):
                    reply = await worker.ask("step", self._number, branch, action)
                    break
        except BaseException:  # whether the step was done is not known: the branch cannot go on
            self.finish(branch)
            raise
        finally:
            self._busy.discard(branch)
        self._histories[branch].append(action)
        self._last[branch] = reply
        return WorldState(*reply)

    def finish(self, branch: int) -> None:
        """Forget a branch whose trajectory has ended."""
        if self._histories.pop(branch, None) is not None and self._worker is not None:
            self._last.pop(branch, None)
            self._worker.tell("finish", self._number, branch)

    def close(self) -> None:
        """Forget the group."""
        self._histories.clear()
        if self._worker is not None:
            self._worker.groups -= 1
            self._worker.tell("close", self._number)
            self._worker = None


async def _refusal(compiling: Awaitable) -> str:
    """Why a game cannot be compiled; "" if it can."""
    try:
        await compiling
    except GameError as error:
        return str(error)
    return ""


class WorldPool(contextlib.AbstractContextManager):
    """Worker processes that hold all branches, and compilers that make games ready. Use it as a context manager.

    The processes start with the pool. All methods but `close` belong to one asyncio loop. Whatever ends the parent,
    an exception or kill -9, ends the processes.
    """

    def __init__(self, settings: EnvironmentSettings | None = None) -> None:
        self.settings = settings or EnvironmentSettings()
        self.faults = 0  # workers lost so far
        self.unplayable: dict[Path, str] = {}  # games that turned out so while they were compiled, with the reason
        self._numbers = itertools.count()
        self._ahead: dict[Path, asyncio.Task] = {}
        self._background: list[_Worker] = []
        self._closed = False
        self._workers = [_Worker(self.settings.step_timeout_seconds, 64) for _ in range(self.settings.workers)]
        self._compilers = [_Worker(self.settings.compile_timeout_seconds, 1) for _ in range(self.settings.compilers)]

    def _pick(self, processes: list[_Worker]) -> _Worker:
        """The process with the least to do, after replacing those that are lost and counting them."""
        if self._closed:
            raise EnvironmentFault("the world pool is closed")
        for place, process in enumerate(processes):
            if process.lost:
                processes[place] = _Worker(process.timeout_seconds, process.batch_size)
                if process.failed:
                    self.faults += 1
                    print(f"environment: {process.lost}; fault {self.faults}", file=sys.stderr)
                if self.faults > self.settings.max_faults:
                    raise EnvironmentFault(f"{self.faults} environment faults, the last: {process.lost}")
        return min(processes, key=lambda process: process.load)

    async def _compile(self, game_file: Path, ground: bool = True) -> bytes:
        losses = 0
        while True:
            try:
                return await self._pick(self._compilers).ask("compile", str(game_file), ground)
            except _WorkerLost as error:
                losses += error.begun
                if losses == 3:
                    raise GameError(f"{game_file}: 3 compilers were lost over it ({error}); leave it out") from None

    async def open_group(self, game_file: Path, size: int) -> Group:
        """`size` branches of one game, ready to play. Raises GameError if the game cannot be compiled."""
        if size < 1:
            raise ValueError(f"a group needs at least 1 branch, got {size}")
        compiled = await (self._ahead.pop(Path(game_file), None) or self._compile(Path(game_file)))
        group = Group(self, next(self._numbers), compiled, size)
        try:
            await group._place()
        except GameError as error:
            raise GameError(f"{game_file}: {error}") from None
        return group

    def prefetch(self, game_files: Iterable[Path]) -> None:
        """Make games ready in the background, such as those of the next update; `open_group` then does not wait."""
        for game_file in map(Path, game_files):
            if game_file not in self._ahead:
                task = self._ahead[game_file] = asyncio.get_running_loop().create_task(self._compile(game_file))
                task.add_done_callback(lambda task: task.cancelled() or task.exception())  # open_group will raise it

    async def ready(self, game_files: Iterable[Path]) -> dict[Path, str]:
        """Make games ready for `open_group` and wait for it. Returns those that cannot be played, with the reason."""
        game_files = dict.fromkeys(map(Path, game_files))
        self.prefetch(game_files)
        found = {game_file: reason for game_file in game_files if (reason := await _refusal(self._ahead[game_file]))}
        for game_file in found:
            del self._ahead[game_file]
        self.unplayable |= found
        return found

    async def compile_ahead(self, game_files: Iterable[Path]) -> None:
        """Bring compiled games to the disk, in this order, and put those that cannot be played in `unplayable`.

        A process of its own does it that gives way to all others (nice 19), so it takes nothing from games that are
        asked for now, nor from the engine. It has ten times a compiler's time for a game.
        """
        for game_file in game_files:
            if self._closed:
                return
            if not self._background or self._background[0].lost:
                self._background = [_Worker(10 * self.settings.compile_timeout_seconds, 1)]
                os.setpriority(os.PRIO_PROCESS, self._background[0].process.pid, 19)
            with contextlib.suppress(_WorkerLost):  # what there is to say of this game is said when it is drawn
                if reason := await _refusal(self._background[0].ask("compile", str(game_file), True)):
                    self.unplayable[game_file] = reason
        for process in self._background:
            process.close("all games are compiled")

    async def check(self, game_files: Iterable[Path], ground: bool = False) -> dict[Path, str]:
        """The games that cannot be played, with the reason; a few milliseconds a game, less where a cache is there.

        Only with `ground` (0.1 s a game, kept on the disk) it tells what grounding shows, such as a goal out of reach.
        """
        game_files = list(map(Path, game_files))
        reasons = await asyncio.gather(*(_refusal(self._compile(game_file, ground)) for game_file in game_files))
        return {game_file: reason for game_file, reason in zip(game_files, reasons) if reason}

    def close(self) -> None:
        """End the processes. Groups of this pool cannot be used any more."""
        self._closed = True
        processes = self._workers + self._compilers + self._background
        for process in processes:
            process.hang_up("the world pool is closed")
        deadline = time.monotonic() + 1.0
        for process in processes:
            process.close("the world pool is closed", max(0.0, deadline - time.monotonic()))

    def __exit__(self, *exception) -> None:
        self.close()


# -------------------------------------------------------------------------------------------------- playing by hand

MOST_STEPS = 50  # of an episode, as for the model
HOW_TO_PLAY = "Type an action or its number; or undo, walkthrough (the solution's next step), quit."


def find_game(name: str, data_root: Path) -> Path:
    """The game file that `name` means: a file, a game's id below `data_root`, or `random`, any there."""
    if Path(name).is_file():
        return Path(name)
    found = sorted(path for path in data_root.rglob(GAME_FILE) if name == "random" or path.parent.match(name))
    if not found:
        raise GameError(f"no game {name!r} below {data_root}; give a game's file, its id (TASK/TRIAL) there, or random")
    return random.choice(found) if name == "random" else found[0]


def play(game_file: Path, output: Path) -> None:
    """Let a person play a game in the terminal; what was done is then appended to `output`, as rollouts are written.

    A branch is an integer, so undo goes back to the one before. Raises GameError and OSError.
    """
    from protocol import first_messages  # here, since it brings jinja2, for which no worker should wait at its start

    world = World(compile_game(game_file))
    solution = json_object(read_file(game_file)).get("walkthrough")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.open("a").close()  # what cannot be written is known before the game, not after it
    past, turns = [world.start()], []
    said = opening = first_messages(world.task, past[0][1][0], None)[1]["content"]
    print(HOW_TO_PLAY)
    while len(turns) < MOST_STEPS and not past[-1][1][4]:
        state, reply = past[-1]
        answer = _ask(said, reply[1])
        if answer == "quit":
            break
        if answer == "walkthrough":
            said = _next_step(solution, [turn["action"] for turn in turns])
        elif answer == "undo":
            turns, past = turns[:-1], past[:-1] or past
            said = past[-1][1][0] if turns else opening
        elif answer:
            number = int(answer) if answer.isdecimal() and len(answer) < 5 else 0
            action = reply[1][number - 1] if 0 < number <= len(reply[1]) else answer
            past.append(world.step(state, reply, action))
            said, admissible, _, won, done, _ = past[-1][1]
            status = "won" if won else "over" if done else "executed" if action in reply[1] else "not admissible"
            turns.append({"step": len(turns) + 1, "action": action, "error": None, "status": status,
                          "observation": said, "admissible": list(admissible)})  # fmt: skip
    print(*map(shown, said.split("\n")), "You won." if past[-1][1][3] else "Not won.", sep="\n")
    record = _record(game_file, world.task, past[0][1], past[-1][1], turns)
    with output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    print(f"Wrote {output}; to look at it: python analysis.py --replay {output}")


def _ask(said: str, actions: tuple[str, ...]) -> str:
    """Show what was said and what can be done, and return the answer as an action; `quit` at the end of input."""
    print("", *map(shown, said.split("\n")), *(f"{number:4} {shown(action)}" for number, action in enumerate(actions, 1)), sep="\n")
    if sys.stdin.isatty():
        import readline  # editing and history for input()

        known = [*actions, "undo", "walkthrough", "quit"]
        readline.set_completer(lambda text, n: [*(one for one in known if one.startswith(text)), None][n])
        readline.set_completer_delims("\n")  # an action has spaces in it
        readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
    try:
        return " ".join(input("> ").lower().split())
    except (EOFError, KeyboardInterrupt):
        return "quit"


def _next_step(solution: object, actions: list[str]) -> str:
    """What the stored solution does next: its first step that was not yet done in its turn."""
    if not isinstance(solution, list) or not solution:
        return "The file has no solution."
    done = 0
    for action in actions:
        done += done < len(solution) and action == solution[done]
    if done == len(solution):
        return "That was its last step."
    return f"Step {done + 1} of {len(solution)}: {solution[done]}"


def _record(game_file: Path, task: str, first: Reply, last: Reply, turns: list[dict]) -> dict:
    """What was played, in the form of rollout.py's `Trajectory.record` as far as it applies, with its reward."""
    from protocol import first_messages, tool_call_text, tool_result

    messages = first_messages(task, first[0], first[1])
    for turn in turns:
        messages.append({"role": "assistant", "content": tool_call_text(turn["action"])})
        result = tool_result(turn["step"], MOST_STEPS, turn["status"], turn["observation"], turn["admissible"])
        messages.append({"role": "tool", "content": result})
    *_, split, task_name, trial = ("", "", "", *game_file.absolute().parent.parts)
    kind = None
    with contextlib.suppress(OSError, ValueError):  # a game of one's own need not have this file
        kind = json_object(read_file(game_file.with_name(TASK_FILE))).get("task_type")
    invalid, full = sum(turn["status"] == "not admissible" for turn in turns), len(turns) == MOST_STEPS
    return {
        "type": "trajectory", "split": split if split in SPLITS else "", "game_id": f"{task_name}/{trial}",
        "task_type": kind if isinstance(kind, str) else "", "update": None, "branch": 0, "policy_version": "by hand",
        "task": task, "won": last[3], "reward": float(last[3]) - 0.1 * invalid, "steps": len(turns),
        "invalid_actions": invalid, "valid_tool_calls": len(turns), "admissible_actions": len(turns) - invalid,
        "truncated": full and not last[4],
        "stop_reason": "won" if last[3] else "game_over" if last[4] else "max_steps" if full else "quit",
        "messages": messages, "turns": turns,
    }  # fmt: skip


def main() -> None:
    write_any_text()
    parser = argparse.ArgumentParser(description="Compile every game below a folder ahead, or play one by hand.")
    parser.add_argument("--data-root", type=Path, default=Path("datasets/alfworld"), help="folder with the games")
    parser.add_argument("--compilers", type=int, default=EnvironmentSettings.compilers, help="processes that compile")
    parser.add_argument("--play", metavar="GAME", help="play a game: its file, its id below --data-root, or random")
    parser.add_argument("--output", type=Path, default=Path("runs/played.jsonl"),
                        help="file to which what was played by hand is added (%(default)s)")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.play:
        try:
            return play(find_game(arguments.play, arguments.data_root), arguments.output)
        except (ValueError, OSError) as error:
            raise SystemExit(f"environment.py: {shown(error)}") from None
    game_files = sorted(arguments.data_root.rglob("game.tw-pddl"))
    if not game_files:
        raise SystemExit(shown(f"no game.tw-pddl below {arguments.data_root}; {how_to_get_games(arguments.data_root)}"))
    started = time.perf_counter()
    try:
        with WorldPool(EnvironmentSettings(compilers=arguments.compilers)) as pool:
            refused = asyncio.run(pool.check(game_files, ground=True))
    except (ValueError, EnvironmentFault) as error:
        raise SystemExit(f"environment.py: {error}") from None
    seconds = time.perf_counter() - started
    print(f"{len(game_files) - len(refused)} games ready, {len(refused)} refused")
    print(f"{seconds:.1f} s with {arguments.compilers} compilers, {1e3 * seconds / len(game_files):.0f} ms a game")
    if refused:
        raise SystemExit("\n".join(f"environment.py: refused: {line}" for line in told_by_kind(refused)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(int(sys.argv[2]))
    else:
        main()
