"""What the replay page is made of: the rules for why a game was lost, the reading of trajectories, the page's content."""

import base64
import hashlib
import json
import random
import re
import zlib
from pathlib import Path

import pytest

import analysis
from data import TASK_PREFIX, TASK_TYPES, find_games
from protocol import tool_call_text

ROOT = Path(__file__).resolve().parent.parent
NOTHING = "Nothing happens."


def turn(action: str | None, observation: str = "", status: str = "executed", admissible=("look",), **more) -> dict:
    if action is None:
        status, observation = "malformed", "No action was taken: no tool call."
    elif observation == NOTHING:
        status = "not admissible"
    return {
        "step": 1,
        "action": action,
        "error": None,
        "status": status,
        "observation": observation,
        "admissible": list(admissible),
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "finish_reason": "stop",
    } | more


def trajectory(
    turns: list[dict], won: bool = False, task: str = "put a hot egg in fridge.", number: int = 1, **more
) -> dict:
    """A line of rollouts, with the fields that the page reads."""
    messages = [
        {"role": "system", "content": "You act."},
        {"role": "user", "content": f"Task: {task}\nObservation: A room."},
    ]
    for one in turns:
        text = "I think.\n" + tool_call_text(one["action"]) if one["action"] is not None else "I do nothing."
        messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": one["observation"]}]
    return {
        "type": "trajectory",
        "split": "train",
        "game_id": f"game-{number}/trial",
        "task_type": TASK_TYPES[3],
        "update": 1,
        "branch": 0,
        "task": task,
        "won": won,
        "reward": won - 0.1,
        "steps": len(turns),
        "invalid_actions": 1,
        "stop_reason": "won" if won else "max_steps",
        "messages": messages,
        "turns": turns,
    } | more


def write(path: Path, *records: object) -> Path:
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return path


def content_of(page: str) -> dict:
    """What the browser unpacks."""
    packed = re.search('<script id="data" type="application/octet-stream">(.*?)</script>', page)[1]
    return json.loads(zlib.decompress(base64.b64decode(packed)))


# --- why a game was lost ----------------------------------------------------------------------------------------

GO = turn("go to shelf 1", "You arrive at shelf 1. On the shelf 1, you see a mug 1.")
SEE = turn("go to table 1", "You arrive at table 1. On the table 1, you see an egg 2, and a mug 1.")
TAKE = turn("take egg 2 from table 1", "You pick up the egg 2 from the table 1.")
TAKE_MUG = turn("take mug 1 from table 1", "You pick up the mug 1 from the table 1.")
HEAT = turn("heat egg 2 with microwave 1", "You heat the egg 2 using the microwave 1.")
COOL = turn("cool egg 2 with fridge 1", "You cool the egg 2 using the fridge 1.")
FAIL = turn("take egg 2 from table 1", NOTHING)


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([GO, SEE, turn(None)], "malformed calls"),
        ([turn(None), FAIL, FAIL], "malformed calls"),
        ([GO, SEE, GO, turn(None)], "out of steps on the way"),
        ([SEE, FAIL, FAIL], "repeats what does nothing"),
        ([SEE, FAIL, TAKE, FAIL, GO, GO], "not yet cleaned, heated or cooled"),  # one turn of six was a repetition
        ([FAIL, FAIL, GO], "repeats what does nothing"),
        ([GO, GO, turn("take egg 2 from shelf 1", NOTHING)], "never finds the object"),
        ([turn("go to bin 1", "You see an eggplant 1."), turn("look", "You see 1 egg.")], "never finds the object"),
        ([GO, turn("take mug 1 from shelf 1", "You pick up the mug 1.")], "never finds the object"),
        ([SEE, TAKE_MUG], "wrong object"),
        ([SEE, TAKE_MUG, TAKE, GO], "not yet cleaned, heated or cooled"),
        ([SEE, TAKE, COOL], "not yet cleaned, heated or cooled"),
        ([SEE, TAKE, turn("heat egg 2 with microwave 1", NOTHING)], "not yet cleaned, heated or cooled"),
        ([SEE, TAKE, HEAT, GO], "out of steps on the way"),
        ([SEE, GO], "out of steps on the way"),
        ([], "never finds the object"),
    ],
)
def test_a_lost_game_has_the_first_reason_whose_rule_holds(turns, reason):
    assert analysis.why_lost(trajectory(turns)) == reason
    assert analysis.why_lost(trajectory(turns, won=True)) is None


def test_rules_about_the_object_need_a_sentence_of_the_benchmark_and_a_task_that_asks_for_treatment():
    assert analysis.why_lost(trajectory([GO], task="do as you like")) == "out of steps on the way"
    assert (
        analysis.why_lost(trajectory([GO, TAKE_MUG], task="put some (egg on shelf."))
        == "not yet cleaned, heated or cooled"
    )
    assert analysis.why_lost(trajectory([SEE, TAKE], task_type=TASK_TYPES[0])) == "out of steps on the way"
    assert analysis.why_lost(trajectory([SEE], task_type="another")) == "out of steps on the way"


def test_every_task_sentence_names_the_object_of_the_games_name():
    sentences = {}
    for split in ("train", "valid_seen", "valid_unseen"):
        for game in find_games(ROOT / "datasets" / "starter", split):
            task = re.search(rf"{TASK_PREFIX}([^\"]*)", json.loads(game.path.read_text())["grammar"])[1].strip()
            kind = game.game_id.split("-")[1].lower()
            assert analysis.TASK_SENTENCE.fullmatch(task)[1] == kind
            sentences[task.split(kind)[0]] = task
    assert len(sentences) == 12


def test_losses_are_counted_by_reason_and_task_type():
    records = [
        trajectory(turns, won, task_type=TASK_TYPES[kind])
        for turns, won, kind in (
            ([SEE, TAKE_MUG], False, 3),
            ([SEE, TAKE_MUG], False, 0),
            ([GO], False, 0),
            ([GO], True, 0),
            ([GO], False, 5),
        )
    ]
    table = analysis.loss_table("a\x1bfile", [record | {"why": analysis.why_lost(record)} for record in records])
    lines = [line.split("  ") for line in table.splitlines()]
    rows = {line[0]: [cell.strip() for cell in line[1:] if cell.strip()] for line in lines}
    assert table.startswith("a\\x1bfile\n")
    assert rows["why lost (4 of 5)"] == ["all", "pick", "heat", "pick two"]
    assert rows["wrong object"] == ["2", "1", "1", "0"]
    assert rows["never finds the object"] == ["2", "1", "0", "1"]
    assert sum(int(row[0]) for name, row in rows.items() if name in analysis.LOSS_REASONS) == 4


# --- reading ------------------------------------------------------------------------------------------------------


def test_rollouts_come_in_groups_with_advantages(tmp_path):
    def branches(number, rewards, **more):
        return [
            trajectory([GO], number=number, branch=branch, reward=reward, **more)
            for branch, reward in enumerate(rewards)
        ]

    alone = trajectory([GO], number=3)
    path = write(
        tmp_path / "a",
        *branches(1, [1.0, 0.0, 0.0, -1.0]),
        *branches(2, [1.0, 0.5]),
        *branches(2, [0.0, 0.0]),
        alone,
        *branches(4, [1.0, 0.0], advantage=0.25),
    )
    records, faults = analysis.read_replay(path)
    assert not faults
    assert [record["group"] for record in records] == [0] * 4 + [1] * 2 + [2] * 2 + [None] + [4] * 2
    assert [record["advantage"] for record in records] == [1.0, 0.0, 0.0, -1.0, 0.25, -0.25, 0.0, 0.0, None, 0.25, 0.25]


def test_an_evaluation_has_no_groups(tmp_path):
    records = [trajectory([GO], branch=branch) for branch in (0, 1)]
    for line in ({"type": "summary"}, {"type": "header"}):  # a header begins an unfinished one
        assert [one["group"] for one in analysis.read_replay(write(tmp_path / "a", *records, line))[0]] == [None, None]


GOOD = trajectory([turn("look", "A room.")])


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ("{", "is no valid JSON"),
        ("[1]", "not an object"),
        ({name: GOOD[name] for name in GOOD if name not in ("turns", "messages", "task")}, "has no texts to show"),
        (GOOD | {"turns": [3]}, "turns is a list, not a list of objects"),
        (GOOD | {"turns": [GOOD["turns"][0] | {"admissible": [1]}]}, "admissible is a list, not a list of texts"),
        (GOOD | {"turns": [GOOD["turns"][0] | {"observation": None}]}, "observation is null"),
        (GOOD | {"turns": [turn("look", tokens=["a"], logprobs=[])]}, "not one number for each"),
        (GOOD | {"turns": [turn("look", tokens=["a"], logprobs=[float("nan")])]}, "not one number for each"),
        (GOOD | {"turns": [turn("look", tokens=["a"], logprobs="x")]}, 'logprobs is "x"'),
        (GOOD | {"turns": [turn("look", advantage=float("inf"))]}, "advantage is Infinity"),
        (GOOD | {"messages": [{"role": "user", "content": [1]}]}, "content is a list"),
        (GOOD | {"messages": 1}, "messages is 1"),
        (GOOD | {"reward": float("nan")}, "reward is NaN"),
        (GOOD | {"branch": -1}, "branch is -1"),
        (GOOD | {"task": ["<b>"]}, "task is a list"),
    ],
)
def test_a_line_that_cannot_be_shown_is_named_and_left_out(tmp_path, record, fault):
    records, faults = analysis.read_replay(write(tmp_path / "a", GOOD, record, GOOD | {"branch": 1}))
    assert len(records) == 2 and len(faults) == 1
    assert faults[0].startswith(f"{tmp_path}/a:2: ") and fault in faults[0]
    with pytest.raises(analysis.AnalysisError, match="a:1: "):
        analysis.read_replay(write(tmp_path / "a", record))


def test_of_many_bad_lines_the_first_are_named_and_the_others_counted(tmp_path):
    _, faults = analysis.read_replay(write(tmp_path / "a", GOOD, *["{"] * 12))
    assert len(faults) == 6 and faults[-1].endswith("a: 7 more lines")


# --- the page -----------------------------------------------------------------------------------------------------


def test_the_page_allows_its_own_script_and_style_and_nothing_else():
    page = analysis.replay_page({"a": [analysis.replay_record("a:1", GOOD)]}, [])
    policy = re.search('http-equiv="Content-Security-Policy" content="(.*?)"', page)[1]
    allowed = {}
    for name in ("script", "style"):
        [text] = re.findall(f"<{name}>(.*?)</{name}>", page, re.DOTALL)
        allowed[name] = f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert policy.split("; ")[:3] == [
        "default-src 'none'",
        f"script-src {allowed['script']}",
        f"style-src {allowed['style']}",
    ]
    assert not re.search(
        r"https?:|//[a-z]|{{|\bsrc=|innerHTML|insertAdjacentHTML|document\.write|\beval\b|style=|\son\w+=", page
    )


def test_the_page_holds_every_text_once_and_every_turn():
    turns = [
        turn("look", "A room.", admissible=["look", "go to shelf 1"]),
        turn("look", "A room.", admissible=["look", "go to shelf 1"]),
        turn(None, admissible=["look"]),
        turn("go to shelf 1", NOTHING, tokens=["go", " to"], logprobs=[-0.12345, -2], advantage=0.5),
    ]
    records = [analysis.replay_record("a:1", trajectory(turns, branch=branch)) for branch in range(2)]
    content = content_of(analysis.replay_page({"one": records, "two": records[:1]}, ["left </script>"]))
    texts = content["texts"]
    assert len(texts) == len(set(texts))
    assert [one["file"] for one in content["trajectories"]] == [0, 0, 1] and content["files"] == ["one", "two"]
    assert content["left_out"] == ["left </script>"]
    shown = content["trajectories"][0]
    assert [[texts[number] for number in pair] for pair in shown["opening"]] == [
        ["system", "You act."],
        ["user", "Task: put a hot egg in fridge.\nObservation: A room."],
    ]
    columns = shown["turns"]
    assert [texts[number] for number in columns["text"]] == [
        message["content"] for message in records[0]["messages"][2::2]
    ]
    assert [None if number is None else texts[number] for number in columns["action"]] == [
        "look",
        "look",
        None,
        "go to shelf 1",
    ]
    assert columns["nothing"] == [False, False, True, True]
    assert columns["list"][0] == columns["list"][1] and len(content["lists"]) == 2
    steps = content["lists"][columns["list"][0]]
    assert [texts[sum(steps[: place + 1])] for place in range(len(steps))] == ["look", "go to shelf 1"]
    assert columns["rare"] == [
        {},
        {},
        {},
        {"advantage": 0.5, "tokens": [texts.index("go"), texts.index(" to")], "logprobs": [-0.123, -2]},
    ]


def test_hostile_texts_reach_the_page_packed_only(tmp_path, capsys):
    hostile = "</script><script>alert(1)</script>\u202e\ud800"
    path = write(
        tmp_path / "a.jsonl", trajectory([turn(hostile, hostile)], task=hostile, game_id=hostile, split=hostile)
    )
    analysis.main(["--replay", str(path), str(tmp_path / "gone"), "--output", str(tmp_path)])
    page = (tmp_path / "replay.html").read_text()
    assert "alert" not in page and page.count("</script>") == 2
    assert hostile in content_of(page)["texts"]
    said = capsys.readouterr()
    assert said.err == f"left out: {tmp_path}/gone: cannot be read: No such file or directory\n"
    assert "why lost (1 of 1)" in said.out and f"Saved page: {tmp_path}/replay.html (1 trajectories, " in said.out


def test_a_whole_evaluation_of_long_games_stays_below_3_mb():
    rng = random.Random(0)
    places = [
        f"{kind} {number}"
        for kind in ("cabinet", "drawer", "shelf", "countertop", "stoveburner")
        for number in range(1, 12)
    ]
    things = [f"{kind} {number}" for kind in ("mug", "egg", "knife", "apple", "bread", "pan") for number in range(1, 4)]
    words = (ROOT / "README.md").read_text().split()
    records = []
    for number in range(274):
        turns, rooms = [], rng.sample(places, 30)
        for _ in range(50):
            seen, place = rng.sample(things, 4), rng.choice(rooms)
            actions = sorted([f"go to {room}" for room in rooms] + [f"take {thing} from {place}" for thing in seen])
            turns.append(
                turn(f"go to {place}", f"You arrive at {place}. You see a {', a '.join(seen)}.", admissible=actions)
            )
        record = trajectory(turns, number=number)
        for message in record["messages"][2::2]:
            message["content"] = " ".join(rng.sample(words, 25)) + "\n" + message["content"]
        records.append(analysis.replay_record("a:1", record))
    assert len(analysis.replay_page({"a": records}, [])) < 3e6


def test_files_of_one_name_are_told_apart_and_named_twice_shown_once(tmp_path):
    (tmp_path / "b").mkdir()
    paths = [
        write(tmp_path / "a.jsonl", GOOD),
        write(tmp_path / "b" / "a.jsonl", GOOD),
        write(tmp_path / "c.jsonl", GOOD),
    ]
    analysis.main(["--replay", *map(str, [*paths, paths[0]]), "--output", str(tmp_path / "page.html")])
    assert content_of((tmp_path / "page.html").read_text())["files"] == [str(paths[0]), str(paths[1]), "c.jsonl"]


def test_losses_in_many_files_are_counted_together(tmp_path, capsys):
    paths = [str(write(tmp_path / f"{number}.jsonl", GOOD)) for number in range(5)]
    analysis.main(["--replay", *paths[:4], "--output", str(tmp_path)])
    assert capsys.readouterr().out.count("why lost (1 of 1)") == 4
    analysis.main(["--replay", *paths, "--output", str(tmp_path)])
    assert "5 files\nwhy lost (5 of 5)" in capsys.readouterr().out


def test_what_cannot_be_shown_or_written_is_one_line(tmp_path):
    good, bad = write(tmp_path / "good", GOOD), write(tmp_path / "bad", "{")
    for arguments, fault in (
        (["--replay", bad], "none of 1 files can be shown"),
        (["--replay", good, "--output", good / "x"], "cannot write: Not a directory"),
        (["--replay", good, "--show"], "go alone"),
        (["--replay", good, "--metrics", good], "go alone"),
        ([good, "--replay", good], "go alone"),
    ):
        with pytest.raises(SystemExit, match=fault) as error:
            analysis.main(list(map(str, arguments)))
        assert "\n" not in str(error.value)
