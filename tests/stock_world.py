"""Stock alfworld/TextWorld, as the reference that the compiled world is compared with. Tests and benchmark only.

`StockWorld` is textworld's own environment for PDDL games under alfworld's own name demangler, asked for `won` and the
admissible commands. A finished game stays as it is and answers every further command with its last state, as
TextWorld's batch environments do (the ones that alfworld plays through). `memoise` saves the reference most of its
waiting in long checks; the benchmark does not use it. `altered_problem` makes other PDDL problems out of one, for random
comparisons.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import fast_downward
import textworld
import textworld.envs.pddl.textgen as textgen
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from textworld.generator.game import EntityInfo
from textworld.logic import Placeholder, Variable

State = tuple[str, tuple[str, ...], int, bool, bool]  # observation, admissible, score, won, done


def _derive(self, context=None):
    """`EvalSymbol.derive` with its variables handed to `eval`: CPython 3.13 no longer sees `locals().update`."""
    context = context or self.context
    return [textgen.TerminalSymbol(eval(self.expression, vars(textgen), dict(context["variables"])))]


if sys.version_info >= (3, 13):
    textgen.EvalSymbol.derive = _derive


class StockWorld:
    """One game in stock TextWorld. `load` once, `reset` at will."""

    def __init__(self) -> None:
        infos = textworld.EnvInfos(won=True, admissible_commands=True)
        self._env = AlfredDemangler(textworld.envs.PddlEnv(infos), shuffle=False)

    def load(self, game_file: Path | str) -> None:
        self._env.load(str(game_file))

    def name_of(self, entity: str) -> str:
        return self._env.unwrapped._entity_infos[entity].name

    def reset(self) -> State:
        state = self._env.reset()
        self._last: State = (state.feedback, tuple(state["admissible_commands"]), 0, state["won"], False)
        return self._last

    def step(self, action: str) -> State:
        if not self._last[4]:
            state, score, done = self._env.step(action)
            self._last = (state.feedback, tuple(state["admissible_commands"]), score, state["won"], done)
        return self._last


def memoise() -> None:
    """Spare this process's stock worlds their repeated work, for checks over many games. Texts do not change.

    The PDDL translation is a function of domain and problem and nothing writes to its result: one a game instead of
    four (the planner's own, `optimize=True`, only answers requests for a plan and is given the plain one). Parsing is
    a function of the text; what a derivation writes to a parsed symbol (its context) goes to a copy.
    """
    translate = fast_downward.pddl2sas
    parse, parse_query = textgen._parse_and_convert, textgen.Rule.parse_conjunctive_query

    @functools.lru_cache(maxsize=2)
    def translated(domain, problem):
        return translate(domain, problem)

    @functools.lru_cache(maxsize=None)
    def parsed(text, rule_name):
        return parse(text, rule_name=rule_name)

    fast_downward.pddl2sas = lambda domain, problem, verbose=False, optimize=False: translated(domain, problem)
    textgen._parse_and_convert = lambda text, rule_name, trace=False: list(map(copy.copy, parsed(text, rule_name)))
    textgen.Rule.parse_conjunctive_query = functools.lru_cache(maxsize=None)(parse_query)
    for kind in (EntityInfo, Placeholder, Variable):  # never written to once a game is loaded
        kind.__deepcopy__ = lambda self, memo: self


ODDITIES = (
    "", " ", "  look ", "LOOK", "Go To desk 1", "go  to desk 1", "go to desk", "take", "fly to the moon", "examine",
    "examine desk 1", "help me", "look\n", "inventory.", "put apple 1 in/on desk 1", "go to nowhere 7", "1", "[{r}]",
)  # fmt: skip
PLAIN = ("look", "inventory", "help")
HANDLING = ("take", "move", "open", "close", "use", "heat", "cool", "clean", "slice", "examine")


def random_action(rng: random.Random, admissible: Sequence[str], earlier: Sequence[str]) -> str:
    """A command: mostly admissible (handling things more often than walking), else formerly so, odd or misspelt."""
    kind = rng.random()
    handling = [action for action in admissible if action.startswith(HANDLING)]
    if kind < 0.35 and handling:
        return rng.choice(handling)
    if kind < 0.65:
        return rng.choice(admissible)
    if kind < 0.75:
        return rng.choice(PLAIN)
    if kind < 0.85:
        return rng.choice(earlier)
    if kind < 0.92:
        return rng.choice(ODDITIES)
    action = rng.choice(admissible)
    return rng.choice((action.upper(), action.replace(" ", "  "), f"  {action}\t", action[:-1], f"{action} 1"))


def new_action(rng: random.Random, admissible: Sequence[str], done: Sequence[str]) -> str:
    """Mostly a command that was not given yet, of handling things if there is one."""
    fresh = [action for action in admissible if action not in done and action not in PLAIN]
    handling = [action for action in fresh if action.startswith(HANDLING)]
    return rng.choice(handling or fresh or [*admissible, *PLAIN]) if rng.random() < 0.8 else rng.choice([*admissible, *PLAIN])


def difference(
    stock: StockWorld, world, actions: Sequence[str] | int, rng: random.Random, curious: bool = False
) -> tuple[int, str]:
    """Play the same commands in both worlds, those given or so many random ones, and look again after the end.

    If `curious`, random commands are `new_action`s, which see more of a world, in place of `random_action`s.

    `stock` has the game loaded, `world` is the compiled one. Returns the steps compared and the first difference
    ("" if there is none) as a text.
    """
    expected = stock.reset()
    state, reply = world.start()
    done: list[str] = []
    earlier = list(expected[1])
    for number in itertools.count():
        if reply[:5] != expected:
            return number, f"after {done}: stock {expected!r}, compiled {reply[:5]!r}"
        if isinstance(actions, int):
            if number == actions:
                return number, ""
            action = new_action(rng, expected[1], done) if curious else random_action(rng, expected[1], earlier)
            earlier += expected[1]
        elif number < len(actions) + 2:
            action = [*actions, "look", rng.choice(expected[1])][number]
        else:
            return number, ""
        done.append(action)
        expected = stock.step(action)
        state, reply = world.step(state, reply, action)


# --- other problems ---

CONDITIONS = (
    "isHot", "isCool", "isClean", "isOn", "isToggled", "isSliced", "opened", "pickupable", "toggleable", "isReceptacleObject",
)  # fmt: skip
RELATIONS = ("inReceptacle", "holds", "objectType", "receptacleType", "objectAtLocation", "receptacleAtLocation")


def altered_problem(problem: str, rng: random.Random) -> str:
    """The problem with 1 to 100 edits: another type for a thing, a fact more, less or about other things, another goal.

    Half of the edits are about things that can be taken up, which is where texts and actions look.
    """
    sections = {section[0]: section for section in parsed(problem) if isinstance(section, list)}
    objects, init = _typed(sections[":objects"][1:]), sections[":init"]
    facts = [fact for fact in init[1:] if fact[0] != "="]
    numbers = [fact for fact in init[1:] if fact[0] == "="]
    predicates = sorted({(fact[0], len(fact) - 1) for fact in facts})
    taken_up = sorted({fact[1] for fact in facts if fact[0] == "inreceptacle"})
    busy = sorted({name for fact in facts for name in fact[1:]} & objects.keys())
    for _ in range(rng.choice((1, 3, 10, 30, 100))):
        edit, fact, thing = rng.random(), rng.randrange(len(facts)), rng.choice(rng.choice((busy, taken_up)))
        if edit < 0.35:
            objects[thing] = rng.choice(("object", "receptacle", "receptacle", *objects.values()))
        elif edit < 0.6:
            facts.append([rng.choice(CONDITIONS), thing])
        elif edit < 0.7:
            del facts[fact]
        elif edit < 0.8:
            facts[fact] = [*facts[fact]]
            facts[fact][rng.randrange(1, len(facts[fact]))] = thing
        elif edit < 0.97:
            name, arity = rng.choice(predicates)
            facts.append([name, *(rng.choice((thing, rng.choice(busy))) for _ in range(arity))])
        else:
            sections[":goal"][1] = _random_goal(rng, busy, [], 3)
    sections[":objects"][1:] = [word for name, type_ in objects.items() for word in (name, "-", type_)]
    init[1:] = numbers + facts
    return written(["define", *sections.values()])


def parsed(problem: str) -> list:
    open_lists: list[list] = [[]]
    for word in re.findall(r"[()]|[^()\s]+", re.sub(";.*", "", problem.lower())):
        if word == "(":
            open_lists.append([])
        elif word == ")":
            done = open_lists.pop()
            open_lists[-1].append(done)
        else:
            open_lists[-1].append(word)
    return open_lists[0][0]


def _typed(words: list[str]) -> dict[str, str]:
    objects, names = {}, []
    words = iter(words)
    for word in words:
        if word == "-":
            objects |= dict.fromkeys(names, next(words))
            names = []
        else:
            names.append(word)
    return objects


def written(part) -> str:
    return f"({' '.join(map(written, part))})" if isinstance(part, list) else part


def _random_goal(rng: random.Random, things: list[str], variables: list[str], depth: int) -> list:
    """A condition over things and variables; `depth` is how deep it may nest."""
    kind = rng.choice(("and", "or", "not", "exists", "forall", "imply")) if depth and rng.random() < 0.7 else "literal"
    if kind == "literal":
        name = rng.choice(CONDITIONS + RELATIONS)
        return [name, *(rng.choice(variables * 40 + things) for _ in range(1 + (name in RELATIONS)))]
    if kind in ("exists", "forall"):
        variable = f"?v{len(variables)}"
        inner = _random_goal(rng, things, [*variables, variable], depth - 1)
        return [kind, [variable, "-", rng.choice(("object", "receptacle"))], inner]
    count = {"not": 1, "imply": 2}.get(kind) or rng.randrange(4)
    return [kind, *(_random_goal(rng, things, variables, depth - 1) for _ in range(count))]
