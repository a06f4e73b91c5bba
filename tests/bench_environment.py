"""The compiled world against stock TextWorld, side by side in one process on one core, as a table.

    python tests/bench_environment.py --data-root datasets/alfworld --games 42

Times are CPU seconds of this process, so that other work on the machine does not count; the libraries' imports and
the one parse of the grammar all games share are done before. Stock is untouched TextWorld under alfworld's demangler.
A cold group is read, grounded and compiled, a warm one is read from its cache; both include the first observation of
8 branches. Stock's 8 environments each load and reset; all 8 are run for the first game of each task type, for the
others one is run and counted eight times (the table says how far 8 runs are from 8 times one).
"""

import argparse
import asyncio
import gc
import random
import shutil
import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stock_world

import environment
from environment import EnvironmentSettings, World, WorldPool

GROUP_SIZE = 8


def pick_games(data_root, count):
    """`count` games, as many of each task type, drawn with a fixed seed."""
    by_type = {}
    for path in sorted(data_root.rglob("game.tw-pddl")):
        if "movable" not in str(path) and "Sliced" not in str(path):
            by_type.setdefault(path.parts[-3].split("-")[0], []).append(path)
    if not by_type:
        raise SystemExit(f"no game.tw-pddl below {data_root}")
    rng = random.Random(0)
    for paths in by_type.values():
        rng.shuffle(paths)
    turns = range(-(-count // len(by_type)))
    return [paths[turn] for turn in turns for paths in by_type.values() if turn < len(paths)][:count]


def cpu_seconds(work):
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def resident_mb():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def open_world(game_file):
    world = World(environment.compile_game(game_file))
    return world, [world.start() for _ in range(GROUP_SIZE)]


def measure_games(game_files, steps):
    """Per game: seconds of 8 stock environments, of a cold and a warm group, and of a stock and a compiled step."""
    stock = stock_world.StockWorld()
    open_world(game_files[0])[1]
    (game_files[0].parent / environment.CACHE_NAME).unlink()
    rows, linear = {}, []
    for number, game_file in enumerate(game_files):
        def ready():
            stock.load(game_file)
            return stock.reset()

        one, expected = cpu_seconds(ready)
        eight = GROUP_SIZE * one
        kind = game_file.parts[-3].split("-")[0]
        if kind not in rows:
            eight = one + sum(cpu_seconds(ready)[0] for _ in range(GROUP_SIZE - 1))
            linear.append(eight / (GROUP_SIZE * one))
        gc.collect()
        gc.freeze()  # stock's heap is not ours to sweep: a worker has none of it
        gc.disable()  # nor does a worker sweep while it compiles
        cold, _ = cpu_seconds(lambda: open_world(game_file))
        gc.enable()
        warm, (world, branches) = cpu_seconds(lambda: open_world(game_file))
        assert branches[0][1][:5] == expected
        rng = random.Random(number)
        state, reply = branches[0]
        told = stock_seconds = compiled_seconds = 0
        while told < steps and not reply[4]:
            action = stock_world.random_action(rng, reply[1], reply[1])
            spent, expected = cpu_seconds(lambda: stock.step(action))
            stock_seconds += spent
            spent, (state, reply) = cpu_seconds(lambda: world.step(state, reply, action))
            compiled_seconds += spent
            assert reply[:5] == expected
            told += 1
        rows.setdefault(kind, []).append((eight, cold, warm, stock_seconds / told, compiled_seconds / told))
    print(f"{'task type':32} {'games':>5} {'8 stock s':>10} {'cold ms':>8} {'times':>6} {'warm ms':>8} {'times':>6}"
          f" {'stock step ms':>14} {'step us':>8} {'times':>6}")  # fmt: skip
    for kind, values in [*sorted(rows.items()), ("all", [row for values in rows.values() for row in values])]:
        eight, cold, warm, step, ours = (statistics.fmean(column) for column in zip(*values))
        ready = f"{eight:10.2f} {1e3 * cold:8.0f} {eight / cold:6.0f} {1e3 * warm:8.2f} {eight / warm:6.0f}"
        print(f"{kind:32} {len(values):5} {ready} {1e3 * step:14.1f} {1e6 * ours:8.0f} {step / ours:6.0f}")
    ratios = [(row[0] / row[1], row[0] / row[2], row[3] / row[4]) for values in rows.values() for row in values]
    worst = [min(column) for column in zip(*ratios)]
    print(f"least of any game: cold {worst[0]:.0f}, warm {worst[1]:.0f}, step {worst[2]:.0f} times as fast")
    print(f"8 stock runs took {min(linear):.2f} to {max(linear):.2f} times 8 times the first\n")
    return statistics.fmean(row[3] for values in rows.values() for row in values)


def measure_branches(game_files, stock_step_seconds):
    """Steps a second, and memory a branch, with ever more branches spread over the games."""
    print(f"{'branches':>8} {'steps':>6} {'steps/s':>8} {'times stock':>12} {'us a step':>10}")
    worlds = [World(environment.compile_game(game_file)) for game_file in game_files]
    for count in (1, 8, 64, 256):
        branches = [(worlds[number % len(worlds)], worlds[number % len(worlds)].start()) for number in range(count)]
        rng, spent, done = random.Random(count), 0.0, 0
        while done < 12_000:
            for number, (world, (state, reply)) in enumerate(branches):
                if reply[4]:
                    state, reply = world.start()
                action = stock_world.random_action(rng, reply[1], reply[1])
                started = time.process_time()
                after = world.step(state, reply, action)
                spent += time.process_time() - started
                branches[number] = (world, after)
                done += 1
        times = done / spent * stock_step_seconds
        print(f"{count:8} {done:6} {done / spent:8.0f} {times:12.0f} {1e6 * spent / done:10.0f}")
    extra, world = 2_000, worlds[0]
    start = world.start()
    moves = [action for action in start[1][1] if action.startswith("go to ")]
    tracemalloc.start()
    kept = [world.step(*start, moves[number % len(moves)]) for number in range(extra)]
    kilobytes = tracemalloc.get_traced_memory()[0] / 1024 / len(kept)
    tracemalloc.stop()
    print(f"memory: {kilobytes:.1f} KB an extra branch, over {extra} branches\n")


def measure_pool(game_files):
    """Steps a second through a worker process, 64 branches each going its own pace (wall clock)."""
    async def work(pool):
        groups = await asyncio.gather(*(pool.open_group(game_file, GROUP_SIZE) for game_file in game_files[:8]))

        async def branch(group, number):
            actions = [action for action in group.first.admissible if action.startswith("go to ")]
            for turn in range(50):
                await group.step(number, actions[(turn + number) % len(actions)])

        started = time.perf_counter()
        await asyncio.gather(*(branch(group, number) for group in groups for number in range(GROUP_SIZE)))
        return 50 * GROUP_SIZE * len(groups) / (time.perf_counter() - started)

    with WorldPool(EnvironmentSettings()) as pool:
        print(f"through one worker process, 64 branches: {asyncio.run(work(pool)):.0f} steps a second of wall clock\n")


def measure_growth(game_files, opened, compiled):
    """Resident memory while games are opened, played a little and dropped, then while games are compiled."""
    curve = []
    for number in range(opened):
        world = World(environment.compile_game(game_files[number % len(game_files)]))
        branches = [world.start() for _ in range(GROUP_SIZE)]
        for state, reply in branches:
            world.step(state, reply, reply[1][number % len(reply[1])])
        if number % (opened // 10) == opened // 10 - 1:
            curve.append(resident_mb())
    print(f"resident MB over {opened} opened games:  ", *(f"{value:.0f}" for value in curve))
    curve = []
    for number in range(compiled):
        game_file = game_files[number % len(game_files)]
        (game_file.parent / environment.CACHE_NAME).unlink()
        environment.compile_game(game_file)
        if number % (compiled // 10) == compiled // 10 - 1:
            curve.append(resident_mb())
    print(f"resident MB over {compiled} compiled games:", *(f"{value:.0f}" for value in curve))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("datasets/alfworld"), help="folder with the games")
    parser.add_argument("--games", type=int, default=42, help="games to measure, spread over the task types")
    parser.add_argument("--steps", type=int, default=20, help="random steps a game")
    parser.add_argument("--opened", type=int, default=1000, help="games opened for the memory curve")
    parser.add_argument("--compiled", type=int, default=200, help="games compiled for the memory curve")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # copies: a cold start must not find a cache, nor leave one
        game_files = []
        for source in pick_games(arguments.data_root, arguments.games):
            target = Path(folder) / source.parts[-3] / source.parts[-2] / source.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            game_files.append(target)
        stock_step_seconds = measure_games(game_files, arguments.steps)
        measure_branches(game_files, stock_step_seconds)
        measure_pool(game_files)
        measure_growth(game_files, arguments.opened, arguments.compiled)


if __name__ == "__main__":
    main()
