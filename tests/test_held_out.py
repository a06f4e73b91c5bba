"""Training games that are kept back: which, whatever the order, the seed and the rest of the split."""

import random
from collections import Counter
from pathlib import Path

import pytest

from data import HELD_OUT, TASK_TYPES, DataError, Game, hold_out


def games(number):
    return [Game(Path(f"/x/{i}"), f"task-{i}/trial", "train", TASK_TYPES[i % 7 % 6]) for i in range(number)]


def test_held_out_games_are_balanced_and_no_longer_trained_on():
    every = games(100)
    kept, held = hold_out(every, 20)
    assert len(held) == 20 and len(kept) == 80
    assert {game.game_id for game in kept} | {game.game_id for game in held} == {game.game_id for game in every}
    assert max(counts := Counter(game.task_type for game in held).values()) - min(counts) <= 1
    assert {game.split for game in held} == {HELD_OUT} and {game.split for game in kept} == {"train"}
    assert [game for game in every if game in kept] == kept  # in the order they had


def test_which_games_are_held_out_depends_on_their_ids_alone():
    every = games(100)
    shuffled = random.Random(1).sample(every, 100)
    assert hold_out(every, 20)[1] == hold_out(shuffled, 20)[1]
    few, more = ({game.game_id for game in hold_out(every, number)[1]} for number in (20, 30))
    assert few < more


def test_nothing_is_held_out_by_default_and_never_everything():
    every = games(10)
    assert hold_out(every, 0) == (every, [])
    with pytest.raises(DataError, match="--held-out-games is 10; it must be below the number of training games, 10"):
        hold_out(every, 10)


def test_a_task_type_with_few_games_leaves_the_rest_to_the_others():
    some = [Game(Path("/x"), f"a{i}/t", "train", TASK_TYPES[0]) for i in range(20)]
    rare = [Game(Path("/x"), "b/t", "train", TASK_TYPES[1])]
    held = hold_out(some + rare, 10)[1]
    assert Counter(game.task_type for game in held) == {TASK_TYPES[0]: 9, TASK_TYPES[1]: 1}
