"""Games that cannot be played: what a run does without them is a function of the files, the seed and the update alone."""

import asyncio
import itertools
import json
import random
import shutil
from pathlib import Path

import pytest
from conftest import run_command, settings
from game_copies import STARTER, out_of_reach, rewritten
from transformers import Qwen3Config
from test_resume import assert_same_run, metrics_of

import data
import eval as evaluation
from data import Game, SettingsError, batch_of_games
from environment import EnvironmentSettings, GameError, WorldPool
from rollout import RolloutSettings, games_of_update, playable_games


def numbered(count):
    return [Game(Path(f"/{number}"), str(number), "train", data.TASK_TYPES[0]) for number in range(count)]


def names(games):
    return [int(game.game_id) for game in games]


# --- the rule ---


def test_the_place_of_an_unplayable_game_is_taken_from_behind_the_window():
    games = numbered(10)
    unplayable = {Path("/4"), Path("/6"), Path("/9")}
    assert names(batch_of_games(games, 0, 3, unplayable)) == [0, 1, 2]
    assert names(batch_of_games(games, 1, 3, unplayable)) == [3, 5, 7]
    assert names(batch_of_games(games, 2, 3, unplayable)) == [7, 8, 0], "a game that stood in has its own turn all the same"
    assert names(batch_of_games(games, 3, 3, unplayable)) == [0, 1, 2], "the window stays where it was: 9, 0, 1"


def test_other_updates_keep_their_games():
    rng = random.Random(1)
    for _ in range(200):
        games, size = numbered(rng.randrange(1, 12)), rng.randrange(1, 5)
        unplayable = {game.path for game in games if rng.random() < 0.3}
        for update in range(8):
            window = batch_of_games(games, update, size)
            batch = batch_of_games(games, update, size, unplayable)
            if not unplayable & {game.path for game in window}:
                assert batch == window
            if size <= len(games):
                onward = [games[(update * size + place) % len(games)] for place in range(len(games))]
                assert batch == [game for game in onward if game.path not in unplayable][:size]
                assert len(set(batch)) == len(batch) == min(size, len(games) - len(unplayable))


def test_what_is_known_of_other_games_does_not_matter():
    """As a run finds them out: whatever was known before, and it finds the rest for its batch, the batch is the same."""
    games, unplayable = numbered(9), {Path("/1"), Path("/2"), Path("/5"), Path("/7")}
    for known in itertools.chain.from_iterable(itertools.combinations(unplayable, count) for count in range(5)):
        for update in range(9):
            found = set(known)
            while new := unplayable & {game.path for game in batch_of_games(games, update, 3, found)} - found:
                found |= new
            assert batch_of_games(games, update, 3, found) == batch_of_games(games, update, 3, unplayable)


# --- as a run draws them ---


@pytest.fixture
def games(tmp_path):
    """Eight training games; the third and the fourth are refused by grounding alone."""
    sources = [path for path in STARTER if path.parts[-4] == "train"][:8]
    games = []
    for number, source in enumerate(sources):
        make = out_of_reach if number in (2, 3) else rewritten
        games.append(Game(make(source, tmp_path / str(number)), str(number), "train", data.TASK_TYPES[0]))
    return games


def drawn(games, updates, ahead=()):
    """The games of these updates and how many of each update's own were left out, drawn in this order by one pool."""

    async def work(pool):
        await pool.compile_ahead([games[number].path for number in ahead])
        told = {}
        for update in updates:
            batch, left_out = await games_of_update(pool, games, update, 2)
            for game in batch:
                (await pool.open_group(game.path, 1)).close()
            told[update] = names(batch), [names(game for game in games if game.path in left_out)]
        return told

    with WorldPool(EnvironmentSettings(compilers=1)) as pool:
        return asyncio.run(work(pool))


def test_a_run_draws_the_same_games_whenever_it_finds_out_what_cannot_be_played(games):
    expected = {0: ([0, 1], [[]]), 1: ([4, 5], [[2, 3]]), 2: ([4, 5], [[]]), 3: ([6, 7], [[]]), 4: ([0, 1], [[]])}
    assert drawn(games, range(5)) == expected
    assert drawn(games, [1]) == {1: expected[1]}, "as a resumed run that knows nothing yet"
    assert drawn(games, [4, 2, 1, 0, 3]) == expected
    assert drawn(games, range(5), ahead=range(8)) == expected


def test_a_batch_is_smaller_when_no_game_is_left_to_fill_it_and_none_is_an_error(games):
    async def work(pool):
        batch, left_out = await games_of_update(pool, games[1:4], 0, 3)
        assert names(batch) == [1] and len(left_out) == 2
        with pytest.raises(GameError, match="none of 2 games can be played; the first: .*cannot be reached"):
            await games_of_update(pool, games[2:4], 0, 1)

    with WorldPool(EnvironmentSettings(compilers=1)) as pool:
        asyncio.run(work(pool))


def test_games_left_out_at_the_start_are_told_by_kind(games, tmp_path, capsys):
    move = ('template :: "move {o} to', 'template :: "put {o} in/on')
    old = [Game(rewritten(games[0].path, tmp_path / f"old{number}", grammar=move), "old", "train", "x") for number in range(5)]

    async def work(pool):
        assert await playable_games(pool, [*games, *old]) == games
        assert await playable_games(pool, [*games, *old], ready=True) == games[:2] + games[4:]
        with pytest.raises(GameError, match="none of 5 games can be played"):
            await playable_games(pool, old)

    with WorldPool(EnvironmentSettings(compilers=1)) as pool:
        asyncio.run(work(pool))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(", such as ")[0] for line in lines] == [
        "left out: 5 games", "left out: 2 games", "left out: 5 games", "left out: 5 games",
    ]  # fmt: skip
    assert "cannot be reached" in lines[1] and "an older data release" in lines[2] and lines[2].endswith("and 2 more")


def test_an_evaluation_knows_of_such_a_game_before_the_engine_starts(games, tmp_path, qwen35_tokenizer, monkeypatch):
    qwen35_tokenizer.save_pretrained(tmp_path / "model")
    Qwen3Config().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(evaluation.Sampler, "start", None)
    play = RolloutSettings(base_model=str(tmp_path / "model"), dtype="float32")
    model = evaluation.describe_model(evaluation.EvalSettings(), play.base_model)
    with pytest.raises(SettingsError, match="an evaluation leaves no game out"):
        asyncio.run(evaluation.play_games(games, None, model, evaluation.EvalSettings(), play, EnvironmentSettings(compilers=1)))


@pytest.mark.slow
def test_a_resumed_run_is_the_unbroken_one_with_a_game_that_only_grounding_refuses(warm_model, tmp_path):
    root = tmp_path / "games"
    for source in [path for path in STARTER if path.parts[-4] == "train"][:6]:
        shutil.copytree(source.parent, root / Path(*source.parts[-4:-1]), ignore=shutil.ignore_patterns(".game*"))
    order = data.shuffle_games(data.find_games(root, "train"), 42)
    out_of_reach(order[3].path, order[3].path.parent)
    more = ("--data-root", root, "--save-every", 1)
    for name in ("unbroken", "broken"):
        (tmp_path / name).mkdir()
    told = run_command(*settings(warm_model, 3), *more, cwd=tmp_path / "unbroken")
    assert told.count("goes on without") == 1 and f"update 2 goes on without {order[3].path}: not understood: the goal" in told
    run_command(*settings(warm_model, 1), *more, cwd=tmp_path / "broken")
    run_command("train.py", "--resume", "runs/one", "--max-steps", 3, cwd=tmp_path / "broken")
    assert [line["rollout/games_left_out"] for line in metrics_of(tmp_path / "unbroken")] == [0, 1, 0]
    assert_same_run(tmp_path / "unbroken", tmp_path / "broken", 3)
    rollouts = (tmp_path / "unbroken/runs/one/rollouts/update-0002.jsonl").read_text().splitlines()
    played = dict.fromkeys(json.loads(line)["game_id"] for line in rollouts)
    assert list(played) == [order[2].game_id, order[4].game_id]
