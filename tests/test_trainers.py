"""Several trainer processes against one: the same loss, gradient and weights within fp32 rounding, and the same errors."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, STARTER
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from advantages import deal, make_datum

SCRIPT = """
import json, sys, torch, train
from pathlib import Path
base, *cases = sys.argv[1:]

def play(rank, kind, out, spoilt, resume):
    # Only process 0 has the data: the others get them as the batches of a run.
    settings = train.TrainSettings(learning_rate=1e-2, max_mismatch_kl=1e9)
    checkpoint = train.share(resume and Path(resume))
    policy = {"sharded": train.ShardedPolicy}.get(kind, train.Policy)(
        base, learning_rate=1e-2, device="cpu", **{} if kind == "sharded" else {"lora_rank": 4 if kind == "adapter" else 0}
    )
    if rank and spoilt == "memory":
        policy._decoder.layers[1].register_forward_pre_hook(lambda *_: torch.empty(2**46))
    train.begin(policy, checkpoint)
    if spoilt == "gradient":
        step = policy.step
        def step_from_nowhere(norm):
            getattr(policy.parameters[0].grad, "_local_tensor", policy.parameters[0].grad).fill_(torch.nan)
            return step(norm)
        policy.step = step_from_nowhere
    data = torch.load(f"{out}/data.pt", weights_only=False) if rank == 0 else []
    metrics = []
    try:
        for number in (5, 5, 1):  # in the last update one process has nothing to do
            metrics.append(train.learn(policy, train.share(train.Batch(data[:number])), settings, train.SignalSettings()))
        metrics.append({"score": policy.score(train.share(data and data[0].tokens_T.tolist()))})
        result = json.dumps(metrics)
    except FloatingPointError as error:
        result = f"failed: {error}"
    train.learn(policy, train.share(train.Batch([], save=True)), settings, train.SignalSettings())
    if kind != "sharded":
        torch.save([p.detach() for p in policy.parameters], f"{out}/weights-{rank}.pt")
        torch.save([v for s in policy.optimizer.state.values() for v in s.values()], f"{out}/adam-{rank}.pt")
    if rank == 0:
        Path(out, "result.txt").write_text(result)
        if kind != "adapter":
            Path(out, "checkpoints").mkdir()
            train.save_checkpoint(Path(out), policy, train.Progress(3, 3, 0, "", {}, {}), keep=0)

with train.process_of_several(), train.joined_trainers() as rank:
    for case in cases:
        play(rank, *json.loads(case))
"""


def random_data(lengths, spoilt=""):
    data = []
    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 50, (length,), generator=generator).tolist()
        logprobs = [[-4.0] * (length - 10)]
        if spoilt == "loss" and number == 1:
            logprobs = [[-4000.0] * (length - 10)]
        data.append(make_datum(tokens, [(9, length - 1)], logprobs, [0.3 * (number - 1.5)], name=f"trajectory {number}"))
    return data


def start(tmp_path, processes, base, *cases):
    """Run the cases (kind, what is spoilt, checkpoint to go on from) one after the other in one group of processes."""
    outs = [tmp_path / f"{processes}-{kind}-{spoilt}-{bool(resume)}" for kind, spoilt, resume in cases]
    for out, (_, spoilt, _) in zip(outs, cases):
        out.mkdir()
        torch.save(random_data([40, 25, 70, 31, 55], spoilt), out / "data.pt")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    result = subprocess.run(
        [sys.executable, *launcher, script, base,
         *(json.dumps([kind, str(out), spoilt, str(resume)]) for out, (kind, spoilt, resume) in zip(outs, cases))],
        capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return outs, result


def run(*args):
    outs, result = start(*args)
    assert result.returncode == 0, result.stderr[-3000:]
    return outs


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = {str(number): number for number in range(64)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "0"))).save_pretrained(folder)
    return str(folder)


def test_data_are_dealt_evenly_and_each_once():
    data = random_data([40, 25, 70, 31, 55])
    hands = deal(data, 2)
    assert sorted(hands[0] + hands[1]) == [0, 1, 2, 3, 4]
    assert [sum(len(data[index].tokens_T) for index in hand) for hand in hands] == [68 + 29, 53 + 38 + 23]
    assert deal(data[:1], 3) == [[0], [], []]
    assert deal(data, 2, in_step=True) == [[2, 0, 1], [4, 3]]


@pytest.fixture(scope="module")
def outcomes(base, tmp_path_factory):
    """Folders of all cases, by number of processes and case: each number of processes starts as seldom as can be."""
    folder = tmp_path_factory.mktemp("trainers")
    adapter, whole = run(folder, 1, base, ("adapter", "", ""), ("whole", "", ""))
    [sharded] = run(folder, 3, base, ("sharded", "", ""))  # among three no weight is split evenly
    [whole_again] = run(folder, 1, base, ("whole", "", sharded / "checkpoints" / "latest"))
    cases = [("adapter", "", ""), ("adapter", "loss", ""), ("sharded", "loss", ""), ("sharded", "gradient", ""),
             ("sharded", "", whole / "checkpoints" / "latest")]  # fmt: skip
    two = run(folder, 2, base, *cases)
    names = [f"2 {kind} {spoilt}".rstrip() for kind, spoilt, _ in cases[:-1]] + ["2 sharded again"]
    one = {"1 adapter": adapter, "1 whole": whole, "3 sharded": sharded, "1 whole again": whole_again}
    return one | dict(zip(names, two, strict=True))


def check_metrics(alone, shared):
    results = [json.loads((out / "result.txt").read_text()) for out in (alone, shared)]
    for one, two in zip(*results, strict=True):
        assert one.get("tokens/trained") == two.get("tokens/trained")
        assert one.keys() == two.keys()
        for name in one:
            torch.testing.assert_close(torch.tensor(two[name]), torch.tensor(one[name]), rtol=1e-4, atol=1e-6)


def test_two_processes_are_one_within_rounding(outcomes):
    alone, shared = outcomes["1 adapter"], outcomes["2 adapter"]
    check_metrics(alone, shared)
    expected = torch.load(alone / "weights-0.pt")
    for rank in (0, 1):
        # Adam's quotient magnifies rounding where a gradient is about 0; the bound is a hundredth of one step.
        torch.testing.assert_close(torch.load(shared / f"weights-{rank}.pt"), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.load(shared / f"adam-{rank}.pt"), torch.load(alone / "adam-0.pt"), atol=1e-6, rtol=1e-3)
    for part in ("weights", "adam"):
        for ours, theirs in zip(*(torch.load(shared / f"{part}-{rank}.pt") for rank in (0, 1)), strict=True):
            assert torch.equal(ours, theirs)


def test_an_error_in_one_process_is_raised_in_all_and_nobody_hangs(outcomes):
    assert (outcomes["2 adapter loss"] / "result.txt").read_text().startswith("failed: trajectory 1: loss is ")
    assert torch.load(outcomes["2 adapter loss"] / "adam-1.pt") == []
    for spoilt, told in (("loss", "trajectory 1: loss is "), ("gradient", "gradient norm is nan")):
        out = outcomes[f"2 sharded {spoilt}"]
        assert (out / "result.txt").read_text().startswith(f"failed: {told}")
        weights, adam = saved(out)  # what was there before is saved with the others' help
        assert not adam and torch.equal(weights["model.norm.weight"], torch.ones(32))


@pytest.mark.slow
def test_memory_that_ends_in_one_sharded_process_ends_all(base, tmp_path):
    began = time.monotonic()
    _, result = start(tmp_path, 2, base, ("sharded", "memory", ""))
    assert result.returncode != 0 and time.monotonic() - began < 200
    assert "exitcode  : 1 " in result.stderr  # whoever failed said so, and did not abort
    assert "OthersWait: RuntimeError in what all trainers do together" in result.stderr
    assert "can't allocate memory" in result.stderr


def saved(out):
    """Weights and Adam's state of a checkpoint."""
    folder = out / "checkpoints" / "latest"
    return load_file(folder / "sampler" / "model.safetensors"), load_file(folder / "state" / "optimizer.safetensors")


def test_sharded_processes_are_one_and_either_goes_on_from_the_others_checkpoint(outcomes):
    for sharded, alone, bound in (("3 sharded", "1 whole", 1), ("2 sharded again", "1 whole again", 2)):
        sharded, alone = outcomes[sharded], outcomes[alone]
        check_metrics(alone, sharded)
        for ours, theirs, atol in zip(saved(sharded), saved(alone), (1e-4, 1e-6), strict=True):
            assert ours.keys() == theirs.keys() and ours
            for name in ours:
                torch.testing.assert_close(ours[name], theirs[name], atol=atol * bound, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_the_whole_command_under_torchrun_is_that_of_one_process(warm_model, tmp_path, sharded):
    lines = {}
    for processes in (1, 2):
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        result = subprocess.run(
            [sys.executable, *start, ROOT / "train.py", "--base-model", warm_model, "--data-root", STARTER, "--max-steps", "2",
             "--games-per-batch", "2", "--group-size", "4", "--max-episode-steps", "6", "--max-trajectory-tokens", "6000",
             "--max-assistant-tokens", "24", "--learning-rate", "1e-3", "--lora-rank", "0" if sharded else "8", "--run-name", f"n{processes}",
             "--swanlab-mode", "disabled", "--engine-cache-gb", "0.5", *["--shard-trainers"] * (sharded and processes > 1)],
            cwd=tmp_path, capture_output=True, text=True, timeout=1200,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr[-3000:]
        lines[processes] = [json.loads(line) for line in (tmp_path / f"runs/n{processes}/metrics.jsonl").read_text().splitlines()]
    for one, two in zip(lines[1], lines[2], strict=True):
        for name in one:
            if not name.startswith("time/"):
                assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_the_next_batch_is_sampled_while_the_trainer_works_with_the_weights_at_hand(warm_model, tmp_path):
    result = subprocess.run(
        [sys.executable, ROOT / "train.py", "--base-model", warm_model, "--data-root", STARTER, "--max-steps", "4",
         "--games-per-batch", "2", "--group-size", "4", "--max-episode-steps", "6", "--max-trajectory-tokens", "6000",
         "--max-assistant-tokens", "24", "--learning-rate", "1e-3", "--lora-rank", "8", "--run-name", "ahead",
         "--swanlab-mode", "disabled", "--engine-cache-gb", "0.5", "--max-staleness", "1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    versions = []
    for update in (1, 2, 3, 4):
        lines = (tmp_path / f"runs/ahead/rollouts/update-{update:04d}.jsonl").read_text().splitlines()
        [version] = {json.loads(line)["policy_version"] for line in lines}
        versions.append(version)
    assert versions == ["base", "base", "update-1", "update-2"]
    metrics = [json.loads(line) for line in (tmp_path / "runs/ahead/metrics.jsonl").read_text().splitlines()]
    # the first batch has the weights it is trained with; after that the ratio shows the one step between
    assert metrics[0]["mismatch/mean"] < 1e-4 < metrics[1]["mismatch/mean"] < 0.3
    assert metrics[2]["train/ratio_mean"] == pytest.approx(1, abs=0.05)
