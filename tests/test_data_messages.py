"""What data.py says of games that are not there, of another release, too large or not to be read, and how it says it."""


import pytest
from test_data import PLACE, TWO, root, run_command, split_folder, write_trial  # noqa: F401 (fixtures)

import data

OLD = 'action PutObject {\n    template :: "put {o} in/on {r}";\n}'


def refused(root, split="train"):
    with pytest.raises(data.DataError) as error:
        data.find_games(root, split)
    assert str(error.value).isprintable()
    return str(error.value)


# --- games of an older release ---


def test_games_of_an_older_release_are_marked_and_the_index_knows_it(root, split_folder):  # noqa: F811
    write_trial(split_folder, "c-task/trial_old", PLACE, grammar=OLD)
    for _ in range(2):
        marks = {game.game_id: game.older_release for game in data.find_games(root, "train")}
        assert marks.pop("c-task/trial_old") and not any(marks.values()) and len(marks) == 3


def test_the_command_does_not_count_games_of_an_older_release(root, split_folder):  # noqa: F811
    for split, count in (("train", 5), ("valid_seen", 1), ("valid_unseen", 0)):
        write_trial(root / "json_2.1.1" / split, "a-task/trial_0", TWO)
        for number in range(count):
            write_trial(root / "json_2.1.1" / split, f"z-task/trial_{number}", TWO, grammar=OLD)
    done = run_command("--data-root", root)
    assert done.returncode == 1 and done.stdout.splitlines()[-1].split() == ["all", "4", "1", "1"]
    assert done.stderr.startswith("data.py: not counted: 6 games, such as ") and done.stderr.count("\n") == 1
    assert "z-task/trial_2" in done.stderr and "z-task/trial_3" not in done.stderr and "and 3 more" in done.stderr
    assert '"put X in/on Y"' in done.stderr and "2.1.3" in done.stderr


# --- files that cannot be used ---


def test_a_file_too_large_says_so_and_what_to_do(root, split_folder):  # noqa: F811
    path = split_folder / "b-task/trial_2/game.tw-pddl"
    with path.open("ab") as file:
        file.truncate(50 * 2**20)
    message = refused(root)
    assert f"cannot read {path}: it has more than 16,777,216 bytes; put a good copy in its place" in message
    assert "this user" not in message


def test_a_file_that_this_user_may_not_read_says_so(root, split_folder, monkeypatch):  # noqa: F811
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "x")

    monkeypatch.setattr(data, "read_file", refuse)
    message = refused(root)
    assert "Permission denied; make it readable for this user" in message and "good copy" not in message


def test_half_a_character_is_no_text(root, split_folder):  # noqa: F811
    write_trial(split_folder, "c-task/trial_1", PLACE, grammar="\ud800")
    assert "c-task/trial_1/game.tw-pddl has no text under 'grammar'" in refused(root)


def test_what_a_message_echoes_cannot_write_to_the_terminal(root, split_folder):  # noqa: F811
    odd = "c\x1b[2J\u202e\n\udc80-task"
    path = write_trial(split_folder, f"{odd}/trial_1", PLACE)
    path.write_text("{")
    assert r"c\x1b[2J\u202e\n\udc80-task" in refused(root)
    assert r"unknown split 'x\x07'" in refused(root, "x\x07")
    assert data.shown("a plain – “text” of 日本 and é") == "a plain – “text” of 日本 and é"
    assert data.shown("\x00\x1b\x7f\x9b\u200b\u202e\u2066\ud800\n") == r"\x00\x1b\x7f\x9b\u200b\u202e\u2066\ud800\n"


# --- games elsewhere ---


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    return tmp_path / "home"


def test_games_where_alfworld_keeps_them_are_named_with_the_flag_to_type(tmp_path, home, monkeypatch):
    assert "there are games in" not in refused(tmp_path / "nowhere")
    write_trial(home / ".cache" / "alfworld" / "json_2.1.1" / "train", "a/trial_1")
    assert f"there are games in {home}/.cache/alfworld: use --data-root {home}/.cache/alfworld; " in refused(tmp_path / "nowhere")
    assert "there are games in" not in refused(tmp_path / "nowhere", "valid_seen"), "not of that split"
    (tmp_path / "empty" / "train" / "task").mkdir(parents=True)
    assert f"use --data-root {home}/.cache/alfworld; " in refused(tmp_path / "empty")
    other = tmp_path / "my games"
    write_trial(other / "json_2.1.1" / "train", "a/trial_1")
    monkeypatch.setenv("ALFWORLD_DATA", str(other))
    message = refused(tmp_path / "nowhere")
    assert message.index(f"use --data-root '{other}'; ") < message.index(f"use --data-root {home}/.cache/alfworld; ")
    assert data.find_games(other, "train") and "alfworld-download" in message, "nothing is switched silently"


def test_the_folder_that_was_looked_in_is_not_named_again(tmp_path, home, monkeypatch):
    (home / ".cache" / "alfworld" / "json_2.1.1" / "train" / "task").mkdir(parents=True)
    monkeypatch.setenv("ALFWORLD_DATA", str(home / ".cache" / "alfworld"))
    assert "there are games in" not in refused(home / ".cache" / "alfworld")
