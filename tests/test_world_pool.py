"""Groups of branches and the worker processes: under kill -9 and hang, and with games that cannot be played."""

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import stock_world
from game_copies import ROOT, compiled_games, out_of_reach, rewritten, walkthrough

import environment
from environment import EnvironmentFault, EnvironmentSettings, GameError, World, WorldPool, WorldState


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    """One starter game of each task type in a folder of its own, compiled there."""
    return compiled_games(tmp_path_factory.mktemp("games"))


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


# --- groups ---


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
        assert still == WorldState("Nothing happens.", first.admissible, 0, False, False, first.state_id)
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


# --- processes ---


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


# --- games made ready ---


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


def test_check_names_the_games_that_cannot_be_compiled(tmp_path, games):
    bad = rewritten(games[0], tmp_path, grammar=("You open the {r.name}", "You open the {r.name.upper()}"))
    missing = tmp_path / "missing" / "game.tw-pddl"
    found = run(lambda pool: pool.check([*games, bad, missing]))
    assert set(found) == {bad, missing} and "expression" in found[bad] and "No such file" in found[missing]


def test_ready_games_need_no_compiler_any_more_and_the_others_are_named(tmp_path, games):
    good, bad = rewritten(games[0], tmp_path / "good"), out_of_reach(games[1], tmp_path / "bad")

    async def work(pool):
        assert await pool.check([good, bad]) == {}, "only grounding shows it"
        found = await pool.ready([good, bad, good])
        assert list(found) == [bad] and "the goal cannot be reached" in found[bad] and pool.unplayable == found
        for compiler in pool._compilers:
            compiler.ask = None
        (good.parent / environment.CACHE_NAME).unlink()
        assert (await pool.open_group(good, 1)).task

    run(work)


def test_check_tells_what_grounding_shows_if_it_is_asked_to(tmp_path, games):
    bad = out_of_reach(games[0], tmp_path)
    found = run(lambda pool: pool.check([games[0], bad], ground=True))
    assert list(found) == [bad] and "the goal cannot be reached" in found[bad]


def test_games_are_compiled_ahead_by_a_process_that_gives_way(tmp_path, games):
    """In order, onto the disk, without a compiler that others may ask; bad games are noted and no fault is counted."""
    files = [rewritten(game, tmp_path / str(number)) for number, game in enumerate(games[:3])]
    files.insert(1, out_of_reach(games[3], tmp_path / "bad"))
    files.insert(2, tmp_path / "missing" / "game.tw-pddl")

    async def work(pool):
        compilers = [compiler.ask for compiler in pool._compilers]
        for compiler in pool._compilers:
            compiler.ask = None
        task = asyncio.ensure_future(pool.compile_ahead(files))
        while not pool._background:
            await asyncio.sleep(0.01)
        assert os.getpriority(os.PRIO_PROCESS, pool._background[0].process.pid) == 19
        await task
        assert not alive(pool._background[0].process.pid), "when all is done its memory is free"
        for compiler, ask in zip(pool._compilers, compilers):
            compiler.ask = ask
        assert [(file.parent / environment.CACHE_NAME).exists() for file in files] == [True, False, False, True, True]
        assert list(pool.unplayable) == files[1:3] and "cannot be reached" in pool.unplayable[files[1]]
        return pool.faults, pool._background[0].process

    faults, process = run(work)
    assert faults == 0 and not alive(process.pid)


def test_a_game_asked_for_now_does_not_wait_for_those_compiled_ahead(tmp_path, games):
    ahead = [rewritten(games[0], tmp_path / str(number)) for number in range(30)]
    wanted = rewritten(games[1], tmp_path / "wanted")

    async def work(pool):
        task = asyncio.ensure_future(pool.compile_ahead(ahead))
        while not pool._background or not pool._background[0]._under_way:
            await asyncio.sleep(0.01)
        await pool.open_group(wanted, 1)
        done = sum((file.parent / environment.CACHE_NAME).exists() for file in ahead)
        task.cancel()
        return done

    assert run(work) < len(ahead)


def test_losing_the_process_that_compiles_ahead_costs_one_game_at_most(tmp_path, games):
    files = [rewritten(game, tmp_path / str(number)) for number, game in enumerate(games[:3])]

    async def work(pool):
        task = asyncio.ensure_future(pool.compile_ahead(files))
        while not pool._background or not pool._background[0]._under_way:
            await asyncio.sleep(0.005)
        pool._background[0].process.kill()
        await task
        return pool.faults, pool.unplayable

    assert run(work) == (0, {})
    assert sum((file.parent / environment.CACHE_NAME).exists() for file in files) >= 2


def test_a_pool_that_closes_stops_compiling_ahead(tmp_path, games):
    files = [rewritten(games[0], tmp_path / str(number)) for number in range(20)]

    async def work(pool):
        task = asyncio.ensure_future(pool.compile_ahead(files))
        while not pool._background or not pool._background[0]._under_way:
            await asyncio.sleep(0.005)
        pool.close()
        await task
        return pool._background

    [process] = run(work)
    assert not alive(process.process.pid) and not all((file.parent / environment.CACHE_NAME).exists() for file in files)


# --- cost ---


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
