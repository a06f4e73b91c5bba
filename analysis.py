"""Figures and tests from evaluation files: what did training change, and by more than chance?

Owns the reading and checking of evaluation JSONL (one trajectory a line, a summary last, as eval.py writes it),
the statistics (Wilson intervals, exact McNemar tests) and the figures. Of a trajectory line it needs split,
game_id, task_type, won, reward, steps, invalid_actions alone: slim files of per-game outcomes serve as well.

Invariant: everything printed or drawn comes from files proven comparable: complete, of one base model, with equal
evaluation settings and the same games. A file that is not is named, with the reason, and left out.

    python analysis.py                                            # every *.jsonl of eval_results/ -> images/
    python analysis.py base.jsonl update-80.jsonl --metrics runs/NAME/metrics.jsonl
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data import LARGEST_FILE, SPLITS, TASK_TYPES, json_object, open_file, write_any_text
from rollout import wilson_interval

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


def flag(default, **argument):
    """A field of the settings and the arguments of its `add_argument`."""
    return field(default=default, metadata=argument)


@dataclass(frozen=True)
class AnalysisSettings:
    files: tuple[Path, ...] = flag((), type=Path, nargs="*", help="evaluation files; default: those of --result-dir")
    result_dir: Path = flag(Path("eval_results"), type=Path, help="folder whose *.jsonl are read (%(default)s)")
    output: Path = flag(Path("images"), type=Path,
                        help="folder for checkpoints.png, task_types.png, training.png (%(default)s)")
    metrics: Path | None = flag(None, type=Path, help="metrics.jsonl of a run: draw its training curves too")
    dpi: int = flag(200, type=int, help="pixels an inch, figures are 10 inches wide (%(default)s)")
    show: bool = flag(False, action="store_true", help="open the figures in windows as well")

    def __post_init__(self):
        if not 20 <= self.dpi <= 1200:
            raise AnalysisError(f"--dpi {self.dpi}: give 20 to 1200")
        if self.output.exists() and not self.output.is_dir():
            raise AnalysisError(f"--output {self.output}: is a file; name a folder")


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


def paired(first: Sequence[Outcome], second: Sequence[Outcome]) -> tuple[int, int, float]:
    """b, c and p of `mcnemar_exact` for two evaluations of the same games."""
    won_first = {outcome.game: outcome.won for outcome in first}
    b = sum(won_first[outcome.game] and not outcome.won for outcome in second)
    c = sum(outcome.won and not won_first[outcome.game] for outcome in second)
    return b, c, mcnemar_exact(b, c)


def select(evaluation: Evaluation, split: str = "all", task_type: str | None = None) -> list[Outcome]:
    return [outcome for outcome in evaluation.outcomes
            if split in ("all", outcome.split) and task_type in (None, outcome.task_type)]


def success(outcomes: Sequence[Outcome]) -> tuple[float, float, float]:
    """Share of games won in [0, 1], low and high end of its interval."""
    wins = sum(outcome.won for outcome in outcomes)
    return wins / len(outcomes), *wilson_interval(wins, len(outcomes))


def mean(outcomes: Sequence[Outcome], name: str) -> float:
    return math.fsum(getattr(outcome, name) for outcome in outcomes) / len(outcomes)


def trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """For each value the mean of the last `window`, NaN (an update without this metric) not counted."""
    recent = [[value for value in values[max(0, end - window):end] if not math.isnan(value)]
              for end in range(1, len(values) + 1)]
    return [math.fsum(known) / len(known) if known else math.nan for known in recent]


# --- reading and checking -----------------------------------------------------------------------------------


def read_records(path: Path) -> Iterator[tuple[int, dict]]:
    """Line number and object of each line of a JSONL file; AnalysisError at the first that is not an object."""
    try:
        with open_file(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LARGEST_FILE), b""), 1):
                if not line.strip():
                    continue
                try:
                    record = json_object(line)
                except ValueError as error:
                    fault = str(error) if line.endswith(b"\n") else "cut off mid-line; evaluate again"
                    raise AnalysisError(f"{path}:{number}: {fault}") from None
                yield number, record
    except OSError as error:
        raise AnalysisError(f"{path}: cannot be read: {error.strerror}") from None


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12  # not NaN either


def shown(value: object) -> str:
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


def read_evaluation(path: Path) -> Evaluation:
    """One evaluation file, every line checked, its summary recomputed; AnalysisError says what is wrong where."""
    outcomes: list[Outcome] = []
    first_line: dict[tuple[str, str], int] = {}
    summary, where = None, f"{path}:1"
    for number, record in read_records(path):
        where = f"{path}:{number}"
        if summary is not None:
            raise AnalysisError(f"{where}: a line after the summary; a file holds one evaluation")
        if record.get("type") == "summary":
            summary = record
            continue
        for name, (is_valid, expected) in OUTCOME_CHECKS.items():
            if name not in record:
                raise AnalysisError(f"{where}: no {name}: not a trajectory as eval.py writes it")
            if not is_valid(record[name]):
                raise AnalysisError(f"{where}: {name} is {shown(record[name])}, not {expected}")
        outcome = Outcome(**{name: record[name] for name in OUTCOME_CHECKS})
        earlier = first_line.setdefault((outcome.split, outcome.game_id), number)
        if earlier != number:
            raise AnalysisError(f"{where}: {outcome.split} game {outcome.game_id} again (first on line {earlier})")
        outcomes.append(outcome)
    if not outcomes:
        raise AnalysisError(f"{where}: no trajectory in the file")
    if summary is None:
        raise AnalysisError(f"{where}: ends without a summary after {len(outcomes)} trajectories: incomplete")
    update, base_model, settings = (summary.get(name) for name in ("update", "base_model", "settings"))
    if not is_count(update):
        raise AnalysisError(f"{where}: the summary's update is {shown(update)}, not a count")
    if not (isinstance(base_model, str) and base_model.isprintable()) or not isinstance(settings, dict):
        raise AnalysisError(f"{where}: the summary lacks base_model or settings: nothing to compare it by")
    for name, value in settings.items():
        if not name[:60].isprintable() or isinstance(value, list | dict):
            raise AnalysisError(f"{where}: the summary's setting {shown(name)} is {shown(value)}: not as eval.py writes it")
    evaluation = Evaluation(path, base_model, update, settings, tuple(outcomes))
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
        found[split] = {"games": len(outcomes), "success": success(outcomes)[0]}
        found[split] |= {name: mean(outcomes, name) for name in ("reward", "steps", "invalid_actions")}
        found[split]["success_by_task_type"] = {
            kind: {"games": len(some), "success": success(some)[0]} for kind, some in by_type.items() if some}
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
    return f"{name} is {shown(claimed)}, recomputed {found:.6g}"


def difference(reference: Evaluation, other: Evaluation) -> str | None:
    """Why `other` cannot be compared with `reference`; None if it can."""
    if other.base_model != reference.base_model:
        return f"base model {other.base_model[-80:]} (in {reference.path}: {reference.base_model[-80:]})"
    for name in sorted({*reference.settings, *other.settings} - SETTINGS_WITHOUT_EFFECT):
        expected, value = reference.settings.get(name), other.settings.get(name)
        if value != expected:
            return f"{name[:60]} {shown(value)} (in {reference.path}: {shown(expected)})"
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


def read_metrics(path: Path) -> tuple[list[int], dict[str, list[float]]]:
    """Updates in order and, for each metric of TRAINING_PANELS, its value at each (NaN where none was logged).

    Of an update that is logged twice (a run that was resumed from before it) the last line counts.
    """
    names = [name for _, metrics, _ in TRAINING_PANELS for name in metrics]
    rows: dict[int, dict[str, float]] = {}
    for number, record in read_records(path):
        if not is_count(record.get("update")):
            raise AnalysisError(f"{path}:{number}: no update: not a metrics.jsonl as train.py writes it")
        for name in names:
            value = record.get(name)
            if not (value is None or is_number(value) or isinstance(value, float) and math.isnan(value)):
                raise AnalysisError(f"{path}:{number}: {name} is {shown(record[name])}, not a number")
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
    lines = [row("checkpoint", "split", "n") + "   success [95 % interval]   reward  invalid  steps"]
    for evaluation, split in product(evaluations, splits):
        games = select(evaluation, split)
        share, low, high = success(games)
        reward, invalid, steps = (mean(games, name) for name in ("reward", "invalid_actions", "steps"))
        lines.append(row(evaluation.label, split, len(games)) + f" {share:>9.2%} [{low:6.1%}, {high:6.1%}] "
                     f"{reward:>8.4f} {invalid:>8.2f} {steps:>6.2f}")
    if later:
        lines += ["", f"Exact McNemar test: games won only by {base.label} (b), only by the checkpoint (c)",
                  row("checkpoint", "split", "n") + "    b    c        p"]
    for evaluation, split in product(later, splits):
        games = select(evaluation, split)
        b, c, p = paired(select(base, split), games)
        lines.append(row(evaluation.label, split, len(games)) + f" {b:>4} {c:>4} {p:>8.2g}")
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
                     label=f"{split} (n = {len(groups[0])})")
    by_split.set_title("Success by split")
    by_split.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=len(base.splits))
    zoom_percent(by_split, [select(evaluation, split) for evaluation in evaluations for split in base.splits])

    groups = [select(evaluation) for evaluation in evaluations]
    draw_success(overall, updates, groups, color=GREY, marker="o")
    overall.set_title(f"Success, all games (n = {len(base.outcomes)})")
    zoom_percent(overall, groups)
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
    test = f" p: exact McNemar test against {base.label}, same games." if len(updates) > 1 else ""
    caption(figure, f"{base.base_model[-80:]}. Bars: Wilson 95 % intervals.{test}")
    return figure


def draw_task_types(evaluations: Sequence[Evaluation]) -> Figure:
    """Success by task type, all splits together, one point a checkpoint."""
    base = evaluations[0]
    figure, axes = plt.subplots(figsize=(10, 4.4))
    games = {kind: len(select(base, task_type=kind)) for kind in TASK_TYPES}
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
    caption(figure, f"{base.base_model[-80:]}. Bars: Wilson 95 % intervals.")
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
        axes.legend(loc="best")
    grid[0, 0].xaxis.get_major_locator().set_params(integer=True)  # shared by all panels
    for axes in grid[1]:
        axes.set_xlabel("update")
    caption(figure, f"Pale: every update (n = {len(updates)}). Bold: mean of the last {TRAILING_UPDATES}.")
    return figure


def caption(figure: Figure, text: str) -> None:
    figure.supxlabel(text, fontsize=9.5, color=GREY, parse_math=False)  # a model's name may hold a dollar sign


# --- command line -------------------------------------------------------------------------------------------


def parse_settings(arguments: Sequence[str] | None) -> AnalysisSettings:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for one in fields(AnalysisSettings):
        name = one.name if one.name == "files" else "--" + one.name.replace("_", "-")
        parser.add_argument(name, default=one.default, **one.metadata)
    values = vars(parser.parse_args(arguments))
    return AnalysisSettings(**values | {"files": tuple(values["files"])})


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
        print(f"left out: {reason}", file=sys.stderr)
    if paths and not kept:
        raise AnalysisError(f"none of {len(paths)} evaluation files can be used; evaluate again: {EVAL_COMMAND}")
    figures: dict[str, Figure] = {}
    with plt.rc_context(STYLE):
        if settings.metrics is not None:
            figures["training.png"] = draw_training(*read_metrics(settings.metrics))
        if kept:
            print(table(kept))
            figures |= {"checkpoints.png": draw_checkpoints(kept), "task_types.png": draw_task_types(kept)}
        try:
            settings.output.mkdir(parents=True, exist_ok=True)
            for name, figure in figures.items():
                partial = settings.output / f".{name}.partial"
                figure.savefig(partial, dpi=settings.dpi, format="png")
                partial.replace(settings.output / name)
                print(f"Saved figure: {settings.output / name}")
        except OSError as error:
            raise AnalysisError(f"--output {settings.output}: cannot write: {error.strerror}") from None
        if settings.show:
            plt.show()


def main(arguments: Sequence[str] | None = None) -> None:
    write_any_text()
    try:
        settings = parse_settings(arguments)
        if not settings.show:
            matplotlib.use("Agg")
        analyse(settings)
    except AnalysisError as error:
        raise SystemExit(f"analysis.py: {error}") from None
    finally:
        plt.close("all")


if __name__ == "__main__":
    main()
