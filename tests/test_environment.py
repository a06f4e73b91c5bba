"""The compiled world against stock TextWorld, and the worker processes under kill -9, hang and bad input.

Stock TextWorld (`stock_world.py`) is the reference; the committed starter games are enough for everything but the
slow check, which plays every official game (`ALFWORLD_DATA` or `datasets/alfworld`): pytest -m slow -s -k official.
"""

import ast
import asyncio
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import stock_world

import data
import environment
from environment import EnvironmentFault, EnvironmentSettings, GameError, World, WorldPool, WorldState

ROOT = Path(__file__).resolve().parent.parent
STARTER = sorted((ROOT / "datasets" / "starter" / "json_2.1.1").glob("*/*/*/game.tw-pddl"))
OFFICIAL = Path(os.environ.get("ALFWORLD_DATA", ROOT / "datasets" / "alfworld")) / "json_2.1.1"
TASK_TYPES = sorted({path.parts[-3].split("-")[0] for path in STARTER})


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    """One starter game of each task type in a folder of its own, compiled there."""
    folder = tmp_path_factory.mktemp("games")
    paths = []
    for task_type in TASK_TYPES:
        source = next(path for path in STARTER if path.parts[-3].startswith(task_type + "-"))
        target = folder / "train" / source.parts[-3] / source.parts[-2] / source.name
        target.parent.mkdir(parents=True)
        shutil.copyfile(source, target)
        environment.compile_game(target)
        paths.append(target)
    return paths


@pytest.fixture(scope="module")
def stock():
    """Stock TextWorld without its repeated work; the hash seed test below holds the untouched one against ours."""
    stock_world.memoise()
    return stock_world.StockWorld()


def walkthrough(game_file):
    return json.loads(Path(game_file).read_text())["walkthrough"]


def rewritten(game_file, folder, **texts):
    """A copy of a game with some of its texts replaced; a value is (old, new)."""
    game = json.loads(game_file.read_text())
    for key, (old, new) in texts.items():
        assert old in game[key]
        game[key] = game[key].replace(old, new)
    copy = folder / "game.tw-pddl"
    copy.write_text(json.dumps(game))
    return copy


def run(work, **settings):
    """Run `await work(pool)` in a pool and a loop of its own."""
    with WorldPool(EnvironmentSettings(**{"compilers": 1, **settings})) as pool:
        return asyncio.run(work(pool))


def processes(pool):
    return [worker.process for worker in pool._workers + pool._compilers]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


# ------------------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_texts_and_states_are_those_of_stock_textworld(games, stock, task_type):
    game_file = games[TASK_TYPES.index(task_type)]
    stock.load(game_file)
    world = World(environment.compile_game(game_file))
    actions = walkthrough(game_file)
    steps, found = stock_world.difference(stock, world, actions, random.Random(1))
    assert not found and steps == len(actions) + 2
    assert stock.step("look")[2:] == (1, True, True)
    steps, found = stock_world.difference(stock, world, 60, random.Random(2))
    assert not found and steps == 60


def test_objects_left_beside_where_they_were_are_told_as_stock_tells_them(tmp_path, games, stock):
    """An object moved between two receptacles of one location is the one case in which `look` lists the floor."""
    game_file = games[TASK_TYPES.index("pick_and_place_simple")]
    problem = json.loads(game_file.read_text())["pddl_problem"]
    places = [line.split() for line in problem.splitlines() if line.strip().startswith("(receptacleAtLocation")]
    kept, moved = places[0][2], places[1:]
    for fact, receptacle, location in moved:
        problem = problem.replace(f"{fact} {receptacle} {location}", f"{fact} {receptacle} {kept}")
    original = json.loads(game_file.read_text())["pddl_problem"]
    everything_in_one_place = rewritten(game_file, tmp_path, pddl_problem=(original, problem))
    stock.load(everything_in_one_place)
    world = World(environment.compile_game(everything_in_one_place))
    seen = []
    for seed in range(3):
        steps, found = stock_world.difference(stock, world, 60, random.Random(seed))
        assert not found, found
        seen += [stock.step("look")[0]]
    assert any("Next to it, you see a " in text for text in seen), "the case never came up"


def test_stock_texts_do_not_depend_on_the_hash_seed_nor_do_ours(games):
    script = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "import environment, stock_world, hashlib, pathlib\n"
        "game = pathlib.Path(sys.argv[3]); stock = stock_world.StockWorld(); stock.load(game); first = stock.reset()\n"
        "world = environment.World(environment.compile_game(game)); state, reply = world.start(); told = []\n"
        "for action in [first[1][0], 'look', first[1][1], 'inventory']:\n"
        "    state, reply = world.step(state, reply, action); told.append(reply)\n"
        "    assert reply[:5] == stock.step(action), action\n"
        "print(hashlib.sha256(repr(told).encode()).hexdigest())\n"
    )
    told = set()
    for seed in ("0", "1"):
        command = [sys.executable, "-c", script, str(ROOT), str(ROOT / "tests"), str(games[0])]
        told.add(subprocess.check_output(command, env={**os.environ, "PYTHONHASHSEED": seed}, text=True))
    assert len(told) == 1


@pytest.mark.slow
def test_every_official_game_is_that_of_stock_textworld(capsys):
    """4,027 games with their walkthroughs, every eighth (and all for validation) with 50 random actions: hours."""
    game_files = sorted(OFFICIAL.glob("*/*/*/game.tw-pddl"), key=lambda path: (path.parts[-4] == "train", path))
    if not game_files:
        pytest.skip(f"no official games below {OFFICIAL}")
    stock_world.memoise()
    stock = stock_world.StockWorld()
    counts = {"walkthrough": [0, 0], "random": [0, 0]}
    differences = []
    for number, game_file in enumerate(game_files):
        stock.load(game_file)
        world = World(environment.compile_game(game_file))
        plays = {"walkthrough": walkthrough(game_file)}
        if game_file.parts[-4] != "train" or number % 8 == 0:
            plays["random"] = 50
        for kind, actions in plays.items():
            rng = random.Random(f"{kind} {game_file.parent.name}")
            steps, found = stock_world.difference(stock, world, actions, rng)
            counts[kind] = [counts[kind][0] + 1, counts[kind][1] + steps]
            differences += [f"{game_file}: {found}"] * bool(found)
    with capsys.disabled():
        print({kind: f"{games} games, {steps} steps" for kind, (games, steps) in counts.items()}, len(differences))
    assert not differences


# ------------------------------------------------------------------------------------------------- groups


def test_a_group_starts_alike_and_its_branches_go_their_own_ways(games):
    actions = walkthrough(games[0])

    async def work(pool):
        group = await pool.open_group(games[0], 3)
        first, task = group.first, group.task
        world = World(environment.compile_game(games[0]))
        assert first == WorldState(*world.start()[1]) and f"Your task is to: {task}" in first.observation
        assert list(first.admissible) == sorted(set(first.admissible))
        assert {"help", "look", "inventory"} <= set(first.admissible)
        moved = await group.step(0, actions[0])
        assert moved.observation.startswith("You arrive at")
        still = await group.step(1, "no such thing")
        assert still == WorldState("Nothing happens.", first.admissible, 0, False, False)
        assert (await group.step(2, actions[0])) == moved
        states = [moved]
        for action in actions[1:]:
            states.append(await group.step(0, action))
        assert [state.done for state in states] == [False] * (len(actions) - 1) + [True]
        assert (states[-1].score, states[-1].won) == (1, True)
        assert await group.step(0, "look") == states[-1], "a finished game stays as it is"
        group.finish(0)
        with pytest.raises(ValueError, match="finished"):
            await group.step(0, "look")
        step = asyncio.ensure_future(group.step(1, "look"))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="under way"):
            await group.step(1, "look")
        await step
        group.close()

    run(work)


def test_texts_do_not_depend_on_worker_order_or_company(games):
    async def play(pool, order):
        groups = {game: await pool.open_group(game, 2) for game in order}

        async def branch(game, number):
            rng = random.Random(f"{game} {number}")
            state, told = groups[game].first, []
            for _ in range(15):
                action = stock_world.random_action(rng, state.admissible, state.admissible)
                state = await groups[game].step(number, action)
                told.append(state)
            return told

        branches = [(game, number) for game in order for number in range(2)]
        return dict(zip(branches, await asyncio.gather(*(branch(*each) for each in branches))))

    together = run(lambda pool: play(pool, games), workers=2)
    assert run(lambda pool: play(pool, games[::-1]), workers=1) == together
    for game in games[:2]:
        alone = run(lambda pool, game=game: play(pool, [game]))
        assert alone == {key: told for key, told in together.items() if key[0] == game}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_costs_no_branch_anything(games, how):
    actions = walkthrough(games[0])

    async def work(pool):
        group = await pool.open_group(games[0], 4)
        told = []
        for number, action in enumerate(actions):
            if number == len(actions) // 2:
                steps = [asyncio.ensure_future(group.step(branch, action)) for branch in range(4)]
                await asyncio.sleep(0)  # the steps are on their way
                os.kill(pool._workers[0].process.pid, how)
                states = await asyncio.gather(*steps)
            else:
                states = await asyncio.gather(*(group.step(branch, action) for branch in range(4)))
            assert len(set(states)) == 1
            told.append(states[0])
        return told, pool.faults

    world = World(environment.compile_game(games[0]))
    state, reply = world.start()
    expected = []
    for action in actions:
        state, reply = world.step(state, reply, action)
        expected.append(WorldState(*reply))
    started = time.monotonic()
    told, faults = run(work, step_timeout_seconds=4.0)
    assert told == expected and faults == 1
    assert time.monotonic() - started < 60


def test_too_many_lost_workers_stop_the_run_with_the_reason(games):
    async def work(pool):
        group = await pool.open_group(games[0], 1)
        for _ in range(3):
            pool._workers[0].process.kill()
            await group.step(0, "look")

    with pytest.raises(EnvironmentFault, match="3 environment faults, the last: worker .* died with exit status -9"):
        run(work, max_faults=2)


def test_a_compiler_that_dies_is_replaced(tmp_path, games):
    game_file = rewritten(games[0], tmp_path, pddl_problem=("(:init", "(:init "))

    async def work(pool):
        pool._compilers[0].process.kill()
        group = await pool.open_group(game_file, 1)
        return group.task, pool.faults

    task, faults = run(work)
    assert task and faults == 1


def test_a_game_that_takes_compilers_down_is_named(tmp_path, games):
    game_file = rewritten(games[0], tmp_path)
    pids = set()

    async def work(pool):
        opening = asyncio.ensure_future(pool.open_group(game_file, 1))
        while not opening.done():
            await asyncio.sleep(0.02)
            compiler = pool._compilers[0]
            asked = compiler._loop is not None and not compiler._queue and not compiler.lost
            if asked and compiler.process.pid not in pids:
                pids.add(compiler.process.pid)
                compiler.process.kill()
        with pytest.raises(GameError, match="3 compilers were lost over it"):
            await opening
        assert (await pool.open_group(games[1], 1)).task

    run(work)
    assert len(pids) == 3


# ------------------------------------------------------------------------------------------------- processes


def test_no_process_is_left_after_an_exception(games):
    pools = []

    async def work(pool):
        pools.append((pool, processes(pool)))
        await pool.open_group(games[0], 2)
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        run(work)
    assert not [process for process in pools[0][1] if alive(process.pid)]
    with pytest.raises(EnvironmentFault, match="closed"):
        asyncio.run(pools[0][0].open_group(games[0], 1))


def test_a_pool_without_close_leaves_no_process_when_its_parent_is_killed(games):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import asyncio, environment, os, signal\n"
        "async def work():\n"
        "    await pool.open_group(sys.argv[2], 1)\n"
        "    print(*(worker.process.pid for worker in pool._workers + pool._compilers), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "pool = environment.WorldPool(); asyncio.run(work())\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(ROOT), str(games[0])], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in done.stdout.split()]
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 3 and not any(map(alive, pids))


def test_workers_start_light(games):
    """What steps branches loads no library at all, and nothing here loads torch."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import environment, pathlib\n"
        "environment.World(environment.compile_game(pathlib.Path(sys.argv[2]))).start()\n"
        "print({'torch', 'vllm', 'textworld', 'alfworld', 'numpy'} & set(sys.modules))\n"
    )
    assert subprocess.check_output([sys.executable, "-c", script, str(ROOT), str(games[0])], text=True) == "set()\n"


def test_a_second_loop_can_use_the_pool(games):
    with WorldPool(EnvironmentSettings(compilers=1)) as pool:
        first = asyncio.run(pool.open_group(games[0], 1)).first
        assert asyncio.run(pool.open_group(games[0], 1)).first == first
        assert pool.faults == 0


def test_settings_refuse_what_cannot_be():
    for name, value in {"workers": 0, "compilers": -1, "step_timeout_seconds": 0.0, "max_faults": -1}.items():
        with pytest.raises(ValueError, match=f"--{name.replace(chr(95), chr(45))} is {value}"):
            EnvironmentSettings(**{name: value})


# ------------------------------------------------------------------------------------------------- the cache


def test_the_cache_is_used_and_anything_wrong_with_it_is_repaired(tmp_path, games, monkeypatch):
    game_file = rewritten(games[0], tmp_path)
    compiled = environment.compile_game(game_file)
    cache = tmp_path / environment.CACHE_NAME
    good = cache.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(environment, "_compile", None)  # a second compilation would fail
        assert environment.compile_game(game_file) == compiled
    for bad in (b"", good[: len(good) // 2], good[:-1] + bytes([good[-1] ^ 1]), b"\0" * 100):
        cache.write_bytes(bad)
        assert environment.compile_game(game_file) == compiled and cache.read_bytes() == good
    with monkeypatch.context() as patched:
        patched.setattr(environment, "_versions", lambda: b"of other packages")
        assert data.saved(cache, environment._read_game(game_file)[1]) is None
    task = environment._split_task(json.loads(game_file.read_text())["grammar"])[1]
    rewritten(game_file, tmp_path, grammar=(task, environment.TASK_PREFIX + "do something else."))
    assert World(environment.compile_game(game_file)).task == "do something else."


@pytest.mark.parametrize(("owner", "name"), [(Path, "write_bytes"), (os, "replace")])
def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, games, monkeypatch, owner, name):
    game_file = rewritten(games[0], tmp_path)

    def refuse(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr(owner, name, refuse)
    assert World(environment.compile_game(game_file)).start()
    assert [path.name for path in tmp_path.iterdir()] == ["game.tw-pddl"]


def test_two_processes_may_compile_one_game_at_once(tmp_path, games):
    game_file = rewritten(games[0], tmp_path)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import environment, pathlib; environment.compile_game(pathlib.Path(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", script, str(ROOT), str(game_file)]
    assert [process.wait() for process in [subprocess.Popen(command) for _ in range(2)]] == [0, 0]
    assert data.saved(tmp_path / environment.CACHE_NAME, environment._read_game(game_file)[1]) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == [environment.CACHE_NAME, "game.tw-pddl"]
    modes = [(tmp_path / name).stat().st_mode for name in (environment.CACHE_NAME, "game.tw-pddl")]
    assert modes[0] == modes[1]  # whoever may read the game may read what was made of it


def test_a_second_game_goes_to_the_compiler_that_is_idle(tmp_path, games):
    files = []
    for number in (0, 1):
        (tmp_path / str(number)).mkdir()
        files.append(rewritten(games[number], tmp_path / str(number)))

    async def work(pool):
        opening = [asyncio.ensure_future(pool.open_group(files[0], 1))]
        while not any(compiler._loop and not compiler._queue for compiler in pool._compilers):
            await asyncio.sleep(0.005)
        opening.append(asyncio.ensure_future(pool.open_group(files[1], 1)))
        while not opening[0].done() and sorted(compiler.load for compiler in pool._compilers) != [1, 1]:
            await asyncio.sleep(0.005)
        assert not opening[0].done()
        await asyncio.gather(*opening)
        assert [compiler.load for compiler in pool._compilers] == [0, 0]

    run(work, compilers=2)


def test_a_prefetched_game_is_ready_when_it_is_opened(tmp_path, games):
    game_file = rewritten(games[0], tmp_path)

    async def work(pool):
        pool.prefetch([game_file, tmp_path / "missing" / "game.tw-pddl"])
        await asyncio.wait(pool._ahead.values())
        for compiler in pool._compilers:
            compiler.ask = None  # from here on a compilation would fail
        (tmp_path / environment.CACHE_NAME).unlink()  # not even the disk is needed
        with pytest.raises(GameError, match="missing"):
            await pool.open_group(tmp_path / "missing" / "game.tw-pddl", 1)
        return (await pool.open_group(game_file, 1)).first.observation

    assert run(work).startswith("-= Welcome")


# ------------------------------------------------------------------------------------------------- bad input


def refusal(game_file):
    with pytest.raises(GameError) as caught:
        environment.compile_game(game_file)
    text = str(caught.value)
    assert str(game_file) in text and "alfworld-download" in text and "\n" not in text
    return text


def test_a_missing_broken_or_foreign_file_is_refused_by_name_and_remedy(tmp_path, games):
    game_file = tmp_path / "game.tw-pddl"
    assert "No such file" in refusal(game_file)
    content = games[0].read_bytes()
    for bad in (b"", content[: len(content) // 2], b"\xff\xfe\x00", b"[]", b"7", b'{"pddl_domain": "", "grammar": ""}'):
        game_file.write_bytes(bad)
        assert "broken or cut short" in refusal(game_file)
    game_file.write_text(json.dumps({**json.loads(content), "grammar": None}))
    assert "broken or cut short" in refusal(game_file)


def test_a_game_of_an_older_release_is_refused(tmp_path, games):
    old = rewritten(games[0], tmp_path, grammar=('template :: "move {o} to {r}"', 'template :: "put {o} in/on {r}"'))
    assert "older data release" in refusal(old) and "2.1.3" in refusal(old)


@pytest.mark.parametrize(
    "texts, reason",
    [
        ({"grammar": ("You open the {r.name}", "You open the {r.name.upper()}")}, "expression"),
        ({"grammar": ("You open the {r.name}", "You open the {len(r.name)}")}, "expression"),
        ({"grammar": ("#examineReceptacle.feedback#", "#no.such.rule#")}, "no rule"),
        ({"grammar": ("You open the {r.name}", "You open the {q.name}")}, "names ['q'], which nothing stands for"),
        ({"grammar": ('"intro": [', '"intro": [{"rhs": "#intro#"}], "other": [')}, "'intro' uses itself"),
        ({"grammar": ("Your task is to: ", "Do: ")}, "task rule"),
        ({"grammar": ('"task": [', '"errand": [')}, "0 task rules"),
        ({"grammar": ("| inreceptacle(o:object, r:receptacle)", "| inreceptacle(o:object, r:location)")}, "two types"),
        ({"grammar": ('"go to [', '"#go# [')}, "no rule 'go'"),
        ({"grammar": ('template :: "take {o} from {r}"', 'template :: "take {r}"')}, "two meanings"),
        ({"pddl_domain": ("(:action help", "(:action help (")}, "cannot be compiled"),
        ({"pddl_problem": ("(:goal", "(:gaol")}, "the problem has no :goal"),
        ({"pddl_problem": ("(atLocation agent1", ";(atLocation agent1")}, "goal cannot be reached"),
    ],
)
def test_a_language_that_is_not_known_is_refused_not_guessed(tmp_path, games, texts, reason):
    assert reason in refusal(rewritten(games[0], tmp_path, **texts))


def test_nothing_of_a_game_file_is_evaluated(tmp_path, games):
    trap = tmp_path / "trap"
    expression = f"open('{trap}', 'w')"
    refusal(rewritten(games[0], tmp_path, grammar=("You open the {r.name}", f"You open the {{{expression}}}")))
    assert not trap.exists()
    tree = ast.parse(Path(environment.__file__).read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not names & {"eval", "exec", "compile"}


def test_check_names_the_games_that_cannot_be_compiled(tmp_path, games):
    bad = rewritten(games[0], tmp_path, grammar=("You open the {r.name}", "You open the {r.name.upper()}"))
    missing = tmp_path / "missing" / "game.tw-pddl"
    found = run(lambda pool: pool.check([*games, bad, missing]))
    assert set(found) == {bad, missing} and "expression" in found[bad] and "No such file" in found[missing]


# ------------------------------------------------------------------------------------------------- cost


def test_branches_cost_little_and_games_leave_nothing_behind(games):
    """A branch is an integer and a reply, far below 100 KB; opened and closed games leave no objects and no cycles."""
    server = environment._Server()
    compiled = environment.compile_game(games[0])
    server.open(0, compiled, {branch: [] for branch in range(8)})
    actions = walkthrough(games[0])
    gc.collect()
    gc.disable()  # as in a worker
    try:
        for number in range(1, 60):
            server.open(number, compiled, {branch: [] for branch in range(8)})
            for action in actions:
                server.step(number, 0, action)
            server.close(number)
            if number == 30:
                before = len(gc.get_objects())
        assert len(gc.get_objects()) - before < 50
        assert gc.collect() < 50
    finally:
        gc.enable()
    state, reply = server._branches[0][1]
    assert sys.getsizeof(state) + sum(map(sys.getsizeof, reply)) + sum(map(sys.getsizeof, reply[1])) < 100_000
