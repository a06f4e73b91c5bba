"""The starter games: small ALFWorld games of our own, to run everything before the official data is there.

Owns the rooms, objects and tasks below `datasets/starter/json_2.1.1`, written in the official layout and file
format: alfworld's packaged domain and grammar, its goal table, its task sentences. Nothing is taken from the
official games.

Invariant: the files are a pure function of the tables in this script and the installed alfworld (no clock, no
`random` state, no set order), so writing them twice gives the same bytes. The agent is told nothing of where
things are, the target is at first in no receptacle of the goal's type, and every walkthrough wins at its last
step.

    python datasets/starter/make_games.py            # writes the games
    python datasets/starter/make_games.py --check    # compares only: exit status 1 if a file differs
"""

import argparse
import hashlib
import json
import random
import shutil
import sys
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

from alfworld.agents.utils.misc import Demangler, add_task_to_grammar
from alfworld.gen.constants import OBJECTS, OPENABLE_CLASS_LIST, VAL_ACTION_OBJECTS, VAL_RECEPTACLE_OBJECTS
from alfworld.gen.goal_library import gdict
from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

GAMES_DIR = Path(__file__).resolve().parent / "json_2.1.1"

# Scene numbers: 10xx kitchens, 12xx living rooms, 13xx bedrooms, 14xx bathrooms. Rooms with a 1 as their
# third digit belong to valid_unseen alone. "Drawer*3" is three of them.
ROOMS = {
    1001: "Cabinet*3 CoffeeMachine CounterTop*2 DiningTable Drawer*2 Fridge GarbageCan Microwave SinkBasin"
          " StoveBurner*2 Toaster",
    1002: "Cabinet*2 CoffeeMachine CounterTop*2 Drawer*3 Fridge GarbageCan Microwave Shelf*2 SinkBasin"
          " StoveBurner*2",
    1003: "Cabinet*4 CoffeeMachine CounterTop DiningTable Drawer*2 Fridge GarbageCan Microwave SinkBasin"
          " StoveBurner*2",
    1201: "ArmChair*2 CoffeeTable Drawer*2 GarbageCan Shelf*2 SideTable*2 Sofa TVStand",
    1202: "ArmChair Cabinet*3 CoffeeTable DiningTable Dresser GarbageCan Ottoman Safe SideTable*2 Sofa",
    1301: "Bed Desk Drawer*4 Dresser GarbageCan LaundryHamper SideTable*2",
    1302: "ArmChair Bed Desk Drawer*3 GarbageCan Safe Shelf*4",
    1303: "Bed Cabinet*2 Desk Drawer*2 Dresser GarbageCan Ottoman SideTable",
    1401: "BathtubBasin Cabinet*3 CounterTop GarbageCan HandTowelHolder*2 SinkBasin*2 Toilet"
          " ToiletPaperHanger TowelHolder",
    1402: "Cart Drawer*4 GarbageCan HandTowelHolder Shelf*2 SinkBasin Toilet ToiletPaperHanger TowelHolder",
    1011: "Cabinet*4 CoffeeMachine CounterTop*2 Drawer*3 Fridge GarbageCan Microwave SideTable SinkBasin"
          " StoveBurner*4",
    1012: "Cabinet Cart CounterTop*3 DiningTable Drawer*2 Fridge GarbageCan Microwave Shelf*3 SinkBasin*2"
          " StoveBurner*2",
    1211: "ArmChair*2 Cabinet*2 CoffeeTable*2 Drawer*3 Dresser GarbageCan Ottoman Shelf SideTable Sofa",
    1311: "ArmChair Bed*2 Desk Drawer*2 Dresser GarbageCan LaundryHamper Safe SideTable*2",
    1312: "Bed Cabinet*3 Desk*2 Drawer*4 GarbageCan Ottoman Shelf*2",
    1411: "BathtubBasin Cabinet*2 Cart CounterTop Drawer*2 GarbageCan HandTowelHolder SinkBasin Toilet"
          " ToiletPaperHanger TowelHolder*2",
}
ROOM_KINDS = {10: "kitchen", 12: "living room", 13: "bedroom", 14: "bathroom"}

# What a room of the kind can hold, with the most of each; a game draws from these.
PORTABLE = {
    "kitchen": "Apple*2 Bowl*2 Bread*2 ButterKnife*2 Cup*2 DishSponge*2 Egg*2 Fork*2 Glassbottle*2 Kettle"
               " Knife*2 Ladle Lettuce*2 Mug*3 Pan*2 PepperShaker*2 Plate*3 Pot*2 Potato*2 SaltShaker*2"
               " SoapBottle Spatula*2 Spoon*2 Tomato*2 Vase WineBottle",
    "living room": "Book*2 Box Candle*2 CellPhone CreditCard*3 KeyChain*2 Laptop*2 Newspaper*2 Pen*2 Pencil"
                   " Pillow*3 RemoteControl*2 Statue*2 TissueBox*2 Vase*2 Watch*2 WateringCan",
    "bedroom": "AlarmClock*2 BaseballBat BasketBall Book*3 Bowl Box CD*3 CellPhone*2 Cloth*2 CreditCard*2"
               " KeyChain*2 Laptop*2 Mug*2 Pen*2 Pencil*3 Pillow*2 Statue TennisRacket TissueBox Watch*2",
    "bathroom": "Candle*2 Cloth*3 DishSponge HandTowel*2 Plunger SoapBar*2 SoapBottle*2 SprayBottle*2"
                " TissueBox Towel ToiletPaper*2 ToiletPaperRoll*2 Vase",
}
PORTABLE_COUNTS = {"kitchen": (13, 20), "living room": (11, 16), "bedroom": (11, 16), "bathroom": (10, 14)}

# What stays where it is: "Chair~DiningTable" stands beside the table (beside anything if there is none),
# "DeskLamp@SideTable/Desk" on the first of these that the room has (nowhere if it has none).
FIXED = {
    "kitchen": "Chair~DiningTable HousePlant@CounterTop LightSwitch~ StoveKnob~StoveBurner"
               " StoveKnob~StoveBurner Window~",
    "living room": "Chair~DiningTable Curtains~ DeskLamp@SideTable FloorLamp~Sofa"
                   " HousePlant@Dresser/CoffeeTable LightSwitch~ Painting~Sofa Television@TVStand/Dresser"
                   " Window~",
    "bedroom": "Blinds~ Chair~Desk DeskLamp@SideTable/Desk LightSwitch~ Mirror~Dresser Poster~Bed Window~",
    "bathroom": "LightSwitch~ Mirror~SinkBasin ShowerGlass~BathtubBasin Window~",
}
# A basin is the receptacle part of an object that stays where it is.
BASIN_OF = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}

# The games, as target-goal-scene. Every second game of a split hides the target behind a door or in a drawer
# if the room has one that takes it.
TASKS = {
    "train": {
        "look_at_obj_in_light":
            "AlarmClock-DeskLamp-1301 Book-DeskLamp-1301 CD-DeskLamp-1302 CellPhone-DeskLamp-1302"
            " Laptop-DeskLamp-1303 Newspaper-DeskLamp-1202 Statue-DeskLamp-1201 Watch-DeskLamp-1303",
        "pick_and_place_simple":
            "KeyChain-Dresser-1301 Mug-CoffeeMachine-1003 Pillow-ArmChair-1302"
            " RemoteControl-Sofa-1201 SaltShaker-Drawer-1001 SprayBottle-Toilet-1402"
            " ToiletPaper-ToiletPaperHanger-1401 Vase-Safe-1202",
        "pick_clean_then_place_in_recep":
            "Apple-Fridge-1002 Bowl-DiningTable-1003 Cloth-Cabinet-1401 Fork-Drawer-1001"
            " Knife-CounterTop-1003 Mug-CoffeeMachine-1001 Plate-Cabinet-1002 SoapBar-Drawer-1402",
        "pick_cool_then_place_in_recep":
            "Bowl-Shelf-1002 Cup-Microwave-1002 Lettuce-CounterTop-1001 Mug-Cabinet-1003"
            " Pan-StoveBurner-1001 Pot-StoveBurner-1002 Tomato-DiningTable-1003"
            " WineBottle-DiningTable-1001",
        "pick_heat_then_place_in_recep":
            "Apple-DiningTable-1003 Cup-Shelf-1002 Egg-DiningTable-1001 Mug-Cabinet-1002"
            " Plate-CounterTop-1003 Potato-Fridge-1003 Potato-GarbageCan-1001 Tomato-Fridge-1002",
        "pick_two_obj_and_place":
            "CD-Safe-1302 CreditCard-SideTable-1202 Pencil-Drawer-1301 Pillow-Sofa-1201"
            " Plate-DiningTable-1003 SaltShaker-Cabinet-1001 SoapBar-Cabinet-1401 Spoon-Drawer-1002",
    },
    "valid_seen": {
        "look_at_obj_in_light":
            "Book-DeskLamp-1302 CreditCard-DeskLamp-1301 TissueBox-DeskLamp-1201",
        "pick_and_place_simple":
            "PepperShaker-Shelf-1002 SoapBottle-Toilet-1401 Watch-Safe-1302",
        "pick_clean_then_place_in_recep":
            "Cloth-Toilet-1402 Cup-Cabinet-1003 Spoon-Drawer-1001",
        "pick_cool_then_place_in_recep":
            "Apple-Microwave-1001 Lettuce-DiningTable-1003 Plate-Shelf-1002",
        "pick_heat_then_place_in_recep":
            "Bread-CounterTop-1002 Egg-Fridge-1003 Tomato-DiningTable-1001",
        "pick_two_obj_and_place":
            "CellPhone-Bed-1303 PepperShaker-Drawer-1001 SoapBottle-Drawer-1402",
    },
    "valid_unseen": {
        "look_at_obj_in_light":
            "Book-DeskLamp-1311 Mug-DeskLamp-1312 Vase-DeskLamp-1211",
        "pick_and_place_simple":
            "CellPhone-Dresser-1311 SaltShaker-Cabinet-1011 SoapBottle-Toilet-1411",
        "pick_clean_then_place_in_recep":
            "Cloth-Drawer-1411 Egg-DiningTable-1012 Ladle-Drawer-1011",
        "pick_cool_then_place_in_recep":
            "Mug-CoffeeMachine-1011 Pan-CounterTop-1011 Tomato-DiningTable-1012",
        "pick_heat_then_place_in_recep":
            "Apple-CounterTop-1012 Cup-Cabinet-1011 Potato-SideTable-1011",
        "pick_two_obj_and_place":
            "KeyChain-Safe-1311 Newspaper-ArmChair-1211 PepperShaker-Shelf-1012",
    },
}

# The verb of the task, the device it needs and alfworld's word for what can undergo it.
TREATMENTS = {
    "pick_clean_then_place_in_recep": ("clean", "SinkBasin", "Cleanable"),
    "pick_heat_then_place_in_recep": ("heat", "Microwave", "Heatable"),
    "pick_cool_then_place_in_recep": ("cool", "Fridge", "Coolable"),
}
TASK_SENTENCES = {
    "look_at_obj_in_light": "Look at the {obj} by the light of the {recep}.",
    "pick_and_place_simple": "Find a {obj} and leave it at the {recep}.",
    "pick_clean_then_place_in_recep": "Wash a {obj}, then leave it at the {recep}.",
    "pick_heat_then_place_in_recep": "Warm up a {obj}, then leave it at the {recep}.",
    "pick_cool_then_place_in_recep": "Chill a {obj}, then leave it at the {recep}.",
    "pick_two_obj_and_place": "Bring two of the {obj} to the {recep}.",
}

PAIRED = {"Drawer", "StoveBurner"}  # stand two to a place: one location serves both
# Metres above the floor; what is not named stands on it.
HEIGHT_M = {
    "Cabinet": 1.60, "Drawer": 0.75, "Shelf": 1.25, "Microwave": 1.30, "CounterTop": 0.95,
    "CoffeeMachine": 0.95, "Toaster": 0.95, "StoveBurner": 0.95, "SinkBasin": 0.85, "HandTowelHolder": 1.40,
    "TowelHolder": 1.45, "ToiletPaperHanger": 1.05, "DiningTable": 0.75, "Desk": 0.70, "SideTable": 0.60,
    "Dresser": 0.85, "Safe": 0.40, "Bed": 0.55, "CoffeeTable": 0.45, "Cart": 0.60,
}


@dataclass(frozen=True)
class Receptacle:
    """One receptacle: PDDL id, type, location id, and its place in the room (x, y, z in metres, y is up)."""

    id: str
    type: str
    location: str
    position: tuple[float, float, float]


@dataclass(frozen=True)
class Item:
    """One object: PDDL id, type, the receptacle it is in (None: beside one), location id, portable or not."""

    id: str
    type: str
    receptacle: Receptacle | None
    location: str
    portable: bool


def number(*key):
    """A fixed integer in [0, 2**64) for the key: the first 8 bytes of the SHA-256 of its parts."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest()[:8], "big")


def shuffled(items, *key):
    """The items in an order fixed by the key (and by nothing else, not by Python's version)."""
    return [item for _, item in sorted(enumerate(items), key=lambda pair: number(*key, *pair))]


def counted(words):
    """`"Drawer*3 Bed"` -> [("Drawer", 3), ("Bed", 1)]."""
    return [(kind, int(count or 1)) for kind, _, count in (word.partition("*") for word in words.split())]


def room_kind(scene):
    return ROOM_KINDS[scene // 100]


def pddl_id(kind, position, part=""):
    """The official way of writing an object's id: `Mug|+01.84|+00.90|-02.05` with names for the signs."""
    signed = [f"_{'minus' if value < 0 else 'plus'}_{abs(value):05.2f}" for value in position]
    return "_bar_".join([kind, *(value.replace(".", "_dot_") for value in signed)] + ([part] if part else []))


def location_id(x_m, z_m, rotation, horizon):
    """A location: x and z in steps of 0.25 m, rotation in quarter turns, horizon in degrees."""
    values = [round(x_m / 0.25), round(z_m / 0.25), rotation, horizon]
    return "_bar_".join(["loc", *(f"_minus_{-value}" if value < 0 else str(value) for value in values)])


def build_receptacles(scene):
    """The receptacles of a room, along its four walls.

    Two drawers or two burners share one location, as they often do in the official scenes: from either, the
    other can be opened or looked at, but not gone to.
    """
    groups = []
    for kind, count in counted(ROOMS[scene]):
        size = 2 if kind in PAIRED else 1
        groups += [(kind, min(size, count - start)) for start in range(0, count, size)]
    width, depth = 3.0 + number(scene, "width") % 8 * 0.5, 3.0 + number(scene, "depth") % 6 * 0.5
    # length, outward x and z, rotation of one who faces the wall
    walls = [(width, 0, 1, 0), (depth, 1, 0, 1), (width, 0, -1, 2), (depth, -1, 0, 3)]
    receptacles = []
    for index, (kind, count) in enumerate(shuffled(groups, scene, "along the walls")):
        along = (index + 0.5) * 2 * (width + depth) / len(groups)
        for length, out_x, out_z, rotation in walls:
            if along < length:
                break
            along -= length
        along = max(0.4, min(along, length - 0.4)) - length / 2
        x = out_x * (width / 2 - 0.3) + (along if out_z else 0.0)
        z = out_z * (depth / 2 - 0.3) + (along if out_x else 0.0)
        height = HEIGHT_M.get(kind, 0.0)
        horizon = 60 if height < 0.5 else 45 if height < 0.9 else 30 if height < 1.2 else 0
        location = location_id(x - out_x * 0.75, z - out_z * 0.75, rotation, horizon)
        for level in range(count):
            beside = 0.3 * level if kind == "StoveBurner" else 0.0
            below = 0.0 if kind == "StoveBurner" else 0.25 * level
            position = (x + beside * abs(out_z), height - below, z + beside * abs(out_x))
            name = pddl_id(BASIN_OF.get(kind, kind), position, kind if kind in BASIN_OF else "")
            receptacles.append(Receptacle(name, kind, location, position))
    if len({receptacle.id for receptacle in receptacles}) < len(receptacles):
        raise ValueError(f"room {scene}: two receptacles at one place; change its row in ROOMS")
    return receptacles


def position_in(receptacle, *key):
    """A place in or on the receptacle, fixed by the key."""
    x, y, z = receptacle.position
    return x + (number(*key, "x") % 61 - 30) / 100, y + 0.05, z + (number(*key, "z") % 61 - 30) / 100


def build_fixed_items(scene, receptacles):
    """The objects of a room that cannot be picked up: lamps, windows, the sink under a basin."""
    items = [Item(r.id.removesuffix(f"_bar_{r.type}"), BASIN_OF[r.type], None, r.location, False)
             for r in receptacles if r.type in BASIN_OF]
    for index, word in enumerate(FIXED[room_kind(scene)].split()):
        inside = "@" in word
        kind, wanted = word.replace("~", "@").split("@")
        by_type = [[r for r in receptacles if r.type == name] for name in wanted.split("/")]
        hosts = next(filter(None, by_type), None)
        if hosts is None and inside:
            continue
        host = shuffled(hosts or receptacles, scene, word, index)[0]
        name = pddl_id(kind, position_in(host, scene, word, index))
        items.append(Item(name, kind, host if inside else None, host.location, False))
    return items


def build_portable_items(scene, task_type, target, goal_type, hide, receptacles, key):
    """Draws the portable objects of one game and puts each where alfworld's table says its type belongs."""
    kind = room_kind(scene)
    most = dict(counted(PORTABLE[kind]))
    if target not in most:
        raise ValueError(f"{key}: PORTABLE[{kind!r}] has no {target}; add it there or change the task")
    fewest = 2 if task_type == "pick_two_obj_and_place" else 1
    target_count = fewest + number(key, "targets") % 2
    low, high = PORTABLE_COUNTS[kind]
    pool = [name for name, count in most.items() for _ in range(count) if name != target]
    others = shuffled(pool, key, "others")[:low + number(key, "items") % (high - low + 1) - target_count]
    items = []
    for index, name in enumerate([target] * target_count + sorted(others)):
        hosts = [r for r in receptacles if name in VAL_RECEPTACLE_OBJECTS.get(r.type, ())]
        if name == target:
            hosts = [r for r in hosts if r.type != goal_type]
            closed = [r for r in hosts if r.type in OPENABLE_CLASS_LIST]
            hosts = closed if hide and closed else hosts
        if not hosts:
            if name == target:
                raise ValueError(f"{key}: the room takes {name} only in the goal; change the row in TASKS")
            continue
        host = shuffled(hosts, key, "host", index)[0]
        items.append(Item(pddl_id(name, position_in(host, key, index)), name, host, host.location, True))
    return items


def nested_pair(items, target):
    """The first two objects in one receptacle of which one can hold the other: (inner, outer) or None."""
    for inner in items:
        for outer in items:
            fits = inner.type in VAL_RECEPTACLE_OBJECTS.get(outer.type, ())
            if fits and target not in (inner.type, outer.type) and inner.receptacle == outer.receptacle:
                return inner, outer
    return None


def pddl_problem(trial, task_type, target, goal_type, receptacles, items, start):
    """The `pddl_problem` text: declarations, initial facts (sorted within a predicate), alfworld's goal."""
    object_types, receptacle_types = {item.type for item in items}, {r.type for r in receptacles}
    # The domain's actions name some types: these have to exist in every room.
    otypes = object_types | {"Knife", "ButterKnife"}
    rtypes = receptacle_types | {"SinkBasin", "Microwave", "Fridge"}
    locations = {start} | {r.location for r in receptacles} | {item.location for item in items}
    declared = [
        "agent1 - agent",
        *sorted(f"{kind}Type - otype" for kind in otypes),
        *sorted(f"{kind}Type - rtype" for kind in rtypes),
        *sorted(f"{item.id} - object" for item in items),
        *sorted(f"{r.id} - receptacle" for r in receptacles),
        *sorted(f"{location} - location" for location in locations),
    ]

    portable = [item for item in items if item.portable]
    can = {action: [i for i in portable if i.type in kinds] for action, kinds in VAL_ACTION_OBJECTS.items()}
    can["Toggleable"] = [item for item in items if item.type in VAL_ACTION_OBJECTS["Toggleable"]]
    nested = nested_pair(portable, target)
    facts = [
        [f"receptacleType {r.id} {r.type}Type" for r in receptacles],
        [f"objectType {item.id} {item.type}Type" for item in items],
        [f"canContain {outer}Type {inner}Type" for outer in receptacle_types
         for inner in object_types & set(VAL_RECEPTACLE_OBJECTS.get(outer, ()))],
        [f"pickupable {item.id}" for item in portable],
        [f"isReceptacleObject {item.id}" for item in portable if item.type in VAL_RECEPTACLE_OBJECTS],
        [f"openable {r.id}" for r in receptacles if r.type in OPENABLE_CLASS_LIST],
        [f"atLocation agent1 {start}"],
        *([f"{action.lower()} {item.id}" for item in can[action]]
          for action in ("Cleanable", "Heatable", "Coolable", "Toggleable", "Sliceable")),
        [f"inReceptacle {item.id} {item.receptacle.id}" for item in items if item.receptacle],
        [f"inReceptacleObject {nested[0].id} {nested[1].id}"] if nested else [],
        [f"receptacleAtLocation {r.id} {r.location}" for r in receptacles],
        [f"objectAtLocation {item.id} {item.location}" for item in items],
    ]
    goal = gdict[task_type]["pddl"].replace("#", "-").format(obj=target, recep=goal_type, toggle=goal_type)
    return "\n".join([
        "", f"(define (problem plan_{trial})", "(:domain alfred)",
        "(:objects", *(f"    {line}" for line in declared), ")",
        "(:init", *(f"    ({fact})" for group in facts for fact in sorted(group)), ")",
        goal,
    ])


def walkthrough(task_type, target, goal_type, receptacles, items):
    """The steps of a player who knows where everything is, in the names the player reads.

    Of all choices of target and place the one with the fewest steps, and of these the first in the alphabet.
    """
    everything = [*receptacles, *items]
    demangler = Demangler(game_infos={thing.id: SimpleNamespace(id=thing.id.lower()) for thing in everything})
    name = {thing.id: demangler.demangle_alfred_name(thing.id.lower()) for thing in everything}

    def visit(here, receptacle, opened, need_open):
        """Commands that take the player from a location to a receptacle and open it if need be."""
        steps = [] if here == receptacle.location else [f"go to {name[receptacle.id]}"]
        if need_open and receptacle.type in OPENABLE_CLASS_LIST and receptacle not in opened:
            opened.add(receptacle)
            steps.append(f"open {name[receptacle.id]}")
        return steps

    targets = [item for item in items if item.type == target]
    plans = []
    for goal in (thing for thing in everything if thing.type == goal_type):
        for fetched in permutations(targets, 2 if task_type == "pick_two_obj_and_place" else 1):
            opened, here, steps = set(), None, []
            for item in fetched:
                steps += visit(here, item.receptacle, opened, need_open=True)
                steps.append(f"take {name[item.id]} from {name[item.receptacle.id]}")
                here = item.receptacle.location
                if task_type in TREATMENTS:
                    verb, device_type, _ = TREATMENTS[task_type]
                    devices = [r for r in receptacles if r.type == device_type]
                    device = min(devices, key=lambda r: r.location != here)
                    steps += visit(here, device, opened, need_open=False)
                    steps.append(f"{verb} {name[item.id]} with {name[device.id]}")
                    here = device.location
                if task_type == "look_at_obj_in_light":
                    steps += visit(here, goal.receptacle, opened, need_open=False) + [f"use {name[goal.id]}"]
                else:
                    steps += visit(here, goal, opened, need_open=True)
                    steps.append(f"move {name[item.id]} to {name[goal.id]}")
                    here = goal.location
            plans.append(steps)
    return min(plans, key=lambda steps: (len(steps), steps))


def high_level_plan(steps):
    """The `plan.high_pddl` list of the official traj_data.json: one entry a step, then the closing NoOp."""
    actions = {"go": "GotoLocation", "open": "OpenObject", "take": "PickupObject", "move": "PutObject",
               "clean": "CleanObject", "heat": "HeatObject", "cool": "CoolObject", "use": "ToggleObject"}
    plan = []
    for index, step in enumerate(steps):
        verb, *words = step.split()
        arguments = [word for word in words if not word.isdigit() and word not in ("to", "from", "with")]
        plan.append({"discrete_action": {"action": actions[verb], "args": arguments}, "high_idx": index,
                     "planner_action": {"action": actions[verb]}})
    plan.append({"discrete_action": {"action": "NoOp", "args": []}, "high_idx": len(steps),
                 "planner_action": {"action": "End", "value": 1}})
    return plan


def build_game(split, task_type, target, goal_type, scene, hide, domain, grammar):
    """One game: (its folder below the games' root, traj_data as a dict, game as a dict)."""
    task = f"{task_type}-{target}-None-{goal_type}-{scene}"
    key = f"{split}/{task}"
    trial = f"trial_S{scene}_{number(key) >> 16:012x}"
    look = task_type == "look_at_obj_in_light"
    if not {target, goal_type} <= set(OBJECTS):
        raise ValueError(f"{key}: alfworld knows no {target} or no {goal_type}; correct the row in TASKS")
    if task_type in TREATMENTS and target not in VAL_ACTION_OBJECTS[TREATMENTS[task_type][2]]:
        raise ValueError(f"{key}: one cannot {TREATMENTS[task_type][0]} a {target}; correct the row in TASKS")
    if not look and target not in VAL_RECEPTACLE_OBJECTS[goal_type]:
        raise ValueError(f"{key}: a {target} does not go in a {goal_type}; correct the row in TASKS")

    receptacles = build_receptacles(scene)
    fixed = build_fixed_items(scene, receptacles)
    items = fixed + build_portable_items(scene, task_type, target, goal_type, hide, receptacles, key)
    rotation = number(key, "rotation") % 4
    start = location_id(0.0, 0.0, rotation, 30)
    if len({item.id for item in items}) < len(items) or start in {r.location for r in receptacles}:
        raise ValueError(f"{key}: two things at one place; change PORTABLE or the task's scene")
    steps = walkthrough(task_type, target, goal_type, receptacles, items)
    sentence = TASK_SENTENCES[task_type].format(obj=target.lower(), recep=goal_type.lower())
    traj_data = {
        "task_id": trial,
        "task_type": task_type,
        "pddl_params": {
            "mrecep_target": "",
            "object_sliced": False,
            "object_target": target,
            "parent_target": "" if look else goal_type,
            "toggle_target": goal_type if look else "",
        },
        "plan": {"high_pddl": high_level_plan(steps)},
        "scene": {
            "dirty_and_empty": False,
            "floor_plan": f"Starter{scene}",
            "init_action": {"action": "TeleportFull", "horizon": 30, "rotateOnTeleport": True,
                            "rotation": 90 * rotation, "x": 0.0, "y": 0.9, "z": 0.0},
            "object_toggles": [{"isOn": False, "objectType": goal_type}] if look else [],
            "random_seed": number(key) % 2**31,
            "scene_num": scene,
        },
        "turk_annotations": {
            "anns": [{"high_descs": [f"{step.capitalize()}." for step in steps], "task_desc": sentence}]
        },
    }
    # alfworld picks one of its templates with the global generator: set it, and leave it as it was.
    state = random.getstate()
    random.seed(number(key, "template"))
    grammar_with_task = add_task_to_grammar(grammar, traj_data)
    random.setstate(state)
    game = {
        "grammar": grammar_with_task,
        "pddl_domain": domain,
        "pddl_problem": pddl_problem(trial, task_type, target, goal_type, receptacles, items, start),
        "solvable": True,
        "walkthrough": steps,
    }
    return f"{split}/{task}/{trial}", traj_data, game


def build_files():
    """Every file of the starter games: {path below the games' root: bytes}."""
    domain = Path(ALFRED_PDDL_PATH).read_text(encoding="utf-8")
    grammar = Path(ALFRED_TWL2_PATH).read_text(encoding="utf-8")
    files = {}
    for split, rows_by_type in TASKS.items():
        rows = [(task_type, row) for task_type, text in rows_by_type.items() for row in text.split()]
        for index, (task_type, row) in enumerate(rows):
            target, goal_type, scene = row.split("-")
            hide = index % 2 == 1
            folder, traj_data, game = build_game(
                split, task_type, target, goal_type, int(scene), hide, domain, grammar)
            if f"{folder}/game.tw-pddl" in files:
                raise ValueError(f"TASKS[{split!r}][{task_type!r}] has {row} twice; take one out")
            for name, content in (("game.tw-pddl", game), ("traj_data.json", traj_data)):
                files[f"{folder}/{name}"] = (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
    return files


def differences(files, root):
    """What the folder has otherwise than it should: a list of sentences, empty if every byte is right.

    Names with a leading dot are passed over: data.py may keep its index of the games there.
    """
    paths = [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(".")]
    present = {path.relative_to(root).as_posix() for path in paths}
    found = [f"{name} is missing" for name in sorted(files.keys() - present)]
    found += [f"{name} is not one of the starter games" for name in sorted(present - files.keys())]
    both = sorted(files.keys() & present)
    return found + [f"{name} differs" for name in both if (root / name).read_bytes() != files[name]]


def main():
    parser = argparse.ArgumentParser(description="Write the starter games, or check that they are unchanged.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file differs")
    arguments = parser.parse_args()
    files = build_files()
    if arguments.check:
        found = differences(files, GAMES_DIR)
        for line in found:
            print(line, file=sys.stderr)
        if found:
            sys.exit(f"{GAMES_DIR}: {len(found)} files are wrong; run make_games.py without --check")
        print(f"{GAMES_DIR}: {len(files)} files, all as make_games.py makes them")
        return
    if GAMES_DIR.exists():
        shutil.rmtree(GAMES_DIR)
    for name, content in files.items():
        path = GAMES_DIR / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    size_mb = sum(map(len, files.values())) / 1e6
    print(f"{GAMES_DIR}: wrote {len(files) // 2} games, {size_mb:.1f} MB")


if __name__ == "__main__":
    main()
