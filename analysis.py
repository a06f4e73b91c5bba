"""Figures and tests from evaluation files: what did training change, and by more than chance?

Owns the reading and checking of evaluation JSONL (one trajectory a line, a summary last, as eval.py writes it),
the statistics (Wilson intervals, exact McNemar tests) and the figures. Of a trajectory line it needs split,
game_id, task_type, won, reward, steps, invalid_actions alone: slim files of per-game outcomes serve as well.
Owns the replay page too (images/replay_template.html), which needs the texts, and the rules for why a game was lost.

Invariant: every figure and test comes from files proven comparable: complete, of one base model, with equal
evaluation settings and the same games. A file that is not is named, with the reason, and left out.

    python analysis.py                                            # every *.jsonl of eval_results/ -> images/
    python analysis.py base.jsonl update-80.jsonl --metrics runs/NAME/metrics.jsonl
    python analysis.py --replay base.jsonl update-80.jsonl        # a page for the browser -> images/replay.html
    python analysis.py --watch runs/NAME                          # training curves while the run goes on
"""

import argparse
import base64
import contextlib
import hashlib
import json
import math
import os
import re
import signal
import statistics
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path

# A notebook hands its backend down to the commands that it starts; where that is not installed, the import fails.
BACKEND_FOR_WINDOWS = os.environ.pop("MPLBACKEND", "")

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data import LARGEST_FILE, SPLITS, TASK_TYPES, json_object, open_file, read_file, shown, write_any_text
from rollout import interval_over_games, pass_at
from advantages import group_advantages

EVAL_COMMAND = "uv run python eval.py --split all   (for a checkpoint add --model-path PATH)"
# How the work was spread, and which games were asked for: the games themselves are compared one by one.
SETTINGS_WITHOUT_EFFECT = {"games_per_batch", "data_root", "split", "limit_per_split"}
SUMMARY_TOLERANCE = 1e-4  # one step, win or invalid action in 274 games moves a mean by more, rounding does not

TASK_LABELS = {
    "pick_and_place_simple": "pick & place", "look_at_obj_in_light": "look in light",
    "pick_clean_then_place_in_recep": "clean & place", "pick_heat_then_place_in_recep": "heat & place",
    "pick_cool_then_place_in_recep": "cool & place", "pick_two_obj_and_place": "pick two & place",
}
TRAINING_PANELS = (  # title, metrics of metrics.jsonl, logarithmic axis
    ("Success and reward, training games", ("reward/success", "reward/mean"), False),
    ("Invalid actions a trajectory", ("rollout/invalid_actions",), False),
    ("Entropy (nats a token)", ("train/entropy",), False),
    ("Mismatch of rollout and trainer (KL, k3)", ("mismatch/k3",), True),
)
METER = ("eval/success", "eval/success_low", "eval/success_high")  # at some updates, with --eval-every
TEST = ("exact McNemar test", "exact sign-flip test over games")  # with one try a game, and with several
TRAILING_UPDATES = 10  # the bold training curves are means of this many updates

# Colours of Okabe & Ito, told apart with every common kind of colour blindness; the markers differ as well.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#555555"
SPLIT_STYLE = {"train": (GREEN, "D"), "valid_seen": (BLUE, "o"), "valid_unseen": (ORANGE, "s")}
STYLE = {
    "font.size": 11, "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#DDDDDD", "lines.linewidth": 1.8, "lines.markersize": 6.5, "legend.frameon": False,
    "legend.fontsize": 10, "errorbar.capsize": 3.5, "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.07, "figure.constrained_layout.w_pad": 0.07,  # inches
}


class AnalysisError(ValueError):
    """An input that cannot be used: one line naming the file, the line in it and what is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message))


def flag(default, **argument):
    """A field of the settings and the arguments of its `add_argument`."""
    return field(default=default, metadata=argument)


@dataclass(frozen=True)
class AnalysisSettings:
    files: tuple[Path, ...] = flag((), type=Path, nargs="*", help="evaluation files; default: those of --result-dir")
    result_dir: Path = flag(Path("eval_results"), type=Path, help="folder whose *.jsonl are read (%(default)s)")
    output: Path = flag(Path("images"), type=Path,
                        help="folder for the figures and replay.html, or the page's own file (%(default)s)")
    metrics: Path | None = flag(None, type=Path, help="metrics.jsonl of a run: draw its training curves too")
    replay: tuple[Path, ...] = flag((), type=Path, nargs="+", metavar="FILE",
                                    help="write a page that shows these evaluations (with texts) and rollouts")
    watch: Path | None = flag(None, type=Path, metavar="RUN", help="a run's folder: show its updates as they come")
    dpi: int = flag(200, type=int, help="pixels an inch, figures are 10 inches wide (%(default)s)")
    show: bool = flag(False, action="store_true", help="open the figures in windows as well")

    def __post_init__(self):
        if not 20 <= self.dpi <= 1200:
            raise AnalysisError(f"--dpi {self.dpi}: give 20 to 1200")
        if self.output.exists() and not self.output.is_dir() and not self.replay:
            raise AnalysisError(f"--output {self.output}: is a file; name a folder")
        if bool(self.files or self.metrics or self.show) + bool(self.replay) + (self.watch is not None) > 1:
            raise AnalysisError("--replay and --watch go alone: without each other, files, --metrics and --show")


@dataclass(frozen=True)
class Outcome:
    """How one trajectory ended; reward and counts are those of the whole trajectory."""

    split: str
    game_id: str
    task_type: str
    won: bool
    reward: float
    steps: int
    invalid_actions: int

    @property
    def game(self) -> tuple[str, str, str]:
        return self.split, self.game_id, self.task_type


@dataclass(frozen=True)
class Evaluation:
    """One complete evaluation file; `update`: the number of optimizer steps its weights have had (base: 0)."""

    path: Path
    base_model: str
    update: int
    settings: dict
    outcomes: tuple[Outcome, ...]

    @property
    def label(self) -> str:
        return f"update {self.update}" if self.update else "base"

    @property
    def tries(self) -> int:
        """Trajectories a game."""
        return self.settings.get("trajectories_per_game", 1)

    @property
    def splits(self) -> list[str]:
        return [split for split in SPLITS if select(self, split)]

    @property
    def games(self) -> set[tuple[str, str, str]]:
        return {outcome.game for outcome in self.outcomes}


# --- statistics ---------------------------------------------------------------------------------------------


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided p of the exact McNemar test; b games were won only by the first, c only by the second evaluation.

    If neither is better, each of these n = b + c discordant games falls to either side with probability 1/2:

        p = min(1, 2 * sum_{k=0}^{min(b, c)} C(n, k) / 2^n)

    No correction for testing several checkpoints. ValueError for negative counts.
    Source: Q. McNemar, Psychometrika 12 (1947) 153-157, its chi-square replaced by the binomial it approximates.
    """
    if b < 0 or c < 0:
        raise ValueError(f"{b} and {c} discordant games: counts cannot be negative")
    return min(1.0, 2 * sum(math.comb(b + c, k) for k in range(min(b, c) + 1)) / 2 ** (b + c))


def sign_flip_exact(differences: Sequence[int]) -> float:
    """Two-sided p of the exact paired randomization test; differences: by game, in wins among equally many tries.

    If neither evaluation is better, each difference is as likely with the other sign. p is the share of all choices of
    signs whose sum is as far from zero as the one seen, or further. With one try a game that is `mcnemar_exact`.
    Source: R. A. Fisher, The Design of Experiments (1935), section 21.
    """
    sizes = [abs(difference) for difference in differences if difference]
    seen, reach = abs(sum(differences)), sum(sizes)
    share = np.zeros(2 * reach + 1)  # of the choices, by sum from -reach to reach
    share[reach] = 1.0
    for size in sizes:  # no sum leaves the array, so nothing wraps around
        share = (np.roll(share, size) + np.roll(share, -size)) / 2
    return min(1.0, float(share[np.abs(np.arange(-reach, reach + 1)) >= seen].sum()))


def wins_by_game(outcomes: Sequence[Outcome]) -> Counter:
    wins = Counter()
    for outcome in outcomes:
        wins[outcome.game] += outcome.won
    return wins


def paired(first: Sequence[Outcome], second: Sequence[Outcome]) -> tuple[int, int, float]:
    """How many games the first and the second of two evaluations of the same games won more often, and p of that."""
    ours, theirs = wins_by_game(first), wins_by_game(second)
    differences = [theirs[game] - ours[game] for game in theirs]
    b, c = sum(value < 0 for value in differences), sum(value > 0 for value in differences)
    once = len(second) == len(theirs)
    return b, c, mcnemar_exact(b, c) if once else sign_flip_exact(differences)


def select(evaluation: Evaluation, split: str = "all", task_type: str | None = None) -> list[Outcome]:
    return [outcome for outcome in evaluation.outcomes
            if split in ("all", outcome.split) and task_type in (None, outcome.task_type)]


def success(outcomes: Sequence[Outcome]) -> tuple[float, float, float]:
    """Share of trajectories won in [0, 1], low and high end of its interval over games."""
    wins = wins_by_game(outcomes)
    return wins.total() / len(outcomes), *interval_over_games(list(wins.values()), len(outcomes) // len(wins))


def won_once(evaluation: Evaluation, split: str = "all") -> float:
    """Share of games that were won in one of their tries at least (pass@K)."""
    return pass_at(evaluation.tries, list(wins_by_game(select(evaluation, split)).values()), evaluation.tries)


def mean(outcomes: Sequence[Outcome], name: str) -> float:
    return math.fsum(getattr(outcome, name) for outcome in outcomes) / len(outcomes)


def trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """For each value the mean of the last `window`, NaN (an update without this metric) not counted."""
    recent = [[value for value in values[max(0, end - window):end] if not math.isnan(value)]
              for end in range(1, len(values) + 1)]
    return [math.fsum(known) / len(known) if known else math.nan for known in recent]


# --- reading and checking -----------------------------------------------------------------------------------


def read_lines(path: Path) -> Iterator[tuple[int, dict | AnalysisError]]:
    """Number of each line of a JSONL file and its object, or what is wrong with it; AnalysisError if unreadable."""
    try:
        with open_file(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LARGEST_FILE), b""), 1):
                if not line.strip():
                    continue
                try:
                    yield number, json_object(line)
                except ValueError as error:
                    fault = str(error) if line.endswith(b"\n") else "cut off mid-line; evaluate again"
                    yield number, AnalysisError(f"{path}:{number}: {fault}")
    except OSError as error:
        raise AnalysisError(f"{path}: cannot be read: {error.strerror}") from None


def read_records(path: Path) -> Iterator[tuple[int, dict]]:
    """Line number and object of each line of a JSONL file; AnalysisError at the first that is not an object."""
    for number, record in read_lines(path):
        if isinstance(record, AnalysisError):
            raise record
        yield number, record


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12  # not NaN either


def brief(value: object) -> str:
    """A value of a file, as short as a message needs it."""
    return "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else json.dumps(value)[:60]


def is_count(value: object) -> bool:
    return isinstance(value, int) and is_number(value) and value >= 0


OUTCOME_CHECKS = {
    "split": (lambda value: value in SPLITS, f"one of {', '.join(SPLITS)}"),
    "game_id": (lambda value: isinstance(value, str) and value, "a text"),
    "task_type": (lambda value: value in TASK_TYPES, "one of the six task types"),
    "won": (lambda value: isinstance(value, bool), "true or false"),
    "reward": (is_number, "a number"),
    "steps": (is_count, "a count"),
    "invalid_actions": (is_count, "a count"),
}


def check_fields(where: str, record: dict, checks: dict) -> None:
    """Raise AnalysisError unless `record` has each name of `checks`, with a value that its check takes."""
    for name, (is_valid, expected) in checks.items():
        if name not in record:
            raise AnalysisError(f"{where}: no {name}: not a trajectory as eval.py writes it")
        if not is_valid(record[name]):
            raise AnalysisError(f"{where}: {name} is {brief(record[name])}, not {expected}")


def read_evaluation(path: Path) -> Evaluation:
    """One evaluation file, every line checked, its summary recomputed; AnalysisError says what is wrong where."""
    outcomes: list[Outcome] = []
    first_line: dict[tuple[str, str, int], int] = {}
    summary, where = None, f"{path}:1"
    for number, record in read_records(path):
        where = f"{path}:{number}"
        if summary is not None:
            raise AnalysisError(f"{where}: a line after the summary; a file holds one evaluation")
        if record.get("type") == "summary":
            summary = record
            continue
        check_fields(where, record, OUTCOME_CHECKS)
        outcome = Outcome(**{name: record[name] for name in OUTCOME_CHECKS})
        branch = record.get("branch", 0)
        earlier = first_line.setdefault((outcome.split, outcome.game_id, branch if is_count(branch) else 0), number)
        if earlier != number:
            raise AnalysisError(f"{where}: {outcome.split} game {outcome.game_id} again (first on line {earlier})")
        outcomes.append(outcome)
    if not outcomes:
        raise AnalysisError(f"{where}: no trajectory in the file")
    if summary is None:
        raise AnalysisError(f"{where}: ends without a summary after {len(outcomes)} trajectories: incomplete")
    update, base_model, settings = (summary.get(name) for name in ("update", "base_model", "settings"))
    if not is_count(update):
        raise AnalysisError(f"{where}: the summary's update is {brief(update)}, not a count")
    if not (isinstance(base_model, str) and base_model.isprintable()) or not isinstance(settings, dict):
        raise AnalysisError(f"{where}: the summary lacks base_model or settings: nothing to compare it by")
    for name, value in settings.items():
        if not name[:60].isprintable() or isinstance(value, list | dict):
            raise AnalysisError(f"{where}: the summary's setting {brief(name)} is {brief(value)}: not eval.py's")
    evaluation = Evaluation(path, base_model, update, settings, tuple(outcomes))
    if not is_count(evaluation.tries) or not evaluation.tries:
        raise AnalysisError(f"{where}: the summary's trajectories_per_game is {brief(evaluation.tries)}, not a number of tries")
    for (split, game_id, _), count in Counter(outcome.game for outcome in outcomes).items():
        if count != evaluation.tries:
            raise AnalysisError(f"{where}: {split} game {game_id} has {count} trajectories, not {brief(evaluation.tries)}")
    fault = contradiction(summarise(evaluation), summary.get("splits"))
    if fault:
        raise AnalysisError(f"{where}: summary and trajectories disagree: {fault}")
    return evaluation


def summarise(evaluation: Evaluation) -> dict:
    """What the trajectories say of the numbers in a summary's `splits`."""
    found = {}
    for split in [*evaluation.splits, "all"]:
        outcomes = select(evaluation, split)
        by_type = {kind: select(evaluation, split, kind) for kind in TASK_TYPES}
        found[split] = {"games": len(outcomes) // evaluation.tries, "success": success(outcomes)[0]}
        if evaluation.tries > 1:
            found[split]["pass_at"] = {str(evaluation.tries): won_once(evaluation, split)}
        found[split] |= {name: mean(outcomes, name) for name in ("reward", "steps", "invalid_actions")}
        found[split]["success_by_task_type"] = {
            kind: {"games": len(some) // evaluation.tries, "success": success(some)[0]} for kind, some in by_type.items() if some}
    return found


def contradiction(found: object, claimed: object, name: str = "splits") -> str | None:
    """The first number of `found`, at any depth, that `claimed` lacks or puts differently; None if none."""
    if isinstance(found, dict) and isinstance(claimed, dict):
        faults = (contradiction(value, claimed.get(key), f"{name}.{key}") for key, value in found.items())
        return next(filter(None, faults), None)
    if isinstance(found, dict):
        return f"no {name}"
    if is_number(claimed) and abs(claimed - found) <= SUMMARY_TOLERANCE:
        return None
    return f"{name} is {brief(claimed)}, recomputed {found:.6g}"


def difference(reference: Evaluation, other: Evaluation) -> str | None:
    """Why `other` cannot be compared with `reference`; None if it can."""
    if other.base_model != reference.base_model:
        return f"base model {other.base_model[-80:]} (in {reference.path}: {reference.base_model[-80:]})"
    for name in sorted({*reference.settings, *other.settings} - SETTINGS_WITHOUT_EFFECT):
        expected, value = reference.settings.get(name), other.settings.get(name)
        if value != expected:
            return f"{name[:60]} {brief(value)} (in {reference.path}: {brief(expected)})"
    lacking, added = len(reference.games - other.games), len(other.games - reference.games)
    if lacking or added:
        return f"other games: lacks {lacking} of {len(reference.games)} in {reference.path}, has {added} others"
    return None


def comparable(evaluations: Sequence[Evaluation]) -> tuple[list[Evaluation], list[str]]:
    """The largest set of comparable files, by update, and one line for each file left out.

    Largest: most updates, then most games, then the earliest update. Where two files of the set have the same
    update, nothing says which of them belongs to the run, so both are left out.
    """
    groups: list[list[Evaluation]] = []
    for evaluation in sorted(evaluations, key=lambda one: one.update):
        group = next((group for group in groups if difference(group[0], evaluation) is None), None)
        if group is None:
            groups.append([evaluation])
        else:
            group.append(evaluation)
    largest = max(groups, key=lambda group: (len({one.update for one in group}), len(group[0].games)), default=[])
    kept, left_out = [], []
    for evaluation in (one for group in groups for one in group):
        reason = difference(largest[0], evaluation)
        twins = [one.path for one in largest if one.update == evaluation.update and one is not evaluation]
        if reason is None and twins:
            reason = f"update {evaluation.update} is also that of {twins[0]}; name the files of one run"
        if reason is None:
            kept.append(evaluation)
        else:
            left_out.append(f"{evaluation.path}: not comparable: {reason}")
    return kept, left_out


def read_metrics(path: Path, more: Sequence[str] = ()) -> tuple[list[int], dict[str, list[float]]]:
    """Updates in order and, for each metric of TRAINING_PANELS and `more`, its value at each (NaN if none was logged).

    Of an update that is logged twice (a run that was resumed from before it) the last line counts.
    """
    names = [name for _, metrics, _ in TRAINING_PANELS for name in metrics] + [*METER, *more]
    rows: dict[int, dict[str, float]] = {}
    for number, record in read_records(path):
        if not is_count(record.get("update")):
            raise AnalysisError(f"{path}:{number}: no update: not a metrics.jsonl as train.py writes it")
        for name in names:
            value = record.get(name)
            if not (value is None or is_number(value) or isinstance(value, float) and math.isnan(value)):
                raise AnalysisError(f"{path}:{number}: {name} is {brief(record[name])}, not a number")
        rows[record["update"]] = {name: math.nan if record.get(name) is None else record[name] for name in names}
    if not rows:
        raise AnalysisError(f"{path}:1: no update in the file")
    updates = sorted(rows)
    return updates, {name: [rows[update][name] for update in updates] for name in names}


# --- tables -------------------------------------------------------------------------------------------------


def table(evaluations: Sequence[Evaluation]) -> str:
    """Scores by checkpoint and split, then the paired tests against the earliest checkpoint."""
    base, *later = evaluations
    splits = base.splits + ["all"] * (len(base.splits) > 1)
    row = "{:<12} {:<12} {:>4}".format
    several = base.tries > 1
    lines = [row("checkpoint", "split", "n") + "   success [95 % interval]   reward  invalid  steps"
             + f"  won once in {base.tries}" * several]  # fmt: skip
    for evaluation, split in product(evaluations, splits):
        games = select(evaluation, split)
        share, low, high = success(games)
        reward, invalid, steps = (mean(games, name) for name in ("reward", "invalid_actions", "steps"))
        lines.append(row(evaluation.label, split, len(games) // base.tries) + f" {share:>9.2%} [{low:6.1%}, {high:6.1%}] "
                     f"{reward:>8.4f} {invalid:>8.2f} {steps:>6.2f}"
                     + (f"  {won_once(evaluation, split):>14.2%}" if several else ""))  # fmt: skip
    if later:
        lines += ["", f"By {TEST[several]}: games won {('only', 'more often')[several]} by {base.label} (b), "
                  f"{('only', 'more often')[several]} by the checkpoint (c)",
                  row("checkpoint", "split", "n") + "    b    c        p"]
    for evaluation, split in product(later, splits):
        games = select(evaluation, split)
        b, c, p = paired(select(base, split), games)
        lines.append(row(evaluation.label, split, len(games) // base.tries) + f" {b:>4} {c:>4} {p:>8.2g}")
    return "\n".join(lines)


# --- figures ------------------------------------------------------------------------------------------------


def draw_success(axes: Axes, positions: Sequence[float], groups: Sequence[Sequence[Outcome]], **style) -> None:
    """Success in percent with its interval, one point a group."""
    shares, lows, highs = 100 * np.array([success(outcomes) for outcomes in groups]).T
    axes.errorbar(positions, shares, np.array([shares - lows, highs - shares]), elinewidth=1.4, **style)
    axes.set_ylabel("success (%)")


def zoom_percent(axes: Axes, groups: Sequence[Sequence[Outcome]]) -> None:
    """Limits in steps of 10 % around the intervals, at least 40 apart, with room above for a line of text."""
    low = math.floor(10 * min(success(outcomes)[1] for outcomes in groups)) * 10
    high = math.ceil(10 * max(success(outcomes)[2] for outcomes in groups)) * 10
    while high - low < 40:
        low, high = max(0, low - 10), min(100, high + 10)
    step = 10 if high - low <= 50 else 20
    axes.set_yticks([tick for tick in range(0, 101, step) if low <= tick <= high])
    axes.set_ylim(low - 0.04 * (high - low), high + 0.1 * (high - low))


def spread(updates: Sequence[int], gap: float) -> list[int]:
    """The first and the last of `updates`, and those between that keep `gap` to their neighbours."""
    kept = [updates[0]]
    for update in updates[1:-1]:
        if update - kept[-1] >= gap and updates[-1] - update >= gap:
            kept.append(update)
    return kept + [updates[-1]] * (len(updates) > 1)


def draw_checkpoints(evaluations: Sequence[Evaluation]) -> Figure:
    """By update: success of each split, success over all games with the paired test, mean invalid actions."""
    base = evaluations[0]
    updates = [evaluation.update for evaluation in evaluations]
    span = max(updates[-1] - updates[0], 1)
    figure = plt.figure(figsize=(10, 5))
    grid = figure.add_gridspec(2, 2, width_ratios=(1.15, 1), height_ratios=(1.4, 1))
    by_split, overall, invalid = (figure.add_subplot(cell) for cell in (grid[:, 0], grid[0, 1], grid[1, 1]))

    for index, split in enumerate(base.splits):
        colour, marker = SPLIT_STYLE[split]
        shift = 0.012 * span * (2 * index - len(base.splits) + 1)  # so that the intervals stand side by side
        groups = [select(evaluation, split) for evaluation in evaluations]
        draw_success(by_split, [update + shift for update in updates], groups, color=colour, marker=marker,
                     label=f"{split} (n = {len(groups[0]) // base.tries})")
    by_split.set_title("Success by split")
    by_split.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=len(base.splits))
    zoom_percent(by_split, [select(evaluation, split) for evaluation in evaluations for split in base.splits])

    groups = [select(evaluation) for evaluation in evaluations]
    draw_success(overall, updates, groups, color=GREY, marker="o")
    overall.set_title(f"Success, all games (n = {len(base.games)})")
    zoom_percent(overall, groups)
    if base.tries > 1:
        draw_won_once(overall, evaluations)
    for update, games in zip(updates[1:], groups[1:], strict=True):
        if update in spread(updates, span / 5):
            p, high = paired(groups[0], games)[2], success(games)[2]
            overall.annotate("p < 0.001" if p < 0.001 else f"p = {p:.2g}", (update, 100 * high), (0, 4),
                             textcoords="offset points", ha="center", fontsize=9.5)

    means = [mean(games, "invalid_actions") for games in groups]
    invalid.plot(updates, means, color=GREY, marker="D")
    invalid.set(title=f"Invalid actions a trajectory (n = {len(base.outcomes)})", ylabel="mean",
                ylim=(0, 1.15 * max(means) or 1))
    for axes in (by_split, overall, invalid):
        ticks = spread(updates, span / 12)
        axes.set_xticks(ticks, [str(update) if update else "base" for update in ticks])
        margin = 0.09 * span if len(updates) > 1 else 0.2
        axes.set_xlim(updates[0] - margin, updates[-1] + margin)
    for axes in (by_split, invalid):
        axes.set_xlabel("update")
    test = f" p: {TEST[base.tries > 1]} against {base.label}, same games." if len(updates) > 1 else ""
    caption(figure, f"{base.base_model[-80:]}. {bars(base)}{test}")
    return figure


def draw_won_once(axes: Axes, evaluations: Sequence[Evaluation]) -> None:
    """By update the share of games that were won at least once."""
    tries = evaluations[0].tries
    shares = [100 * won_once(evaluation) for evaluation in evaluations]
    axes.plot([evaluation.update for evaluation in evaluations], shares, color=GREEN, marker="^", linestyle="--",
              label=f"won once in {tries} at least")  # fmt: skip
    axes.lines[0].set_label(f"mean of {tries} tries")
    low, high = axes.get_ylim()
    axes.set_ylim(low, max(high, min(104, max(shares) + 6)))
    axes.set_yticks(range(0, 101, 20))
    axes.legend(loc="best")


def bars(evaluation: Evaluation) -> str:
    """What the bars of a figure are."""
    of = f" over games, {evaluation.tries} trajectories each" if evaluation.tries > 1 else ""
    return f"Bars: Wilson 95 % intervals{of}."


def draw_task_types(evaluations: Sequence[Evaluation]) -> Figure:
    """Success by task type, all splits together, one point a checkpoint."""
    base = evaluations[0]
    figure, axes = plt.subplots(figsize=(10, 4.4))
    games = {kind: len(select(base, task_type=kind)) // base.tries for kind in TASK_TYPES}
    labels = {kind: f"{TASK_LABELS[kind]}\nn = {count}" for kind, count in games.items() if count}
    for index, evaluation in enumerate(evaluations):
        shift = 0.7 / max(len(evaluations), 4) * (index - (len(evaluations) - 1) / 2)
        colour = plt.get_cmap("viridis")(0.8 * index / (len(evaluations) - 1)) if index else GREY
        draw_success(axes, [place + shift for place in range(len(labels))],
                     [select(evaluation, task_type=kind) for kind in labels], color=colour, linestyle="none",
                     marker="osD^vP*X"[index % 8], label=evaluation.label)
    axes.set_xticks(range(len(labels)), labels.values())
    axes.set(title=f"Success by task type ({' + '.join(base.splits)})", ylim=(-4, 104))
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=6)
    caption(figure, f"{base.base_model[-80:]}. {bars(base)}")
    return figure


def draw_training(updates: Sequence[int], metrics: dict[str, list[float]]) -> Figure:
    """The metrics of TRAINING_PANELS by update: each value pale, the trailing mean bold."""
    figure, grid = plt.subplots(2, 2, figsize=(10, 5.6), sharex=True)
    for axes, (title, names, logarithmic) in zip(grid.flat, TRAINING_PANELS, strict=True):
        axes.set_title(title)
        for name, colour in zip(names, (BLUE, ORANGE), strict=False):
            absent = " (not in this log)" if all(map(math.isnan, metrics[name])) else ""
            axes.plot(updates, metrics[name], color=colour, alpha=0.35, linewidth=1, marker=".", markersize=5)
            axes.plot(updates, trailing_mean(metrics[name], TRAILING_UPDATES), color=colour, label=name + absent)
        if logarithmic and any(value > 0 for value in metrics[names[0]]):
            axes.set_yscale("log")
        if axes is grid[0, 0]:
            draw_meter(axes, updates, metrics)
        axes.legend(loc="best")
    grid[0, 0].xaxis.get_major_locator().set_params(integer=True)  # shared by all panels
    for axes in grid[1]:
        axes.set_xlabel("update")
    caption(figure, f"Pale: every update (n = {len(updates)}). Bold: mean of the last {TRAILING_UPDATES}.")
    return figure


def draw_meter(axes: Axes, updates: Sequence[int], metrics: dict[str, list[float]]) -> None:
    """Success on the games that --eval-every plays, with its interval, at the updates that have it."""
    points = np.array([updates, *(metrics[name] for name in METER)], dtype=float)
    update, share, low, high = points[:, ~np.isnan(points).any(axis=0)]
    if update.size:
        axes.errorbar(update, share, [share - low, high - share], color=GREEN, marker="D", label="eval/success, 95 % interval")


def caption(figure: Figure, text: str) -> None:
    figure.supxlabel(text, fontsize=9.5, color=GREY, parse_math=False)  # a model's name may hold a dollar sign


# --- why a game was lost ------------------------------------------------------------------------------------

LOSS_REASONS = {  # in the order in which they are tried
    "malformed calls": "a third of the turns or more held no readable tool call",
    "repeats what does nothing": "a third of the turns or more gave an action again that had done nothing before",
    "never finds the object": "no object of the kind asked for came into view",
    "wrong object": "took something else, and never an object of the kind asked for",
    "not yet cleaned, heated or cooled": "took the right object, but never did to it what the task asks for first",
    "out of steps on the way": "none of these: the steps or tokens ran out on the way",
}
TREATMENTS = {"pick_clean_then_place_in_recep": "clean", "pick_heat_then_place_in_recep": "heat",
              "pick_cool_then_place_in_recep": "cool"}
# The benchmark's 12 kinds of sentences, such as "put some mug on desk." and "heat some egg and put it in fridge."
TASK_SENTENCE = re.compile(
    r"(?:put|find|clean|heat|cool|look at|examine) (?:(?:an?|some|two|the) )?(?:(?:clean|hot|cool) )?"
    r"(\w+) (?:in|on|under the|with the|and put (?:it|them) in) \w+\.?"
)


def did_nothing(turn: dict) -> bool:
    """Whether a turn changed and told nothing: malformed, or not understood by the world."""
    return turn["status"] == "malformed" or turn["observation"].strip() == "Nothing happens."


def why_lost(record: dict) -> str | None:
    """The first reason of LOSS_REASONS whose rule holds for a trajectory; None if it was won.

    Of the record it takes task, task_type, won and of each turn action, status, observation. If the task is not one of
    the benchmark's sentences, the rules about its object cannot hold.
    """
    if record["won"]:
        return None
    turns, third = record["turns"], max(1, len(record["turns"]) / 3)
    fruitless = [turn["action"] for turn in turns if did_nothing(turn) and turn["action"] is not None]
    actions = [turn["action"] or "" for turn in turns if not did_nothing(turn)]
    sentence = TASK_SENTENCE.fullmatch(record["task"].strip().lower())
    kind = re.escape(sentence[1]) if sentence else r"\w+"
    taken = [action for action in actions if action.startswith("take ")]
    right = [action for action in taken if re.match(rf"take {kind} \d", action)]
    treatment = TREATMENTS.get(record["task_type"])
    rules = (
        sum(turn["status"] == "malformed" for turn in turns) >= third,
        len(fruitless) - len(set(fruitless)) >= third,
        sentence and not any(re.search(rf"\b{kind} \d", turn["observation"].lower()) for turn in turns),
        taken and not right,
        right and treatment and not any(re.match(rf"{treatment} {kind} \d", action) for action in actions),
        True,
    )
    return next(reason for reason, holds in zip(LOSS_REASONS, rules, strict=True) if holds)


def loss_table(name: str, records: Sequence[dict]) -> str:
    """How many trajectories were lost for which reason, overall and by task type."""
    kinds = [kind for kind in TASK_TYPES if any(record["task_type"] == kind for record in records)]
    lost = [record for record in records if not record["won"]]
    row = ("{:<34}" + "{:>10}" * (1 + len(kinds))).format
    short = [re.split(" &| in", TASK_LABELS[kind])[0] for kind in kinds]
    lines = [shown(name), row(f"why lost ({len(lost)} of {len(records)})", "all", *short)]
    for reason in LOSS_REASONS:
        found = Counter(record["task_type"] for record in lost if record["why"] == reason)
        lines.append(row(reason, found.total(), *(found[kind] for kind in kinds)))
    return "\n".join(lines)


# --- the replay page ----------------------------------------------------------------------------------------

REPLAY_TEMPLATE = Path(__file__).with_name("images") / "replay_template.html"
FAULTS_NAMED = 5  # bad lines that are named, of each file
TABLES_PRINTED = 4  # the losses in more files than that are counted together


Check = tuple[Callable[[object], bool], str]  # whether a value is as expected, and what is expected


def list_of(kind: type, expected: str) -> Check:
    return lambda value: isinstance(value, list) and all(isinstance(one, kind) for one in value), expected


def or_none(check: Check) -> Check:
    return lambda value: value is None or check[0](value), check[1]


TEXT, NUMBER, COUNT = (lambda value: isinstance(value, str), "a text"), (is_number, "a number"), (is_count, "a count")
REPLAY_CHECKS = OUTCOME_CHECKS | {
    "split": TEXT, "task_type": TEXT, "task": TEXT, "messages": list_of(dict, "a list of objects"),
    "turns": list_of(dict, "a list of objects"),
    "stop_reason": TEXT, "branch": COUNT, "update": or_none(COUNT), "advantage": or_none(NUMBER),
}
MESSAGE_CHECKS = {"role": TEXT, "content": TEXT}
TURN_CHECKS = {
    "action": or_none(TEXT), "error": or_none(TEXT), "status": TEXT, "observation": TEXT,
    "admissible": list_of(str, "a list of texts"), "tokens": or_none(list_of(str, "a list of texts")),
    "logprobs": or_none(list_of(int | float, "a list of numbers")), "advantage": or_none(NUMBER),
}
OPTIONAL = {"stop_reason": "", "branch": 0, "update": None, "advantage": None, "group": None}
OPTIONAL_OF_A_TURN = {"error": None, "tokens": None, "logprobs": None, "advantage": None}


def replay_record(where: str, record: dict) -> dict:
    """A trajectory's record, optional fields filled in, with `why` it was lost; AnalysisError if it is damaged."""
    if "turns" not in record:
        raise AnalysisError(f"{where}: has no texts to show (written by eval.py --no-texts?)")
    record = OPTIONAL | record
    check_fields(where, record, REPLAY_CHECKS)
    record["turns"] = [OPTIONAL_OF_A_TURN | turn for turn in record["turns"]]
    for message in record["messages"]:
        check_fields(where, message, MESSAGE_CHECKS)
    for turn in record["turns"]:
        check_fields(where, turn, TURN_CHECKS)
        values = turn["logprobs"] or []
        if len(turn["tokens"] or []) != len(values) or not all(map(is_number, values)):
            raise AnalysisError(f"{where}: a turn's logprobs are not one number for each of its tokens")
    return record | {"why": why_lost(record)}


def read_replay(path: Path) -> tuple[list[dict], list[str]]:
    """The trajectories of an evaluation or of an update's rollouts, and a line for all that was left out.

    Rollouts come in groups (the branches of a game, in order): such a record gets the number of its `group` in the
    file and, unless it has one, its `advantage`. AnalysisError if the file holds no trajectory that can be shown.
    """
    records, faults, is_evaluation = [], [], False
    for number, record in read_lines(path):
        try:
            if isinstance(record, AnalysisError):
                raise record
            if record.get("type") in ("summary", "header"):
                is_evaluation = True
            else:
                records.append(replay_record(f"{path}:{number}", record))
        except AnalysisError as error:
            faults.append(str(error))
    if not records:
        raise AnalysisError(faults[0] if faults else f"{path}:1: no trajectory in the file")
    groups: list[list[dict]] = []
    for record in [] if is_evaluation else records:
        last = groups[-1][-1] if groups else {}
        other = any(record[name] != last[name] for name in ("update", "split", "game_id")) if groups else True
        if other or record["branch"] <= last["branch"]:
            groups.append([])
        groups[-1].append(record)
    for number, group in enumerate(groups):
        for record, advantage in zip(group, group_advantages([one["reward"] for one in group]), strict=True):
            if len(group) > 1:
                record["group"] = number
                record["advantage"] = advantage if record["advantage"] is None else record["advantage"]
    more = len(faults) - FAULTS_NAMED
    return records, faults[:FAULTS_NAMED] + [f"{path}: {more} more lines"] * (more > 0)


def packed(record: dict, file: int, texts: dict[str, int], lists: dict[tuple[int, ...], int]) -> dict:
    """What the page needs of a record; each text and each list of actions is known by its number in these two."""

    def text(value: str | None) -> int | None:
        return None if value is None else texts.setdefault(value, len(texts))

    def rare(turn: dict) -> dict:
        found = {} if turn["advantage"] is None else {"advantage": turn["advantage"]}
        if turn["tokens"]:
            found["tokens"] = [text(token) for token in turn["tokens"]]
            found["logprobs"] = [round(value, 3) for value in turn["logprobs"]]
        return found

    turns, messages = record["turns"], record["messages"]
    written = [message["content"] for message in messages if message["role"] == "assistant"]
    before = [*(message["role"] for message in messages), "assistant"].index("assistant")  # the first turn's message
    names = ("split", "task_type", "game_id", "task", "won", "reward", "steps", "invalid_actions", "stop_reason",
             "update", "branch", "group", "advantage", "why")  # fmt: skip
    columns = {name: [text(turn[name]) for turn in turns] for name in ("action", "error", "status", "observation")}
    columns |= {
        "text": [text(words) for words in (written + [""] * len(turns))[: len(turns)]],
        "list": [lists.setdefault(tuple(map(text, turn["admissible"])), len(lists)) for turn in turns],
        "nothing": [did_nothing(turn) for turn in turns],
        "rare": [rare(turn) for turn in turns],
    }
    opening = [(text(message["role"]), text(message["content"])) for message in messages[:before]]
    return {name: record[name] for name in names} | {"file": file, "opening": opening, "turns": columns}


def replay_page(files: Mapping[str, Sequence[dict]], left_out: Sequence[str]) -> str:
    """The template with the trajectories of each file (by name), compressed, and the hashes that its policy allows."""
    texts, lists, trajectories = {}, {}, []
    for file, records in enumerate(files.values()):
        trajectories += [packed(record, file, texts, lists) for record in records]
    content = {
        "files": list(files), "left_out": list(left_out), "labels": TASK_LABELS, "reasons": list(LOSS_REASONS.items()),
        "trajectories": trajectories, "texts": list(texts),
        "lists": [[number - before for before, number in zip((0, *numbers), numbers)] for numbers in lists],
    }  # fmt: skip
    page = REPLAY_TEMPLATE.read_text(encoding="utf-8")
    for name in ("script", "style"):
        digest = hashlib.sha256(re.search(f"<{name}>(.*?)</{name}>", page, re.DOTALL)[1].encode()).digest()
        page = page.replace("{{%s}}" % name.upper(), f"sha256-{base64.b64encode(digest).decode()}")
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    return page.replace("{{DATA}}", base64.b64encode(zlib.compress(data, 9)).decode())


def write_replay(settings: AnalysisSettings) -> None:
    """Read what is to be shown, print why games were lost, write the page. AnalysisError where nothing can be shown."""
    paths = list({path.resolve(): path for path in settings.replay}.values())
    names = Counter(path.name for path in paths)
    files: dict[str, list[dict]] = {}
    left_out = []
    for path in paths:
        try:
            files[path.name if names[path.name] == 1 else str(path)], faults = read_replay(path)
            left_out += faults
        except AnalysisError as error:
            left_out.append(str(error))
    for reason in left_out:
        print(f"left out: {shown(reason)}", file=sys.stderr)
    if not files:
        raise AnalysisError(f"none of {len(paths)} files can be shown: give evaluations with texts, or rollouts")
    every = [record for records in files.values() for record in records]
    for name, records in (files if len(files) <= TABLES_PRINTED else {f"{len(files)} files": every}).items():
        print(loss_table(name, records) + "\n")
    page = replay_page(files, left_out)
    output = settings.output if settings.output.suffix == ".html" else settings.output / "replay.html"
    save(output, lambda path: path.write_text(page, encoding="utf-8"))
    print(f"Saved page: {shown(output)} ({len(every)} trajectories, {len(page) / 1e6:.1f} MB)")


# --- a run that goes on -------------------------------------------------------------------------------------

WATCH_SECONDS = 2.0  # between two looks at a run
LINES_AT_ONCE = 5  # of the updates that came since the last look
SHORTEST_SILENCE_SECONDS, SILENCE_UPDATES = 60.0, 5  # a run that is quiet for longer than either has stopped
UPDATE_LINE = (
    ("success", "reward/success", ".3f"), ("eval", "eval/success", ".3f"), ("reward", "reward/mean", "+.3f"),
    ("invalid", "rollout/invalid_actions", ".2f"), ("entropy", "train/entropy", ".2f"),
    ("mismatch", "mismatch/k3", ".1e"), ("seconds", "time/update", ".1f"),
)  # fmt: skip


def state_of_run(done: int, planned: int, silent_seconds: float, update_seconds: Sequence[float]) -> str:
    """"ended", "silent" or "running", from updates done and planned, the age of the log, and what updates took.

    A run that was resumed for more updates than it began with has done more than is planned; it ends by going silent.
    """
    known = [seconds for seconds in update_seconds if not math.isnan(seconds)]
    patience = max(SHORTEST_SILENCE_SECONDS, SILENCE_UPDATES * statistics.median(known or [0.0]))
    return "ended" if done == planned else "silent" if silent_seconds > patience else "running"


def planned_updates(run: Path) -> int:
    """`max_steps` of the settings that a run began with."""
    try:
        planned = json_object(read_file(run / "settings.json")).get("max_steps")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise AnalysisError(f"--watch {run}: no settings.json to read ({reason}); give the folder of a run") from None
    if not is_count(planned):
        raise AnalysisError(f"{run / 'settings.json'}: max_steps is {brief(planned)}, not a count")
    return planned


def stamp_of_log(path: Path) -> tuple[int, float] | None:
    """Size and time of a log; None as long as it is not there, is empty or ends in the middle of a line."""
    with contextlib.suppress(FileNotFoundError), open_file(path) as file:
        status = os.fstat(file.fileno())
        if status.st_size:
            file.seek(-1, os.SEEK_END)
            return (status.st_size, status.st_mtime) if file.read() == b"\n" else None
    return None


def watch(settings: AnalysisSettings) -> None:
    """Print the updates of a run as they come and draw training.png anew, until all that were planned are done."""
    run, log, planned = settings.watch, settings.watch / "metrics.jsonl", planned_updates(settings.watch)
    seen, printed, state = None, 0, ""
    while True:
        stamp, before = stamp_of_log(log), state
        if stamp not in (None, seen):
            seen = stamp
            updates, metrics = read_metrics(log, [name for _, name, _ in UPDATE_LINE])
            fresh = [place for place, update in enumerate(updates) if update > printed]
            printed = updates[-1]  # lower than before in a run that was set back
            for place in fresh[-LINES_AT_ONCE:]:
                values = [(label, metrics[name][place], how) for label, name, how in UPDATE_LINE]
                parts = [f"{label} {value:{how}}" for label, value, how in values if not math.isnan(value)]
                print("  ".join([f"update {updates[place]}/{max(planned, updates[place])}", *parts]), flush=True)
            with plt.rc_context(STYLE):
                save_figure(draw_training(updates, metrics), settings.output / "training.png", settings.dpi)
            plt.close("all")
        silent = time.time() - seen[1] if seen else 0.0
        took = metrics["time/update"][-TRAILING_UPDATES:] if seen else []
        state = state_of_run(printed, planned, silent, took) if seen else "waiting"
        if state != before and state != "running":
            print(shown({
                "waiting": f"{run}: no update yet",
                "silent": f"{run}: nothing was written for {silent / 60:.0f} minutes, it may have stopped; "
                          f"to go on: uv run python train.py --resume {run}",
                "ended": f"{run}: ended, all {planned} updates are done",
            }[state]), flush=True)  # fmt: skip
        if state == "ended":
            return
        time.sleep(WATCH_SECONDS)


# --- command line -------------------------------------------------------------------------------------------


def parse_settings(arguments: Sequence[str] | None) -> AnalysisSettings:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for one in fields(AnalysisSettings):
        name = one.name if one.name == "files" else "--" + one.name.replace("_", "-")
        parser.add_argument(name, default=one.default, **one.metadata)
    values = vars(parser.parse_args(arguments))
    return AnalysisSettings(**values | {name: tuple(values[name]) for name in ("files", "replay")})


def save(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the file, whole or not at all. AnalysisError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        write(partial)
        partial.replace(path)
    except OSError as error:
        raise AnalysisError(f"--output {path.parent}: cannot write: {error.strerror}") from None


def save_figure(figure: Figure, path: Path, dpi: int) -> None:
    save(path, lambda partial: figure.savefig(partial, dpi=dpi, format="png"))


def analyse(settings: AnalysisSettings) -> None:
    """Print the tables, name the files left out, write the figures. AnalysisError where nothing can be drawn."""
    named = {path.resolve(): path for path in settings.files}  # one file under two spellings is one file
    paths = list(named.values()) or sorted(settings.result_dir.glob("*.jsonl"))
    if not paths:
        missing = f"no *.jsonl in {settings.result_dir}; evaluate first: {EVAL_COMMAND}"
        if settings.metrics is None:
            raise AnalysisError(missing)
        print(f"training curves only: {missing}", file=sys.stderr)
    evaluations, left_out = [], []
    for path in paths:
        try:
            evaluations.append(read_evaluation(path))
        except AnalysisError as error:
            left_out.append(str(error))
    kept, not_comparable = comparable(evaluations)
    for reason in left_out + not_comparable:
        print(f"left out: {shown(reason)}", file=sys.stderr)
    if paths and not kept:
        raise AnalysisError(f"none of {len(paths)} evaluation files can be used; evaluate again: {EVAL_COMMAND}")
    figures: dict[str, Figure] = {}
    with plt.rc_context(STYLE):
        if settings.metrics is not None:
            figures["training.png"] = draw_training(*read_metrics(settings.metrics))
        if kept:
            print(table(kept))
            figures |= {"checkpoints.png": draw_checkpoints(kept), "task_types.png": draw_task_types(kept)}
        for name, figure in figures.items():
            save_figure(figure, settings.output / name, settings.dpi)
            print(f"Saved figure: {shown(settings.output / name)}")
        if settings.show:
            plt.show()


def main(arguments: Sequence[str] | None = None) -> None:
    write_any_text()
    try:
        settings = parse_settings(arguments)
        if not settings.show:
            matplotlib.use("Agg")
        elif BACKEND_FOR_WINDOWS:
            with contextlib.suppress(ValueError):  # else matplotlib takes the first that works here
                matplotlib.use(BACKEND_FOR_WINDOWS, force=False)
        if settings.replay:
            write_replay(settings)
        elif settings.watch:
            watch(settings)
        else:
            analyse(settings)
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except AnalysisError as error:
        raise SystemExit(f"analysis.py: {error}") from None
    finally:
        plt.close("all")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it as it ends other commands
    main()
