"""The check that people with a GPU run, here at toy size on the CPU."""

import json
import sys

import gpu_check
import pytest
import torch
from gpu_check import LiveBytes, measure, render, verdicts

from protocol import load_base
from train import Policy, cache_of_trajectory, cache_shape

PLAIN = "transformers + peft, full logits"


def run_check(monkeypatch, output, *flags):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--size", "toy", "--output", str(output), *flags])
    code = gpu_check.main()
    return code, json.loads(output.read_text())


def test_every_bound_holds_at_toy_size(monkeypatch, tmp_path, capsys):
    code, report = run_check(monkeypatch, tmp_path / "check.json", "--no-engine")
    table = capsys.readouterr().out
    assert code == 0, table
    rows = {row["variant"]: row for row in report["update"]}
    assert set(rows) == {"as trained", "head on all sampled tokens at once", "without gradient checkpointing", PLAIN}
    for row in rows.values():
        assert row["peak_bytes"] > 0 and row["tokens_per_second"] > 0
        assert row["variant"] in table
    assert all(verdict["held"] for verdict in report["verdicts"]) and len(report["verdicts"]) == 4
    # each optimisation does what it is there for
    assert rows["as trained"]["peak_bytes"] < 0.7 * rows["head on all sampled tokens at once"]["peak_bytes"]
    assert rows["as trained"]["peak_bytes"] < 0.7 * rows["without gradient checkpointing"]["peak_bytes"]
    assert rows["as trained"]["peak_bytes"] < 0.5 * rows[PLAIN]["peak_bytes"]


@pytest.mark.slow
def test_adapter_reaches_the_engine(monkeypatch, tmp_path, capsys):
    code, report = run_check(monkeypatch, tmp_path / "check.json", "--engine", "--seconds", "0")
    assert code == 0, capsys.readouterr().out
    assert {row.get("error") for row in report["update"]} == {"no time left"}
    engine = report["engine"]
    assert engine["adapters_listed"] == [gpu_check.VERSION + 1]
    assert engine["change_by_adapter"] > 10 * engine["mismatch_adapter"]
    # vLLM has cut its cache as the plan says
    size = gpu_check.SIZES["toy"]
    base = gpu_check.save_random_model(tmp_path / "model", size, torch.bfloat16, "cpu")
    config = load_base(base, torch.bfloat16)[0].config
    block, block_bytes, _, _ = cache_shape(config, 2, kernel_block=128)
    assert engine["tokens_a_block"] == block
    blocks = int(0.5 * 2**30) // block_bytes
    one = cache_of_trajectory(config, 2, size.tokens, kernel_block=128)
    assert engine["trajectories"] == pytest.approx(blocks * block_bytes / one, rel=0.01)


def test_live_bytes_are_counted_to_the_byte():
    standing = torch.zeros(10)
    with LiveBytes(standing) as live:
        assert live.now == live.peak == 40
        first = torch.ones(100)
        second = first + 1
        view = second[:10]
        del first
        assert (live.now, live.peak) == (40 + 400, 40 + 800)
        del second
        assert live.now == 440  # the view keeps all of it
        del view
        third = torch.ones(50, requires_grad=True)
        (third * third).sum().backward()
    assert live.now == 40 + 200 + 200  # third and its gradient


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    size = gpu_check.SIZES["toy"]
    base = gpu_check.save_random_model(tmp_path_factory.mktemp("model"), size, torch.float32, "cpu")
    return Policy(base, lora_rank=4, device="cpu")


def test_out_of_memory_is_a_result_and_any_other_error_is_not(policy):
    def fail(error):
        raise error

    assert measure(policy, lambda: fail(torch.OutOfMemoryError("CUDA out of memory")), 1) == {"error": "out of memory"}
    assert measure(policy, lambda: fail(RuntimeError("DefaultCPUAllocator: can't allocate memory")), 1) == {
        "error": "out of memory"
    }
    with pytest.raises(RuntimeError, match="shapes"):
        measure(policy, lambda: fail(RuntimeError("shapes do not match")), 1)


def report_with(**changed):
    rows = [{"variant": name, "peak_bytes": peak, "seconds": 1.0, "tokens_per_second": 10.0, "reserved_bytes": None}
            for name, peak in (("as trained", 40), (PLAIN, 100))]
    return {
        "machine": {"device": "CPU", "packages": {"torch": "2"}}, "size": "toy", "tokens": 10, "dtype": "float32",
        "update": rows, "planned_peak_bytes": 41, "context_bytes": None, "engine": {"skipped": "not asked for"},
        "gradient": {"relative_difference": 1e-6, "norm": 1.0, "fused": False},
    } | changed  # fmt: skip


def test_verdicts_say_what_was_missed_and_what_was_not_measured():
    assert [row["held"] for row in verdicts(report_with())] == [True] * 4
    assert [row["held"] for row in verdicts(report_with(planned_peak_bytes=60))] == [False, True, True, True]

    report = report_with()
    report["update"][1] = {"variant": PLAIN, "error": "out of memory"}
    report["verdicts"] = verdicts(report)
    assert [row["held"] for row in report["verdicts"]] == [True, None, None, True]
    assert "out of memory" in render(report) and render(report).count("not measured") == 2

    engine = {"mismatch_base": 0.02, "mismatch_adapter": 0.5, "change_by_adapter": 0.6, "rounding_of_trainer": 0.02,
              "adapters_listed": [1, 2], "seconds_to_start": 1.0, "tokens_a_block": 528, "trajectories": 3.0}  # fmt: skip
    report = report_with(engine=engine)
    report["verdicts"] = verdicts(report)
    assert [row["held"] for row in report["verdicts"]][4:] == [True, False, False, None, False]
    assert render(report).count("MISSED") == 3

    report = report_with(context_bytes=2**29)
    report["update"][0]["reserved_bytes"] = 44
    report["verdicts"] = verdicts(report)
    assert "0.50 GiB; reserved beyond the peak 10.0%" in render(report)

    report = report_with(engine={"error": "RolloutError: the engine did not start"})
    report["verdicts"] = verdicts(report)
    assert report["verdicts"][-1]["held"] is False and "the engine did not start" in render(report)
