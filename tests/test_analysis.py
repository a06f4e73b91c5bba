"""The statistics against independent references, the checks against one damaged file each, the figures once drawn."""

import itertools
import json
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
from matplotlib import pyplot as plt

import analysis
from data import TASK_TYPES
from rollout import wilson_interval

SETTINGS = {"temperature": 0.01, "top_p": 1.0, "seed": 42, "max_episode_steps": 50}


def trajectory(index: int, won: bool, split: str = "valid_seen", invalid: int = 1) -> dict:
    """A line with nothing but the fields that analysis needs."""
    return {"split": split, "game_id": f"task-{index}/trial", "task_type": TASK_TYPES[index % 6], "won": won,
            "reward": won - 0.1 * invalid, "steps": 10 + index, "invalid_actions": invalid}


def means(rows: list[dict]) -> dict:
    found = {"games": len(rows), "success": sum(row["won"] for row in rows) / len(rows), "success_by_task_type": {}}
    for name in ("reward", "steps", "invalid_actions"):
        found[name] = sum(row[name] for row in rows) / len(rows)
    for kind in {row["task_type"] for row in rows}:
        wins = [row["won"] for row in rows if row["task_type"] == kind]
        found["success_by_task_type"][kind] = {"games": len(wins), "success": sum(wins) / len(wins)}
    return found


def summary(rows: list[dict], update: int | None, **changes) -> dict:
    splits = {split: means([row for row in rows if row["split"] == split]) for split in {row["split"] for row in rows}}
    return {"type": "summary", "update": update, "base_model": "org/model", "settings": SETTINGS,
            "splits": splits | {"all": means(rows)}} | changes


def write(path: Path, update: int | None, wins: str = "1010", rows: list[dict] | None = None, **changes) -> Path:
    """An evaluation file of as many games as `wins` has digits, every second one unseen."""
    splits = itertools.cycle(("valid_seen", "valid_unseen"))
    rows = rows or [trajectory(index, digit == "1", next(splits)) for index, digit in enumerate(wins)]
    lines = [*rows, summary(rows, update, **changes)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(tmp_path: Path, *arguments: object) -> Path:
    analysis.main([*map(str, arguments), "--output", str(tmp_path / "images"), "--dpi", "40"])
    return tmp_path / "images"


# --- statistics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_gives_the_published_values(successes, trials, low, high):
    # R. G. Newcombe, Statistics in Medicine 17 (1998) 857-872, table I, score method without continuity correction
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("trials", [1, 2, 7, 140])
def test_wilson_interval_is_where_the_score_test_stops_rejecting(trials):
    z = 1.959963984540054

    def rejects(p, share):
        return abs(share - p) > z * math.sqrt(p * (1 - p) / trials)

    def edge(inside, outside, share):
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if rejects(middle, share) else (middle, outside)
        return inside

    for successes in range(trials + 1):
        share = successes / trials
        low, high = wilson_interval(successes, trials)
        assert 0 <= low <= share <= high <= 1
        assert low == pytest.approx(edge(share, 0.0, share) if successes else 0.0, abs=1e-9)
        assert high == pytest.approx(edge(share, 1.0, share) if successes < trials else 1.0, abs=1e-9)


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (-1, 5), (6, 5)])
def test_wilson_interval_refuses_what_is_no_proportion(successes, trials):
    with pytest.raises(ValueError, match=f"{successes} successes of {trials}"):
        wilson_interval(successes, trials)


def test_mcnemar_counts_the_outcomes_at_least_as_uneven_as_the_one_seen():
    for n in range(11):
        flips = list(itertools.product((0, 1), repeat=n))
        for b in range(n + 1):
            uneven = sum(abs(2 * sum(flip) - n) >= abs(2 * b - n) for flip in flips)
            assert analysis.mcnemar_exact(b, n - b) == pytest.approx(uneven / 2**n, abs=1e-12)


def test_mcnemar_gives_known_values_and_is_symmetric():
    assert analysis.mcnemar_exact(9, 2) == pytest.approx(0.06543, abs=5e-6)  # manual of R's exact2x2
    assert analysis.mcnemar_exact(2, 9) == analysis.mcnemar_exact(9, 2)
    assert analysis.mcnemar_exact(0, 0) == 1
    assert analysis.mcnemar_exact(0, 10) == 2 / 1024
    assert 0 < analysis.mcnemar_exact(1000, 1300) < 1e-9  # beyond what a float holds as 2**n
    with pytest.raises(ValueError, match="-1"):
        analysis.mcnemar_exact(-1, 3)


def test_paired_test_matches_games_by_name_and_not_by_line(tmp_path):
    first = analysis.read_evaluation(write(tmp_path / "a.jsonl", 0, "110100"))
    rows = [trajectory(index, won, split) for index, (won, split) in enumerate(zip(
        (False, True, True, True, True, True), ("valid_seen", "valid_unseen") * 3, strict=True))]
    second = analysis.read_evaluation(write(tmp_path / "b.jsonl", 20, rows=rows[::-1]))
    assert analysis.paired(first.outcomes, second.outcomes) == (1, 3, 10 / 16)  # line by line: (0, 2)


def test_trailing_mean_leaves_gaps_out():
    assert analysis.trailing_mean([1.0, math.nan, 3.0, 5.0], 2) == [1.0, 1.0, 3.0, 4.0]
    assert math.isnan(analysis.trailing_mean([math.nan], 3)[0])


# --- one damaged file ------------------------------------------------------------------------------------------

GOOD = [trajectory(index, index % 2 == 0) for index in range(3)]


def file_of(*records: object, end: str = "\n") -> bytes:
    return ("\n".join(one if isinstance(one, str) else json.dumps(one) for one in records) + end).encode()


def wrong_summary(path: tuple[str, ...], value: object) -> dict:
    claimed = summary(GOOD, 0)
    inner = claimed["splits"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return claimed


@pytest.mark.parametrize(
    ("content", "line", "fault"),
    [
        (b"", 1, "no trajectory"),
        (b"\n\n", 1, "no trajectory"),
        (file_of(summary(GOOD, 0)), 1, "no trajectory"),
        (file_of(*GOOD, '{"split": "valid_se', end=""), 4, "cut off mid-line"),
        (file_of(*GOOD), 3, "incomplete"),
        (file_of(GOOD[0], "won: yes", summary(GOOD, 0)), 2, "no valid JSON"),
        (file_of(GOOD[0], "[" * 100_000), 2, "no valid JSON"),
        (file_of(GOOD[0]) + b'{"split": "\xff"}\n', 2, "no valid JSON"),
        (file_of(GOOD[0], [1, 2]), 2, "not an object"),
        (file_of(*GOOD, GOOD[1], summary(GOOD, 0)), 4, "first on line 2"),
        (file_of(*GOOD, summary(GOOD, 0), summary(GOOD, 0)), 5, "after the summary"),
        (file_of({"update": 1, "train/loss": 0.5}), 1, "no split"),
        (file_of(GOOD[0] | {"split": "test"}), 1, 'split is "test"'),
        (file_of(GOOD[0] | {"task_type": ["x"]}), 1, "task_type"),
        (file_of(GOOD[0] | {"won": 1}), 1, "won is 1"),
        (file_of(GOOD[0] | {"reward": math.nan}), 1, "reward is NaN"),
        (file_of(GOOD[0] | {"reward": 10**400}), 1, "reward"),
        (file_of(GOOD[0] | {"steps": -1}), 1, "steps is -1"),
        (file_of(GOOD[0] | {"invalid_actions": True}), 1, "invalid_actions is true"),
        (file_of(*GOOD, summary(GOOD, None)), 4, "update is null"),
        (file_of(*GOOD, summary(GOOD, 0, settings=None)), 4, "settings"),
        (file_of(*GOOD, summary(GOOD, 0, splits=[])), 4, "no splits"),
        (file_of(*GOOD[:2], summary(GOOD, 0)), 3, "splits.valid_seen.games is 3, recomputed 2"),
        (file_of(*GOOD, wrong_summary(("all", "success"), 1.0)), 4, "splits.all.success is 1.0, recomputed 0.666667"),
        (file_of(*GOOD, wrong_summary(("valid_seen", "reward"), None)), 4, "splits.valid_seen.reward is null"),
        (file_of(*GOOD, wrong_summary(("all", "success_by_task_type"), 3)), 4, "success_by_task_type"),
        (file_of(*GOOD, wrong_summary(("all", "success_by_task_type", TASK_TYPES[0]), {"games": 2, "success": 1})), 4,
         "pick_and_place_simple.games is 2"),
    ],
)
def test_a_damaged_file_is_named_with_its_line_and_fault(tmp_path, content, line, fault):
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(content)
    with pytest.raises(analysis.AnalysisError) as error:
        analysis.read_evaluation(path)
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert fault in str(error.value)
    assert "\n" not in str(error.value)


def test_a_last_line_without_newline_and_a_rounded_summary_are_fine(tmp_path):
    rounded = json.loads(json.dumps(summary(GOOD, 7)), parse_float=lambda text: round(float(text), 5))
    path = tmp_path / "good.jsonl"
    path.write_bytes(file_of(*GOOD, rounded, end=""))
    evaluation = analysis.read_evaluation(path)
    assert (evaluation.update, evaluation.label, len(evaluation.outcomes)) == (7, "update 7", 3)


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(analysis.AnalysisError, match="gone.jsonl: cannot be read: No such file"):
        analysis.read_evaluation(tmp_path / "gone.jsonl")


# --- files against each other ----------------------------------------------------------------------------------


def compare(*paths: Path) -> tuple[list[int], list[str]]:
    kept, left_out = analysis.comparable([analysis.read_evaluation(path) for path in paths])
    return [evaluation.update for evaluation in kept], left_out


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"settings": SETTINGS | {"temperature": 1.0}}, "temperature 1.0 (in "),
        ({"settings": SETTINGS | {"new_setting": "x"}}, 'new_setting "x" (in '),
        ({"base_model": "org/other"}, "base model org/other (in "),
        ({"wins": "10101"}, "other games: lacks 0 of 4"),
        ({"wins": "101"}, "other games: lacks 1 of 4"),
    ],
)
def test_the_odd_file_is_left_out_with_the_reason(tmp_path, changes, reason):
    paths = [write(tmp_path / f"{update}.jsonl", update) for update in (40, 0)]
    odd = write(tmp_path / "odd.jsonl", 20, **changes)
    updates, (line,) = compare(*paths, odd)
    assert updates == [0, 40]
    assert line.startswith(f"{odd}: not comparable: ")
    assert reason in line


def test_a_short_trial_of_the_base_does_not_push_the_checkpoints_out(tmp_path):
    paths = [write(tmp_path / "base.jsonl", 0, "10"), *(write(tmp_path / f"{u}.jsonl", u) for u in (20, 40))]
    updates, left_out = compare(*paths)
    assert updates == [20, 40]
    assert len(left_out) == 1 and "base.jsonl" in left_out[0]


def test_how_the_work_was_spread_does_not_part_files(tmp_path):
    paths = [write(tmp_path / f"{update}.jsonl", update, settings=SETTINGS | {"games_per_batch": update + 1})
             for update in (0, 20)]
    assert compare(*paths) == ([0, 20], [])


def test_two_files_of_one_update_are_both_left_out(tmp_path):
    paths = [write(tmp_path / name, update) for name, update in (("base", 0), ("seed1", 80), ("seed2", 80))]
    updates, left_out = compare(*paths)
    assert updates == [0]
    assert [line.split(":")[0] for line in left_out] == [str(path) for path in paths[1:]]
    assert all("update 80 is also that of" in line for line in left_out)


# --- the program -----------------------------------------------------------------------------------------------


def test_table_and_test_hold_the_numbers_of_the_files(tmp_path, capsys):
    write(tmp_path / "z-base.jsonl", 0, "11000000")
    write(tmp_path / "a-later.jsonl", 20, "10111110")
    run(tmp_path, "--result-dir", tmp_path)
    printed = capsys.readouterr().out.splitlines()
    rows = {tuple(line.split()[:2]): line.split() for line in printed if " all " in line or "valid_" in line}
    base = next(line for line in printed if line.startswith("base") and " all " in line)
    assert base.split()[1:3] == ["all", "8"]
    assert "25.00% [  7.1%,  59.1%]" in base  # Newcombe's formula by hand: 2 of 8
    assert base.split()[-3:] == ["0.1500", "1.00", "13.50"]
    assert rows["base", "valid_seen"][2] == "4"
    test = [line.split() for line in printed if line.startswith("update 20")]
    assert [line[2:] for line in test[3:]] == [
        ["valid_seen", "4", "0", "3", "0.25"],
        ["valid_unseen", "4", "1", "2", "1"],
        ["all", "8", "1", "5", "0.22"],
    ]


@pytest.mark.parametrize("wins", [["1"], ["0000"], ["1111", "0000"], ["00", "01", "10", "11", "00"]])
def test_figures_are_drawn_for_few_and_many_files_without_a_warning(tmp_path, wins, recwarn):
    for index, digits in enumerate(wins):
        write(tmp_path / f"{index}.jsonl", 20 * index, digits)
    images = run(tmp_path, "--result-dir", tmp_path)
    assert sorted(path.name for path in images.iterdir()) == ["checkpoints.png", "task_types.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in images.iterdir())
    assert not recwarn.list
    assert not plt.get_fignums()


def test_checkpoint_figure_shows_n_intervals_and_the_test(tmp_path):
    paths = [write(tmp_path / str(update), update, wins, base_model="org/model$^$")
             for update, wins in ((0, "10000000"), (20, "01111111"))]
    figure = analysis.draw_checkpoints([analysis.read_evaluation(path) for path in paths])
    by_split, overall, invalid = figure.axes
    assert [text.get_text() for text in by_split.get_legend().get_texts()] == [
        "valid_seen (n = 4)", "valid_unseen (n = 4)"]
    assert [text.get_text() for text in overall.texts] == ["p = 0.07"]  # 1 against 7 of 8: 2 * 9 / 256
    segments = overall.containers[0].lines[2][0].get_segments()
    assert segments[0][:, 1] / 100 == pytest.approx(wilson_interval(1, 8))
    assert segments[1][:, 1] / 100 == pytest.approx(wilson_interval(7, 8))
    assert list(invalid.lines[0].get_xdata()) == [0, 20]
    assert all(axes.get_ylabel() for axes in figure.axes)
    figure.savefig(tmp_path / "figure.png", dpi=40)  # a dollar sign in the model's name is no formula
    plt.close(figure)


def test_bad_files_are_named_on_stderr_and_the_rest_is_drawn(tmp_path, capsys):
    good, bad = write(tmp_path / "good.jsonl", 0), tmp_path / "bad.jsonl"
    bad.write_text(good.read_text()[:-20])
    other = write(tmp_path / "other.jsonl", 20, settings=SETTINGS | {"seed": 1})
    write(tmp_path / "later.jsonl", 40)
    images = run(tmp_path, "--result-dir", tmp_path)
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith(f"left out: {bad}:5: cut off mid-line")
    assert errors[1].startswith(f"left out: {other}: not comparable: seed 1")
    assert len(errors) == 2
    assert (images / "checkpoints.png").exists()


def test_named_files_are_read_instead_of_the_folder_and_once_each(tmp_path, capsys):
    base = write(tmp_path / "base.jsonl", 0)
    write(tmp_path / "later.jsonl", 20)
    (tmp_path / "link").symlink_to(base)
    run(tmp_path, base, tmp_path / "link", "--result-dir", tmp_path)
    output = capsys.readouterr()
    assert "update 20" not in output.out
    assert not output.err


@pytest.mark.parametrize("damaged", [False, True])
def test_without_a_usable_file_one_error_says_how_to_evaluate(tmp_path, damaged):
    if damaged:
        (tmp_path / "a.jsonl").write_text("{")
    with pytest.raises(SystemExit) as error:
        run(tmp_path, "--result-dir", tmp_path)
    assert "uv run python eval.py --split all" in str(error.value)
    assert ("none of 1" if damaged else str(tmp_path)) in str(error.value)
    assert not (tmp_path / "images").exists()


def test_training_curves_take_the_last_line_of_an_update_and_leave_gaps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"update": 1, "reward/mean": 0.1}, {"update": 2, "reward/mean": 9}, {"update": 2, "reward/mean": 0.3},
             {"update": 3, "reward/mean": None, "mismatch/k3": 0.001}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    updates, metrics = analysis.read_metrics(path)
    assert updates == [1, 2, 3]
    assert metrics["reward/mean"] == pytest.approx([0.1, 0.3, math.nan], nan_ok=True)
    assert metrics["mismatch/k3"] == pytest.approx([math.nan, math.nan, 0.001], nan_ok=True)
    images = run(tmp_path, "--metrics", path, "--result-dir", tmp_path / "nothing")
    assert [image.name for image in images.iterdir()] == ["training.png"]


def test_training_curves_show_the_meter_where_it_was_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    meter = {"eval/success": 0.5, "eval/success_low": 0.4, "eval/success_high": 0.7}
    lines = [{"update": 1, "reward/success": 0.1}, {"update": 2, "reward/success": 0.2} | meter, {"update": 3}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figure = analysis.draw_training(*analysis.read_metrics(path))
    [container] = figure.axes[0].containers
    (line,), [bars] = container.lines[0:1], container.lines[2]
    assert line.get_xydata().tolist() == [[2, 0.5]]
    assert bars.get_segments()[0] == pytest.approx(np.array([[2, 0.4], [2, 0.7]]))
    path.write_text(json.dumps(lines[0]) + "\n")
    assert not analysis.draw_training(*analysis.read_metrics(path)).axes[0].containers


@pytest.mark.parametrize(
    ("content", "fault"),
    [("", ":1: no update"), ('{"update": 1}\n{"upd', ":2: cut off"), ('{"loss": 1}\n', ":1: no update"),
     ('{"update": 1, "reward/mean": "x"}\n', ':1: reward/mean is "x"')],
)
def test_a_damaged_training_log_is_one_error(tmp_path, content, fault):
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    with pytest.raises(SystemExit, match="metrics.jsonl" + fault):
        run(tmp_path, write(tmp_path / "base", 0), "--metrics", path)


def test_impossible_settings_are_refused_with_their_value(tmp_path):
    base = write(tmp_path / "base.jsonl", 0)
    with pytest.raises(SystemExit, match="--dpi 0: give 20"):
        analysis.main([str(base), "--dpi", "0"])
    with pytest.raises(SystemExit, match="base.jsonl: is a file; name a folder"):
        analysis.main([str(base), "--output", str(base)])
    with pytest.raises(SystemExit, match="--output .*: cannot write"):
        analysis.main([str(base), "--output", str(base / "images")])
