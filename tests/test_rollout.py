"""Rollouts: seeds, reward, the agent's state machine, and real trajectories from the real engine and world."""

import json
import math
from dataclasses import replace

import pytest

import analysis
from stock_world import StockWorld

from data import SettingsError
from protocol import check_prefix_extension, tool_call_text
from rollout import (
    Completion, RolloutError, RolloutSettings, TokenCounts, check_first_prompts, play_group, request_seed,
    trajectory_reward, write_records,
)  # fmt: skip

# --- pure functions -------------------------------------------------------------------------------------------------


def test_no_seed_of_a_run_repeats_and_children_of_a_request_have_their_branches_seeds():
    games = [f"task-{n}/trial_{n}" for n in range(8)]
    seeds = {request_seed(42, u, g, t, b) for u in range(80) for g in games for t in range(20) for b in range(8)}
    assert len(seeds) == 80 * 8 * 20 * 8
    assert [request_seed(42, 3, "g", 0) + k for k in range(8)] == [request_seed(42, 3, "g", 0, k) for k in range(8)]
    assert request_seed(42, 3, "g", 5, 2) == request_seed(42, 3, "g", 5, 2) != request_seed(43, 3, "g", 5, 2)
    assert 0 <= min(seeds) and max(seeds) < 2**63


def test_reward_is_win_less_a_tenth_an_invalid_action():
    assert trajectory_reward(True, 0) == 1.0
    assert trajectory_reward(False, 0) == 0.0
    assert trajectory_reward(True, 3) == pytest.approx(0.7)
    assert trajectory_reward(False, 50) == pytest.approx(-5.0)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"max_episode_steps": 0}, "--max-episode-steps is 0"),
        ({"max_trajectory_tokens": -5}, "--max-trajectory-tokens is -5"),
        ({"max_assistant_tokens": 0}, "--max-assistant-tokens is 0"),
        ({"temperature": 0.0}, "--temperature is 0.0"),
        ({"temperature": math.nan}, "--temperature is nan"),
        ({"top_p": 0.0}, "--top-p is 0.0"),
        ({"top_p": 1.5}, "--top-p is 1.5"),
        ({"dtype": "int8"}, "--dtype is 'int8'"),
    ],
)
def test_impossible_settings_are_refused_by_flag_and_value(changed, named):
    with pytest.raises(SettingsError, match=named):
        RolloutSettings(**changed)


# --- the state machine, with completions written by hand ------------------------------------------------------------


class WrittenTurns:
    """Stands where the sampler does and answers with given texts, so that a test decides what the agent says."""

    policy_version = "written"

    def __init__(self, chat, texts, closed=True, logprob=-0.5):
        self.chat, self.texts, self.logprob = chat, list(texts), logprob
        self.closing = chat.stop_token_ids[:1] if closed else []
        self.prompts, self.room = [], []

    def next_rank(self):
        return 0

    async def sample(self, prompt, seed, max_tokens, n=1, rank=0, temperature=None):
        self.prompts.append(list(prompt))
        self.room.append(max_tokens)
        text = self.texts[min(len(self.prompts), len(self.texts)) - 1]
        tokens = self.chat.tokenizer.encode(text, add_special_tokens=False) + self.closing
        return [Completion(tokens, [self.logprob] * len(tokens), "stop" if self.closing else "length")] * n


def walkthrough(game):
    return json.loads(game.path.read_text())["walkthrough"]


def test_won_trajectory_has_reward_one_stops_there_and_matches_stock_textworld(run, pool, chat, play_settings, starter_games):
    game = starter_games[0]
    actions = walkthrough(game)
    turns = WrittenTurns(chat, map(tool_call_text, actions))
    [trajectory] = run(play_group(turns, chat, pool, game, 1, 0, play_settings))
    assert (trajectory.won, trajectory.stop_reason, trajectory.truncated) == (True, "won", False)
    assert trajectory.reward == 1.0 and len(trajectory.turns) == len(actions) == len(turns.prompts)
    assert [turn.status for turn in trajectory.turns] == ["executed"] * (len(actions) - 1) + ["won"]
    stock = StockWorld()
    stock.load(game.path)
    stock.reset()
    for turn, action in zip(trajectory.turns, actions, strict=True):
        assert (turn.observation, turn.admissible) == stock.step(action)[:2]


def test_every_prompt_strictly_extends_the_one_before_and_tokens_are_held_once(run, pool, chat, play_settings, starter_games):
    game = starter_games[1]
    turns = WrittenTurns(chat, ["I look.\n" + tool_call_text("look"), "hm", tool_call_text("open the sky"), tool_call_text("LOOK")])
    [trajectory] = run(play_group(turns, chat, pool, game, 1, 0, play_settings))
    assert len(turns.prompts) == play_settings.max_episode_steps
    for (start, end), prompt, following in zip(trajectory.spans, turns.prompts, turns.prompts[1:] + [trajectory.tokens + [0]]):
        assert trajectory.tokens[:start] == prompt
        assert following[:end] == trajectory.tokens[:end] and len(following) > end
    check_prefix_extension(len(trajectory.tokens), [len(p) for p in turns.prompts], trajectory.spans)


def test_malformed_and_inadmissible_turns_count_as_steps_and_as_invalid(run, pool, chat, play_settings, starter_games, tmp_path):
    texts = ["go to drawer 1", '<tool_call>{"name": "alfworld_step", "arguments": {"action": "fly \\ud800"}}</tool_call>', "",
             tool_call_text("look") * 2, tool_call_text("look")]  # fmt: skip
    [trajectory] = run(play_group(WrittenTurns(chat, texts), chat, pool, starter_games[0], 1, 0, play_settings))
    assert [turn.status for turn in trajectory.turns] == ["malformed", "not admissible", "malformed", "malformed"] + ["executed"] * 4
    assert trajectory.turns[1].observation == "Nothing happens."
    first = trajectory.turns[0]
    assert first.action is None and "no tool call" in first.observation and "look" in first.admissible
    assert (len(trajectory.turns), trajectory.invalid_actions, trajectory.malformed) == (8, 4, 3)
    assert trajectory.stop_reason == "max_steps" and trajectory.truncated and trajectory.reward == pytest.approx(-0.4)
    write_records(tmp_path / "r.jsonl", [trajectory.record()])  # whatever the model wrote can be written
    record = json.loads((tmp_path / "r.jsonl").read_text())
    assert (record["valid_tool_calls"], record["admissible_actions"]) == (5, 4)
    assert record["mean_logprob"] == pytest.approx(-0.5)
    assert [m["role"] for m in record["messages"]] == ["system", "user"] + ["assistant", "tool"] * 8


def test_length_stopped_turn_is_closed_before_its_tool_result(run, pool, chat, play_settings, starter_games):
    turns = WrittenTurns(chat, ["I was going to say"], closed=False)
    [trajectory] = run(play_group(turns, chat, pool, starter_games[0], 1, 0, replace(play_settings, max_episode_steps=2)))
    end = trajectory.turns[0].end
    assert trajectory.tokens[end] in chat.stop_token_ids and trajectory.tokens[end - 1] not in chat.stop_token_ids
    assert trajectory.turns[0].status == "malformed" and trajectory.turns[0].finish_reason == "length"


def test_trajectory_ends_when_the_next_prompt_would_pass_the_token_limit(run, pool, chat, play_settings, starter_games):
    turns = WrittenTurns(chat, [tool_call_text("look")])
    [free] = run(play_group(turns, chat, pool, starter_games[0], 1, 0, play_settings))
    third = free.turns[2].prompt_length
    for limit, steps in ((third, 2), (third + 1, 3)):
        turns = WrittenTurns(chat, [tool_call_text("look")])
        [cut] = run(play_group(turns, chat, pool, starter_games[0], 1, 0, replace(play_settings, max_trajectory_tokens=limit)))
        assert (len(cut.turns), cut.stop_reason, cut.truncated) == (steps, "max_tokens", True)
        assert turns.room[-1] == min(play_settings.max_assistant_tokens, limit - len(turns.prompts[-1])) >= 1


def test_first_prompt_over_the_limit_is_named_at_start_and_ends_a_trajectory_later(run, pool, chat, play_settings, starter_games):
    tight = replace(play_settings, max_trajectory_tokens=50)
    with pytest.raises(SettingsError, match=r"--max-trajectory-tokens is 50, but the first prompt of .*game.tw-pddl has \d+ tokens"):
        run(check_first_prompts(chat, pool, starter_games[:2], tight))
    run(check_first_prompts(chat, pool, starter_games[:2], play_settings))
    finished = []
    trajectories = run(play_group(WrittenTurns(chat, ["x"]), chat, pool, starter_games[0], 3, 0, tight, finished.append))
    assert finished == trajectories and [(t.stop_reason, len(t.turns), t.reward) for t in trajectories] == [("max_tokens", 0, 0.0)] * 3


@pytest.mark.parametrize("logprob", [math.nan])
def test_a_log_probability_that_is_no_number_stops_the_run_and_names_the_turn(run, pool, chat, play_settings, starter_games, logprob):
    turns = WrittenTurns(chat, [tool_call_text("look")], logprob=logprob)
    with pytest.raises(RolloutError, match=f"no number in turn 1 of branch 0 of {starter_games[0].game_id}"):
        run(play_group(turns, chat, pool, starter_games[0], 1, 0, play_settings))


def test_admissible_actions_can_be_left_out_of_every_message(run, pool, chat, play_settings, starter_games):
    turns = WrittenTurns(chat, [tool_call_text("look")])
    settings = replace(play_settings, include_admissible_actions=False, max_episode_steps=2)
    [trajectory] = run(play_group(turns, chat, pool, starter_games[0], 1, 0, settings))
    assert not any("Admissible" in message["content"] for message in trajectory.messages)


# --- the real engine ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def group(run, sampler, chat, pool, play_settings, starter_games):
    """Four real branches of one game, with the tokens that the engine counted for them."""
    before = sampler.counts
    settings = replace(play_settings, max_episode_steps=20)
    trajectories = run(play_group(sampler, chat, pool, starter_games[2], 4, 7, settings))
    return trajectories, sampler.counts.since(before)


def test_engine_plays_and_its_records_are_consistent(group, chat, tmp_path):
    trajectories, _ = group
    assert any(turn.status == "executed" for t in trajectories for turn in t.turns)
    assert len({tuple(t.tokens) for t in trajectories}) > 1  # branches differ
    for t in trajectories:
        check_prefix_extension(len(t.tokens), [turn.prompt_length for turn in t.turns], t.spans)
        for (start, end), turn in zip(t.spans, t.turns, strict=True):
            assert chat.completion_text(t.tokens[start:end]) == turn.text
            assert len(turn.logprobs) == end - start <= 24 and all(lp <= 1e-5 for lp in turn.logprobs)
    write_records(tmp_path / "r.jsonl", (t.record() for t in trajectories))
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [line["branch"] for line in lines] == [0, 1, 2, 3]
    assert all(line["steps"] == len(line["turns"]) and line["reward"] <= 1 for line in lines)


def test_records_hold_tokens_and_advantages_where_they_are_asked_for(group, chat, tmp_path):
    """The page reads them back: token texts join to what was written, and log-probabilities are the sampler's."""
    trajectories, _ = group
    advantages = [[step / 8 for step in range(len(t.turns))] for t in trajectories]
    records = [t.record(chat.token_texts, by_turn) for t, by_turn in zip(trajectories, advantages, strict=True)]
    write_records(tmp_path / "r.jsonl", records)
    [shown, left_out] = analysis.read_replay(tmp_path / "r.jsonl")
    assert not left_out
    for t, by_turn, record in zip(trajectories, advantages, shown, strict=True):
        assert [turn["advantage"] for turn in record["turns"]] == by_turn
        assert record["advantage"] == pytest.approx(sum(by_turn) / len(by_turn))
        for turn, of_page in zip(t.turns, record["turns"], strict=True):
            assert of_page["logprobs"] == pytest.approx(turn.logprobs, abs=1e-6)
            ended = turn.finish_reason == "stop"
            assert "".join(of_page["tokens"][:-1] if ended else of_page["tokens"]) == turn.text
    without = [t.record() for t in trajectories]
    for record in records:
        del record["advantage"]
        for turn in record["turns"]:
            del turn["advantage"], turn["tokens"], turn["logprobs"]
    assert json.dumps(records) == json.dumps(without)  # nothing else changes, not even the order


def test_engine_computes_hardly_more_prompt_tokens_than_there_are_distinct_ones(group):
    """Over trajectories of 20 turns: the floor is every distinct prompt token once."""
    trajectories, counts = group
    assert counts.prompt == sum(t.prompt_tokens for t in trajectories)
    assert counts.sampled == sum(t.sampled_tokens for t in trajectories)
    shared = trajectories[0].turns[0].prompt_length
    floor = shared + sum(t.turns[-1].prompt_length - shared for t in trajectories)
    assert min(len(t.turns) for t in trajectories) == 20 or all(t.won or len(t.turns) == 20 for t in trajectories)
    assert counts.computed <= 1.1 * floor
    assert counts.computed / counts.prompt < 0.25


def test_same_seeds_give_the_same_tokens_alone_and_among_others(run, group, sampler, chat, pool, play_settings, starter_games):
    trajectories, _ = group
    settings = replace(play_settings, max_episode_steps=20)
    again = run(play_group(sampler, chat, pool, starter_games[2], 4, 7, settings))
    assert [t.tokens for t in again] == [t.tokens for t in trajectories]
    [alone] = run(play_group(sampler, chat, pool, starter_games[2], 1, 7, settings))
    assert alone.tokens == trajectories[0].tokens
    other = run(play_group(sampler, chat, pool, starter_games[2], 4, 8, settings))
    assert [t.tokens for t in other] != [t.tokens for t in trajectories]


def test_counts_are_differences():
    assert TokenCounts(10, 5, 3, 2).since(TokenCounts(4, 2, 1, 1)) == TokenCounts(6, 3, 2, 1)
