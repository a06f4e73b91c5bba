"""The id of a world's state: equal wherever the facts are, and only there."""

from pathlib import Path

from environment import World, compile_game

ROOT = Path(__file__).resolve().parent.parent
GAMES = sorted((ROOT / "datasets/starter/json_2.1.1/train").rglob("game.tw-pddl"))[:6]


def test_a_state_id_stands_for_the_facts_alone():
    """Over random walks through several games: ids are equal exactly where the bit sets are."""
    import random

    for number, path in enumerate(GAMES):
        world, rng = World(compile_game(path)), random.Random(number)
        ids, returned = {}, 0
        for _ in range(4):  # branches
            state, reply = world.start()
            for _ in range(40):
                returned += state in ids
                assert ids.setdefault(state, reply[5]) == reply[5]
                state, reply = world.step(state, reply, rng.choice(reply[1]))
        assert len(set(ids.values())) == len(ids) and returned > 0


def test_what_does_nothing_leaves_the_state_id():
    world = World(compile_game(GAMES[0]))
    state, first = world.start()
    for command in ("fly to the moon", "look", "inventory"):
        state, reply = world.step(state, first, command)
        assert reply[5] == first[5]
    moved = next(command for command in first[1] if command.startswith("go to"))
    assert world.step(state, first, moved)[1][5] != first[5]


def test_ids_are_the_same_in_every_branch_worker_and_replay(run, starter_games):
    from environment import EnvironmentSettings, WorldPool

    async def walk(pool):
        group = await pool.open_group(starter_games[0].path, 2)
        ids = [[group.first.state_id] for _ in range(2)]
        moves = [command for command in group.first.admissible if command.startswith("go to")][:3]
        for move in moves:
            for branch in range(2):
                ids[branch].append((await group.step(branch, move)).state_id)
        group.close()
        return ids

    found = []
    for workers in (1, 2):
        with WorldPool(EnvironmentSettings(workers=workers)) as pool:
            found += run(walk(pool))
    assert all(ids == found[0] for ids in found) and len(set(found[0])) == 4
