"""Evaluations with several trajectories a game: pass@k, intervals and tests over games, and the file that eval.py writes."""

import itertools
import json
import random

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
from conftest import STARTER
from matplotlib import pyplot as plt
from test_analysis import SETTINGS, run as analyse, trajectory, write
from test_eval_resume import HEADER, record

import analysis
import eval as evaluation
from analysis import mcnemar_exact, sign_flip_exact
from data import SettingsError
from environment import EnvironmentSettings
from rollout import interval_over_games, pass_at, play_group, wilson_interval

# --- statistics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wins", [[0], [5], [2, 0, 5, 1]])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_choices_of_k_tries_that_hold_a_win(wins, k):
    shares = []
    for won in wins:
        choices = list(itertools.combinations([True] * won + [False] * (5 - won), k))
        shares.append(sum(map(any, choices)) / len(choices))
    assert pass_at(k, wins, 5) == pytest.approx(sum(shares) / len(wins), abs=1e-12)


def test_pass_at_k_has_no_bias():
    """Over games of known difficulty its mean is 1 - (1 - p)^k, which the share won once in the first k of n is too."""
    draw = np.random.default_rng(0)
    chances = draw.random(200_000)
    wins = draw.binomial(6, chances)
    for k in (1, 3, 6):
        assert pass_at(k, wins.tolist(), 6) == pytest.approx(np.mean(1 - (1 - chances) ** k), abs=4e-3)


@pytest.mark.parametrize("wins", [[0, 0, 0], [1, 1], [0, 1, 1, 0, 1]])
def test_the_interval_of_one_try_is_wilsons(wins):
    assert interval_over_games(wins, 1) == wilson_interval(sum(wins), len(wins))


def test_the_interval_over_games_is_between_that_of_games_and_that_of_trajectories():
    alike = interval_over_games([0, 0, 4, 4, 4, 0], 4)  # all tries of a game end alike: six trials
    assert alike == pytest.approx(wilson_interval(3, 6))
    assert interval_over_games([0, 0, 0], 4) == wilson_interval(0, 3) and interval_over_games([4, 4], 4) == wilson_interval(2, 2)
    widths = [high - low for low, high in (alike, interval_over_games([1, 3, 2, 2, 1, 3], 4), wilson_interval(12, 24))]
    assert widths[0] > widths[1] >= widths[2] - 1e-12


@pytest.mark.parametrize(("spread", "naive_fails"), [(0.6, True), (50.0, False)])
def test_the_interval_over_games_holds_what_it_promises(spread, naive_fails):
    """Games of random difficulty, 5,000 evaluations: the true mean is inside in about 95 % of them."""
    draw = np.random.default_rng(1)
    inside = naive = 0
    for _ in range(5_000):
        wins = draw.binomial(8, draw.beta(0.4 * spread, 0.6 * spread, 60)).tolist()
        low, high = interval_over_games(wins, 8)
        inside += low <= 0.4 <= high
        low, high = wilson_interval(sum(wins), 480)
        naive += low <= 0.4 <= high
    assert 0.935 < inside / 5_000 < 0.97
    assert (naive / 5_000 < 0.75) == naive_fails  # trajectories taken for independent


def test_the_sign_flip_test_counts_all_choices_of_signs():
    draw = random.Random(2)
    for _ in range(30):
        differences = [draw.randint(-3, 4) for _ in range(draw.randint(1, 9))]
        sums = [sum(sign * value for sign, value in zip(signs, differences))
                for signs in itertools.product((-1, 1), repeat=len(differences))]  # fmt: skip
        expected = sum(abs(value) >= abs(sum(differences)) for value in sums) / len(sums)
        assert sign_flip_exact(differences) == pytest.approx(expected, abs=1e-12)
    assert sign_flip_exact([0, 0]) == 1


def test_the_sign_flip_test_of_one_try_is_mcnemars():
    for b, c in ((0, 0), (1, 3), (9, 2), (40, 71)):
        assert sign_flip_exact([-1] * b + [1] * c + [0] * 5) == pytest.approx(mcnemar_exact(b, c), rel=1e-9)


# --- analysis.py ----------------------------------------------------------------------------------------------------


def several(path, update, wins, tries=4, **changes):
    """An evaluation of as many games as there are `wins`, each played `tries` times; eval.py makes the summary."""
    rows = []
    for index, won in enumerate(wins):
        for branch in range(tries):
            line = trajectory(index, branch < won, ("valid_seen", "valid_unseen")[index % 2])
            rows.append(line | {"branch": branch, "valid_tool_calls": 1, "admissible_actions": 1, "truncated": False})
    splits = {split: [row for row in rows if row["split"] == split] for split in ("valid_seen", "valid_unseen")} | {"all": rows}
    summary = {split: evaluation.summarize(chosen, tries) for split, chosen in splits.items()}
    return write(path, update, rows=rows, splits=summary, settings=SETTINGS | {"trajectories_per_game": tries}, **changes)


def test_analysis_compares_by_game_and_shows_what_is_won_once(tmp_path, capsys):
    several(tmp_path / "base.jsonl", 0, [0, 1, 0, 4, 2, 0])
    several(tmp_path / "later.jsonl", 20, [1, 3, 0, 4, 4, 0])
    write(tmp_path / "once.jsonl", 40, "111111")
    images = analyse(tmp_path, "--result-dir", tmp_path)
    said = capsys.readouterr()
    assert "once.jsonl: not comparable: trajectories_per_game no value" in said.err or "not comparable: trajectories_per_game" in said.err
    base = next(line for line in said.out.splitlines() if line.startswith("base") and " all " in line)
    low, high = interval_over_games([0, 1, 0, 4, 2, 0], 4)
    assert base.split()[2:4] == ["6", "29.17%"] and f"[{low:6.1%}, {high:6.1%}]" in base and base.endswith(" 50.00%")
    test = [line.split() for line in said.out.splitlines() if line.startswith("update 20")][-1]
    assert test[2:6] == ["all", "6", "0", "3"] and float(test[6]) == sign_flip_exact([1, 2, 2]) == 0.25
    assert "sign-flip" in said.out and (images / "checkpoints.png").stat().st_size > 10_000


def test_the_figure_shows_both_curves_and_the_number_of_games(tmp_path):
    paths = [several(tmp_path / str(n), 20 * n, wins) for n, wins in enumerate(([0, 1, 0, 4, 2, 0], [1, 3, 0, 4, 4, 0]))]
    figure = analysis.draw_checkpoints([analysis.read_evaluation(path) for path in paths])
    by_split, overall, _ = figure.axes
    assert [text.get_text() for text in overall.get_legend().get_texts()] == ["mean of 4 tries", "won once in 4 at least"]
    curve = next(line for line in overall.lines if line.get_label().startswith("won once"))
    assert curve.get_ydata() == pytest.approx([50, 100 * 4 / 6]) and overall.get_ylim()[1] > 67
    assert [text.get_text() for text in by_split.get_legend().get_texts()] == ["valid_seen (n = 3)", "valid_unseen (n = 3)"]
    assert "4 trajectories each" in figure.get_supxlabel()
    plt.close(figure)


@pytest.mark.parametrize(
    ("tries", "spoil", "fault"),
    [
        (4, lambda lines: lines[1:], "game task-0/trial has 3 trajectories, not 4"),
        (4, lambda lines: [lines[0], *lines], "game task-0/trial again"),
        (4, lambda lines: [line | {"branch": 0} for line in lines], "game task-0/trial again"),
        (4, lambda lines: [*lines[:-1], lines[-1] | {"settings": SETTINGS}], "has 4 trajectories, not 1"),
        (4, lambda lines: [*lines[:-1], lines[-1] | {"settings": SETTINGS | {"trajectories_per_game": 0}}], "is 0, not a number"),
    ],
)
def test_a_file_that_lacks_a_trajectory_is_left_out(tmp_path, tries, spoil, fault):
    path = several(tmp_path / "a.jsonl", 0, [0, 1, 2], tries)
    lines = spoil([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(analysis.AnalysisError, match=fault):
        analysis.read_evaluation(path)


# --- eval.py --------------------------------------------------------------------------------------------------------


def test_settings_name_what_cannot_be():
    for tries in (0, 257):
        with pytest.raises(SettingsError, match=f"--trajectories-per-game is {tries}"):
            evaluation.EvalSettings(trajectories_per_game=tries)


def test_every_try_is_the_branch_of_a_group_and_a_cut_evaluation_goes_on(
    run, sampler, chat, pool, play_settings, tmp_path, monkeypatch, capsys
):
    async def engine(*arguments):
        assert await sampler._engine.reset_prefix_cache()  # a new engine's is empty
        return sampler

    monkeypatch.setattr(evaluation.Sampler, "start", engine)
    monkeypatch.setattr(evaluation.Sampler, "close", lambda sampler: None)
    write_line, room = evaluation.WorkingFile.write, [99]

    def break_off(working, *records):
        room[0] -= 1
        if room[0] < 0:
            raise ConnectionError("power cut")
        write_line(working, *records)

    monkeypatch.setattr(evaluation.WorkingFile, "write", break_off)

    def evaluate(name, tries, lines=99, **more):
        room[0] = lines
        settings = evaluation.EvalSettings(
            data_root=str(STARTER), limit_per_split=2, games_per_batch=3, trajectories_per_game=tries,
            output=str(tmp_path / name), **more,
        )  # fmt: skip
        run(evaluation.evaluate(settings, play_settings, EnvironmentSettings(compilers=1)))
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    *once, summary_of_once = evaluate("once.jsonl", 1)
    *found, summary = evaluate("unbroken.jsonl", 3)
    with pytest.raises(ConnectionError, match="power cut"):
        evaluate("broken.jsonl", 3, lines=3)  # the header and two games
    with pytest.raises(SettingsError, match="--trajectories-per-game was 3, now 1"):
        evaluate("broken.jsonl", 1, resume_output=True)
    partial = tmp_path / "broken.jsonl.partial"
    partial.write_bytes(b"".join(partial.read_bytes().splitlines(keepends=True)[:-1]))  # as if cut within the second game
    *resumed, resumed_summary = evaluate("broken.jsonl", 3, resume_output=True)
    assert "1 of 4 games are finished" in capsys.readouterr().out
    assert resumed == found and [one["branch"] for one in found] == [0, 1, 2] * 4
    assert resumed_summary["splits"] == summary["splits"]
    assert [one for one in found if one["branch"] == 0] == once
    assert "trajectories_per_game" not in summary_of_once["settings"] and summary["settings"]["trajectories_per_game"] == 3
    assert summary_of_once["splits"]["all"].keys() < summary["splits"]["all"].keys()
    whole = summary["splits"]["all"]
    assert (whole["games"], whole["trajectories"], sorted(whole["pass_at"])) == (4, 12, ["1", "2", "3"])
    assert whole["success"] == pytest.approx(whole["pass_at"]["1"]) == pytest.approx(sum(one["won"] for one in found) / 12)

    game = next(game for game in evaluation.find_games(STARTER, "valid_seen") if game.game_id == found[0]["game_id"])
    group = run(play_group(sampler, chat, pool, game, 3, 0, play_settings))
    assert [one["messages"] for one in found[:3]] == [one.record()["messages"] for one in group]


def working_file(path, *keys, tries=3):
    """Trajectories of a working file, by number of the game and branch."""
    header = HEADER | {"trajectories_per_game": tries}
    lines = [header, *(record(number, branch=branch) for number, branch in keys)]
    content = b"".join(map(evaluation.make_line, lines))
    return evaluation.read_working_file(path, content, header), len(content)


def test_a_game_is_finished_with_all_its_trajectories(tmp_path):
    whole = [(3, 0), (3, 1), (3, 2), (0, 0), (0, 1), (0, 2)]
    (records, size), length = working_file(tmp_path, *whole)
    assert [evaluation.key_of(one)[1:] for one in records] == [(f"task/{number}", branch) for number, branch in whole]
    assert size == length
    for cut in (1, 2):
        (records, size), _ = working_file(tmp_path, *whole[: 3 + cut])
        assert len(records) == 3 and size == working_file(tmp_path, *whole[:3])[1]


@pytest.mark.parametrize("keys", [
    [(3, 1), (3, 2)], [(3, 0), (3, 2)], [(3, 0), (0, 1)], [(3, 0), (3, 0)], [(3, 0), (0, 0)], [(3, 3)],
    [(3, 0), (3, 1), (3, 2), (3, 0), (3, 1), (3, 2)],
])  # fmt: skip
def test_trajectories_out_of_place_are_named(tmp_path, keys):
    with pytest.raises(SettingsError, match=r":\d: the line is damaged: .*remove all lines of its game"):
        working_file(tmp_path, *keys)
