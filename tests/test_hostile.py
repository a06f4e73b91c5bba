"""Files and texts from others, damaged or made to do harm: a clear error or a right result, whatever is in them.

1,000 random inputs for each reader (seeded; mutations of valid ones). None may end in an error that was not written for
a person, take longer than its limit, or leave a half-written file behind. Nothing of a game file may ever run.
"""

import ast
import asyncio
import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import matplotlib
import pytest
from conftest import ROOT, STARTER

import analysis
import data
import environment
import protocol
from environment import EnvironmentSettings, GameError, World, WorldPool

INPUTS = 1_000
GAME = sorted((STARTER / "json_2.1.1" / "train").glob("*/*/game.tw-pddl"))[0]


# --- mutations ------------------------------------------------------------------------------------------------------

DEEP, DEEPEST, HUGE = "@deep@", "@deepest@", "@huge@"  # stand for texts that json.dumps does not write
RAW = {
    json.dumps(DEEP): "[" * 900 + "]" * 900,
    json.dumps(DEEPEST): '{"a":' * 30_000 + "1" + "}" * 30_000,
    json.dumps(HUGE): "9" * 5_000,
}
ODD = (
    None, True, False, 0, -1, 1, 2**63, 10**400, -(10**400), 0.5, 1e308, -1e308, math.nan, math.inf, -math.inf, "", " ",
    "\0", "\n", "\ud800", "\u202e", "x" * 100_000, "0", "true", "../../x", "/etc/passwd", "$\\frac{1}{0}$", [], {}, [[]],
    [None], {"": None}, {"type": "summary"}, DEEP, DEEPEST, HUGE,
)  # fmt: skip


def damaged(rng, content):
    """The bytes of a file after an accident."""
    content = bytearray(content)
    start, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    match rng.randrange(12):
        case 0:
            return bytes(content[:start])
        case 1:
            return bytes(content[start:])
        case 2 | 3 | 4:
            for _ in range(rng.choice((1, 1, 3, 30))):
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        case 5:
            del content[start : min(end, start + rng.choice((1, 10, 1000)))]
        case 6:
            content[start:start] = content[start : min(end, start + 2000)]
        case 7:
            content[start:end] = bytes(end - start)
        case 8:
            content[start:start] = rng.choice((b"\0", b"\xff", b"\xed\xa0\x80", b"\n", b"\r\n", b'"', b"{", b"[" * 100_000, b"9" * 9_999))
        case 9:
            return rng.choice((b"", b"\n", b"\xef\xbb\xbf" + content, content + content, bytes(content[::-1]), rng.randbytes(500)))
        case 10:
            return bytes(content).decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-7")))
        case 11:
            return rng.choice((b"null", b"[]", b"7", b'"x"', b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b"NaN"))
    return bytes(content)


def with_odd_value(rng, value):
    """A copy of a JSON value in which one part is another, is gone, or has a wrong name."""
    if not (isinstance(value, dict | list) and value) or rng.random() < 0.15:
        return rng.choice(ODD)
    value = value.copy()
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    if rng.random() < 0.15:
        value.pop(key)
    elif rng.random() < 0.1 and isinstance(value, dict):
        value[rng.choice(("", "\0", "type", key.upper(), key + " ", "x" * 1000))] = value.pop(key)
    else:
        value[key] = with_odd_value(rng, value[key])
    return value


def as_json(rng, value):
    """The value as JSON in bytes, in one of JSON's spellings; sometimes with a key that stands twice."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.8, separators=rng.choice((None, (",", ":"))))
    for stand_in, raw in RAW.items():
        text = text.replace(stand_in, raw)
    if isinstance(value, dict) and value and rng.random() < 0.1:
        twice = json.dumps(rng.choice(list(value)))
        text = rng.choice((f"{{{twice}: null, {text[1:]}", f"{text[:-1]}, {twice}: 7}}"))
    return text.encode("utf-8", "surrogatepass")


def mutated(rng, value):
    """A hostile spelling of a JSON value."""
    if rng.random() < 0.5:
        return damaged(rng, as_json(rng, value))
    return as_json(rng, with_odd_value(rng, value))


def place_something_else(rng, path):
    """Put what is no regular file, or none of a sensible size, in the place of one."""
    path.unlink(missing_ok=True)
    match rng.randrange(6):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to(path)
        case 2:
            os.mkfifo(path)
        case 3:
            path.symlink_to("/dev/zero")
        case 4:
            path.symlink_to(path.parent / "nowhere")
        case 5:
            with path.open("wb") as file:
                file.truncate(2**40)


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class TooSlow(BaseException):
    """No `except Exception` stops it."""


@contextlib.contextmanager
def time_limit(seconds):
    def stop(*_):
        raise TooSlow(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(read, error_type, *named, seconds=10):
    """What `read()` returns, or its error, which must be of the project's type: one line with the names in it."""
    try:
        with time_limit(seconds):
            return read()
    except error_type as error:
        text = str(error)
        assert "\n" not in text and len(text) < 2_000, text
        assert any(str(name) in text for name in named) or not named, text
        return error


def tree(folder):
    """Every path below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# --- the tool call --------------------------------------------------------------------------------------------------

CALLS = (
    protocol.tool_call_text("go to countertop 1"),
    "I look around.\n<tool_call>\n<function=alfworld_step>\n<parameter=action>\nTake Apple 1\n</parameter>\n</function>\n</tool_call>",
    '<tool_call>\n{"name": "alfworld_step", "arguments": {"action": "open fridge 1"}}\n</tool_call>',
)
PIECES = ("<tool_call>", "</tool_call>", "<function=alfworld_step>", "</function>", "<parameter=action>", "</parameter>",
          "{", "}", '"', "\\", "\\ud800", "\ud800", "\0", "\u2028", "İ", "<", "x" * 100_000, "[" * 50_000, "9" * 5_000,
          "NaN", '"name"', '"arguments"', ":", ",", "null", " ", "\n")  # fmt: skip


def test_tool_call_parser():
    rng = random.Random(1)
    valid = 0
    for number in range(INPUTS):
        text = rng.choice(CALLS)
        if number % 3 == 0:
            arguments = with_odd_value(rng, {"name": "alfworld_step", "arguments": {"action": "look"}})
            text = f"<tool_call>{as_json(rng, arguments).decode('utf-8', 'surrogatepass')}</tool_call>"
        for _ in range(rng.choice((0, 1, 1, 2, 5))):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice((*PIECES, "")) + text[at + rng.choice((0, 0, 1, 5, 50)) :]
        with time_limit(2):
            call = protocol.parse_tool_call(text)
        if call.action is None:
            assert call.error and "\n" not in call.error and len(call.error) < 100
        else:
            valid += 1
            assert call.error is None and call.action and call.action == " ".join(call.action.lower().split())
            assert text.rstrip().endswith("</tool_call>") and text.count("<tool_call>") == text.count("</tool_call>") == 1
    assert INPUTS // 20 < valid < INPUTS // 2


# --- evaluation files and training logs -----------------------------------------------------------------------------


def evaluation_lines():
    """An evaluation of 12 games as eval.py writes it, less what analysis.py does not read."""
    from eval import summarize

    records = []
    for number in range(12):
        won, invalid = number % 3 == 0, number % 4
        records.append({
            "type": "trajectory", "split": ("valid_seen", "valid_unseen")[number % 2], "game_id": f"task/{number}",
            "branch": 0, "task_type": data.TASK_TYPES[number % 6], "won": won, "reward": won - 0.1 * invalid, "steps": 9,
            "invalid_actions": invalid, "valid_tool_calls": 9 - invalid, "admissible_actions": 9 - invalid, "truncated": not won,
        })  # fmt: skip
    settings = {"temperature": 0.01, "seed": 42, "dtype": "float32"}
    splits = {split: summarize(r for r in records if r["split"] == split) for split in ("valid_seen", "valid_unseen")}
    summary = {"type": "summary", "base_model": "org/model", "update": 20, "settings": settings}
    return [*records, summary | {"splits": splits | {"all": summarize(records)}}]


def mutated_lines(rng, records):
    """A JSONL file with an accident: of one of its lines, of their order, or of the bytes of the file."""
    lines = [as_json(rng, record) for record in records]
    place = rng.randrange(len(lines))
    match rng.randrange(6):
        case 0:
            return damaged(rng, b"\n".join(lines) + b"\n")
        case 1:
            del lines[place]
        case 2:
            lines.insert(rng.randrange(len(lines)), lines[place])
        case 3:
            lines[-1] = mutated(rng, records[-1])
        case _:
            lines[place] = mutated(rng, records[place])
    return b"\n".join(lines) + rng.choice((b"\n", b"\n", b""))


def test_evaluation_reader(tmp_path):
    rng = random.Random(2)
    matplotlib.use("Agg")
    good, images = evaluation_lines(), tmp_path / "images"
    path, other = tmp_path / "evaluation.jsonl", tmp_path / "other.jsonl"
    other.write_text("\n".join(map(json.dumps, [*good[:-1], good[-1] | {"update": 0}])))
    fine = 0
    for number in range(INPUTS):
        remove(path)
        if number % 20 == 0:
            place_something_else(rng, path)
        else:
            path.write_bytes(mutated_lines(rng, good))
        found = outcome(lambda: analysis.read_evaluation(path), analysis.AnalysisError, path)
        if isinstance(found, analysis.Evaluation):
            fine += 1
            kept, left_out = analysis.comparable([found, analysis.read_evaluation(other)])
            assert all("\n" not in line and len(line) < 2_000 for line in left_out)
            assert "success" in analysis.table(kept or [found])
            if fine % 15 == 0:  # all the way to the figures
                with time_limit(20):
                    analysis.main([str(path), "--output", str(images), "--dpi", "20"])
                assert tree(images) == ["checkpoints.png", "task_types.png"]
    assert INPUTS // 20 < fine < INPUTS // 2


def test_training_log_reader(tmp_path):
    rng = random.Random(3)
    matplotlib.use("Agg")
    path, images = tmp_path / "metrics.jsonl", tmp_path / "images"
    names = [name for _, metrics, _ in analysis.TRAINING_PANELS for name in metrics]
    good = [{"update": update} | {name: update / 7 for name in names} for update in range(1, 8)]
    fine = 0
    for number in range(INPUTS):
        remove(path)
        if number % 20 == 0:
            place_something_else(rng, path)
        else:
            path.write_bytes(mutated_lines(rng, good))
        found = outcome(lambda: analysis.read_metrics(path), analysis.AnalysisError, path)
        if isinstance(found, tuple):
            fine += 1
            if fine % 40 == 0:
                with time_limit(20):
                    analysis.main(["--result-dir", str(tmp_path / "none"), "--metrics", str(path), "--output", str(images), "--dpi", "20"])
                assert tree(images) == ["training.png"]
    assert INPUTS // 20 < fine < INPUTS


# --- the working file of an evaluation ------------------------------------------------------------------------------


def test_working_file_reader(tmp_path):
    import eval as evaluation
    from data import SettingsError

    rng = random.Random(4)
    records = evaluation_lines()[:-1]
    for number, record in enumerate(records):
        tokens = {"prompt": number, "computed": number, "sampled": number, "preempted": 0}
        record["so_far"] = {"tokens": tokens, "env_faults": 0}
    header = {"type": "header", "temperature": 0.01, "games": {f"{r['split']}/{r['game_id']}": "0" for r in records}}
    lines = [header, *records]
    path = tmp_path / "out.jsonl.partial"

    def read():
        with evaluation.open_working_file(tmp_path / "out.jsonl", header, resume=True, overwrite=False) as working:
            assert path.read_bytes().endswith(b"\n")  # what comes next stands on a line of its own
            return list(working.records)

    fine = 0
    for number in range(INPUTS):
        remove(path)
        content = None
        if number % 20 == 0:
            place_something_else(rng, path)
        elif number % 2:  # an accident
            content = mutated_lines(rng, lines) if number % 4 == 1 else damaged(rng, b"".join(map(evaluation.make_line, lines)))
        else:  # bad intent: its checksums are right
            place = rng.randrange(len(lines))
            odd = with_odd_value(rng, lines[place])
            try:
                made = evaluation.make_line(json.loads(as_json(random.Random(0), odd)))
            except (RecursionError, TypeError, ValueError):  # this one cannot be made
                continue
            content = b"".join([*map(evaluation.make_line, lines[:place]), made, *map(evaluation.make_line, lines[place + 1 :])])
        if content is not None:
            path.write_bytes(content)
        found = outcome(read, SettingsError, path, "out.jsonl")
        if isinstance(found, list):
            fine += 1
            if number % 2:
                assert all(record in records for record in found)  # as they were, or not at all
            else:
                assert evaluation.summarize(found)["games"] == len(found)
        elif content is not None:
            assert path.read_bytes() == content, "nothing is lost"
        assert tree(tmp_path) in ([path.name], [])
    assert INPUTS // 20 < fine < INPUTS // 2


# --- games ----------------------------------------------------------------------------------------------------------


def copy_of_game(folder, **texts):
    """The starter game in a folder, with some of its texts replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "game.tw-pddl"
    path.write_text(json.dumps(json.loads(GAME.read_text()) | texts))
    return path


def play_a_little(rng, payload):
    """A compiled game can be played to its limit: 10 commands."""
    world = World(payload)
    state, reply = world.start()
    for _ in range(10):
        state, reply = world.step(state, reply, rng.choice(reply[1] or ("look",)))
        assert all(type(text) is str for text in (reply[0], *reply[1]))


def hostile_games(rng, number):
    """Files for `number` games: 6 of 10 damaged as a file or as JSON, the others in one of their texts."""
    game = json.loads(GAME.read_text())
    for place in range(number):
        if place % 10 < 6:
            yield mutated(rng, game)
        else:
            key = ("pddl_domain", "pddl_problem", "pddl_problem", "grammar")[place % 10 - 6]
            yield json.dumps(game | {key: damaged(rng, game[key].encode()).decode("latin-1")}).encode()


def test_game_loader(tmp_path):
    rng = random.Random(5)
    path = copy_of_game(tmp_path)
    fine = 0
    for number, content in enumerate(hostile_games(rng, INPUTS)):
        remove(path)
        if number % 20 == 0:
            place_something_else(rng, path)
        else:
            path.write_bytes(content)
        outcome(lambda: environment.compile_game(path, ground=False), GameError, path)
        if number % 4 == 1:
            found = outcome(lambda: environment.compile_game(path), GameError, path)
            if isinstance(found, bytes):
                fine += 1
                with time_limit(10):
                    play_a_little(rng, found)
                (tmp_path / environment.CACHE_NAME).unlink()
        assert tree(tmp_path) == ["game.tw-pddl"]
    assert fine > INPUTS // 50


@pytest.mark.slow
def test_game_loader_with_mutated_texts(tmp_path):
    """The same with 1,000 mutations of each text, all compiled and played."""
    rng = random.Random(6)
    game = json.loads(GAME.read_text())
    path = copy_of_game(tmp_path)
    fine = dict.fromkeys(("pddl_domain", "pddl_problem", "grammar"), 0)
    for key in fine:
        for _ in range(INPUTS):
            path.write_text(json.dumps(game | {key: damaged(rng, game[key].encode()).decode("latin-1")}))
            found = outcome(lambda: environment.compile_game(path), GameError, path, seconds=60)
            if isinstance(found, bytes):
                fine[key] += 1
                play_a_little(rng, found)
                (tmp_path / environment.CACHE_NAME).unlink()
            assert tree(tmp_path) == ["game.tw-pddl"]
    assert min(fine.values()) > INPUTS // 50


def test_cache_of_a_game(tmp_path):
    """Damaged it is made again; with a right checksum but a wrong content it is named, and runs nothing."""
    rng = random.Random(7)
    path = copy_of_game(tmp_path)
    payload, cache = environment.compile_game(path), tmp_path / environment.CACHE_NAME
    good, key = cache.read_bytes(), environment._read_game(path)[1]
    content, server = json.loads(zlib.decompress(payload)), environment._Server()
    refused = 0
    for number in range(INPUTS):
        if number % 2 == 0:
            remove(cache)
            if number % 20 == 0:
                place_something_else(rng, cache)
            else:
                cache.write_bytes(damaged(rng, good))
            with time_limit(5):
                found = data.saved(cache, key)
            assert found in (None, payload)
        else:
            crafted = zlib.compress(mutated(rng, content), 1)
            remove(cache)
            data.save(cache, key, crafted)
            assert data.saved(cache, key) == crafted
            refused += isinstance(outcome(lambda: server.open(0, crafted, {0: []}), GameError, environment.CACHE_NAME), GameError)
    assert refused > INPUTS // 4
    bomb = zlib.compress(bytes(2**28))
    assert "damaged" in str(outcome(lambda: server.open(0, bomb, {0: []}), GameError))
    remove(cache)
    assert environment.compile_game(path) == payload and cache.read_bytes() == good


def test_game_discovery_and_index(tmp_path):
    rng = random.Random(8)
    root = tmp_path / "games"
    split = root / "json_2.1.1" / "train"
    games = {}
    for number in range(3):
        folder = split / f"task-{number}" / "trial"
        folder.mkdir(parents=True)
        games[folder / "game.tw-pddl"] = {"pddl_domain": "d", "grammar": "g", "pddl_problem": "p", "solvable": True}
        games[folder / "traj_data.json"] = {"task_type": data.TASK_TYPES[number], "x": [1, {"y": 0.5}]}
    for path, content in games.items():
        path.write_text(json.dumps(content))
    expected = data.find_games(root, "train")
    index = split / data.INDEX_FILE
    good = json.loads(index.read_bytes().partition(b"\n")[2])
    names = set(tree(tmp_path))
    kinds = {"index": 0, "refused": 0, "found": 0}
    for number in range(INPUTS):
        path = index if number % 2 else rng.choice(list(games))
        remove(path)
        if number % 20 in (0, 1):
            place_something_else(rng, path)
        else:
            path.write_bytes(mutated(rng, good if path == index else games[path]))
        if path != index:
            remove(index)
        found = outcome(lambda: data.find_games(root, "train"), data.DataError, path, split)
        assert set(tree(tmp_path)) <= names
        if path == index:
            kinds["index"] += 1
            believed = {game.game_id for game in found} if isinstance(found, list) else set()
            # an index that says what files say as well is believed: it may leave a game out, never add or move one
            assert believed <= {game.game_id for game in expected} and all(game.path in games for game in found)
        else:
            kinds["found" if isinstance(found, list) else "refused"] += 1
            remove(path)
            path.write_text(json.dumps(games[path]))
    remove(index)
    assert data.find_games(root, "train") == expected and min(kinds.values()) > INPUTS // 50, kinds


def test_pool_names_bad_games_and_goes_on(tmp_path):
    rng = random.Random(9)
    paths = []
    for number, content in enumerate(hostile_games(rng, 60)):
        folder = tmp_path / str(number)
        folder.mkdir()
        paths.append(folder / "game.tw-pddl")
        if number % 10 == 0:
            place_something_else(rng, paths[-1])
        else:
            paths[-1].write_bytes(content)
    good = copy_of_game(tmp_path / "good")

    async def work(pool):
        bad = await pool.check([*paths, good])
        assert good not in bad and len(bad) > 30
        assert all(str(path) in reason and "\n" not in reason for path, reason in bad.items())
        return (await pool.open_group(good, 1)).task, pool.faults

    with WorldPool(EnvironmentSettings(compilers=1)) as pool:
        assert asyncio.run(asyncio.wait_for(work(pool), 60))[1] == 0


@pytest.mark.slow
def test_a_game_that_takes_too_long_costs_itself_only(tmp_path):
    """Rules of which each uses the one before twice: the text would have 2 ** 60 parts."""
    grammar = json.loads(GAME.read_text())["grammar"]
    bomb = ", ".join(f'"r{n}": [{{"rhs": "#r{n - 1}##r{n - 1}#"}}]' for n in range(1, 60))
    assert '"intro": [' in grammar
    grammar = grammar.replace('"intro": [', f'"r0": [{{"rhs": "."}}], {bomb}, "intro": [{{"rhs": "#r59#"}}], "other": [', 1)
    slow, good = copy_of_game(tmp_path / "slow", grammar=grammar), copy_of_game(tmp_path / "good")

    async def work(pool):
        return await pool.check([slow, good], ground=True), pool.faults

    with WorldPool(EnvironmentSettings(compilers=1, compile_timeout_seconds=15.0)) as pool:
        refused, faults = asyncio.run(asyncio.wait_for(work(pool), 120))
    assert list(refused) == [slow] and faults == 3
    assert f"{slow}: 3 compilers were lost over it" in refused[slow]


@pytest.mark.slow
def test_a_game_that_wants_too_much_memory_costs_itself_only(tmp_path):
    """An action with six free parameters: more ground actions than any memory holds."""
    game = json.loads(GAME.read_text())
    names = " ".join(f"?x{n} - object" for n in range(6))
    action = f"(:action wish :parameters ({names}) :precondition () :effect (checked ?x0))\n(:action look"
    grammar = game["grammar"] + '\naction wish { template :: "wish"; feedback :: "#help.feedback#"; }'
    greedy = copy_of_game(tmp_path, pddl_domain=game["pddl_domain"].replace("(:action look", action, 1), grammar=grammar)

    async def work(pool):
        return await pool.check([greedy], ground=True), pool.faults

    with WorldPool(EnvironmentSettings(compilers=1)) as pool:
        refused, faults = asyncio.run(work(pool))
    assert "grounding meets more than 500,000 atoms" in refused[greedy] and faults == 0


# --- nothing runs ---------------------------------------------------------------------------------------------------

WATCHED = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import environment
files = [Path(name) for name in sys.argv[2:]]
environment.compile_game(files[0])  # loads every library that compiling needs
found, watching = [], False
def watch(event, arguments):
    if not watching:
        return
    writing = event == "open" and isinstance(arguments[0], str) and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    running = event in ("exec", "import") or event.startswith(("os.system", "os.exec", "os.fork", "os.spawn", "os.posix_spawn",
        "subprocess", "socket", "ctypes", "pickle", "marshal", "shutil", "os.remove", "os.rename", "os.mkdir", "os.chmod"))
    if running or writing:
        found.append(f"{event} {arguments!r:.200}")
sys.addaudithook(watch)
told = []
for file in files[1:]:
    watching = True
    try:
        world = environment.World(environment.compile_game(file))
        state, reply = world.start()
        for command in ["look", *world._commands, *reply[1]]:
            state, reply = world.step(state, reply, command)
        told.append("compiled and played")
    except environment.GameError as error:
        told.append(str(error))
    finally:
        watching = False
print(json.dumps([told, found]))
"""


def test_nothing_of_a_game_file_runs(tmp_path):
    """Code in every place of a game that a library may read is refused or is mere text, while the process is watched."""
    game = json.loads(GAME.read_text())
    trap = tmp_path / "trap"
    code = f"__import__('os').system('touch {trap}')"
    grammar, problem, domain = game["grammar"], game["pddl_problem"], game["pddl_domain"]
    spoken = "You open the {r.name}"
    assert spoken in grammar and '"intro": [' in grammar and "(checked ?l)" in domain and "agent1" in problem
    refused = [
        {"grammar": grammar.replace(spoken, f"You open the {{{expression}}}")}
        for expression in (
            code, f"r.name + {code}", f"{code} or r.name", f"(lambda: {code})()", f"r.name if {code} else r.id",
            f"r.name | {code}", f"open('{trap}', 'w')", f"(x := {code})", f"f'{code}'.format({code})", f"r.__class__({code})",
        )
    ] + [
        {"grammar": grammar.replace('"intro": [', f'"intro": [{{"rhs": "x", "condition": "{code}"}}, ', 1)},
        {"grammar": grammar.replace('template :: "', f'template :: "{{{code}}}', 1)},
        {"grammar": f"{grammar}\n{code}"},
        {"pddl_domain": f"{code}\n{domain}"},
        {"pddl_domain": domain.replace("(:action look", f"(:action {code}", 1)},
        {"pddl_domain": domain.replace("(checked ?l)", f"({code} ?l)", 1)},
        {"pddl_problem": problem.replace("(:init", f"(:init (= (total-cost) {code})", 1)},
        {"pddl_problem": problem.replace("(:init", f"(:init (atLocation agent1 {code})", 1)},
        {"pddl_problem": problem.replace("agent1", f"$(touch {trap})")},
    ]  # fmt: skip
    mere_text = [
        {"walkthrough": [code], "solvable": code, code: code},
        {"grammar": f'#include :: "{trap}"\n{grammar}'},  # a comment
        {"grammar": grammar.replace('"intro": [', f'"{code}": [{{"rhs": "{{{code}}}"}}], "intro": [', 1)},  # nobody's rule
        {"grammar": grammar.replace(spoken, f"You open the {{[{code} for r in 'x']}}")},  # no expression to textworld
        {"grammar": grammar.replace(spoken, f"You open the {code}")},
    ]
    files = [copy_of_game(tmp_path / "good")]
    files += [copy_of_game(tmp_path / str(number), **changed) for number, changed in enumerate(refused + mere_text)]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, ROOT, *files], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told, found = json.loads(done.stdout)
    for file, answer in zip(files[1:], told, strict=True):
        assert (str(file) in answer) == (int(file.parent.name) < len(refused)), (file.parent.name, answer)
    caches = {str(file.parent) for file in files[-len(mere_text) :]}
    assert not [event for event in found if not any(f"{folder}/{environment.CACHE_NAME}" in event for folder in caches)]
    assert not trap.exists()
    written = {tmp_path / path for path in tree(tmp_path)} - {path for file in files for path in (file, file.parent)}
    assert written == {Path(folder) / environment.CACHE_NAME for folder in (*caches, tmp_path / "good")}


def test_no_module_runs_or_unpickles_what_a_file_says():
    """By reading: no eval, no pickle from a file, no code from a model's folder."""
    for module in sorted(ROOT.glob("*.py")):
        for node in ast.walk(ast.parse(module.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called, keywords = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert called not in ("eval", "exec", "compile", "pickle.load", "marshal.load", "marshal.loads", "shelve.open"), module
            assert called != "pickle.loads" or module.name == "environment.py", "only between a pool and its own workers"
            assert called != "torch.load" or keywords.get("weights_only") == "True", module
            assert keywords.get("trust_remote_code", "False") == "False" and keywords.get("allow_pickle") != "True", module
