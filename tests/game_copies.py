"""Copies of starter games for tests: as they are, or with some of their texts replaced."""

import json
import shutil
from pathlib import Path

import environment

ROOT = Path(environment.__file__).parent
STARTER = sorted((ROOT / "datasets" / "starter" / "json_2.1.1").glob("*/*/*/game.tw-pddl"))
TASK_TYPES = sorted({path.parts[-3].split("-")[0] for path in STARTER})


def compiled_games(folder: Path) -> list[Path]:
    """One starter game of each task type in `folder`, compiled there."""
    paths = []
    for task_type in TASK_TYPES:
        source = next(path for path in STARTER if path.parts[-3].startswith(task_type + "-"))
        target = folder / "train" / source.parts[-3] / source.parts[-2] / source.name
        target.parent.mkdir(parents=True)
        shutil.copyfile(source, target)
        environment.compile_game(target)
        paths.append(target)
    return paths


def walkthrough(game_file: Path) -> list[str]:
    return json.loads(Path(game_file).read_text())["walkthrough"]


def rewritten(game_file: Path, folder: Path, **texts: tuple[str, str]) -> Path:
    """A copy of a game with some of its texts replaced; a value is (old, new)."""
    game = json.loads(game_file.read_text())
    for key, (old, new) in texts.items():
        assert old in game[key]
        game[key] = game[key].replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / "game.tw-pddl"
    copy.write_text(json.dumps(game))
    return copy


def out_of_reach(game_file: Path, folder: Path) -> Path:
    """A copy of a game that only grounding refuses: nobody is anywhere, so the goal cannot be reached."""
    return rewritten(game_file, folder, pddl_problem=("(atLocation agent1", ";(atLocation agent1"))
