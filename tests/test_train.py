"""The program as a user starts it: short runs, resumed runs, and what bad input does."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.torchrun import Result, finish, start, torchrun

MODEL = "launch/quickstart_model"
TRAIN = ("--module", "rhymemeg.train", "--config", "launch/configs/quickstart.yaml", "--display", "lines")
SHORT = (
    "--train-iters", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--max-response-len", "96",
    "--num-prompts", "8", "--eval-interval", "2", "--eval-num-prompts", "4", "--eval-n-samples", "2",
)  # fmt: skip


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rows(folder: Path) -> list[dict]:
    """Those of training steps."""
    return [row for row in lines(folder) if "reward/mean" in row]


def samples(folder: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples" / f"step_{step}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on two ranks: actor TP 2, two engines."""
    folder = tmp_path_factory.mktemp("two")
    torchrun(2, *TRAIN, *SHORT, "--output-dir", str(folder)).check()
    return folder


@pytest.mark.engine
@pytest.mark.distributed
class TestRuns:
    def test_run_directory_is_complete(self, two_ranks: Path) -> None:
        for name in ("config.yaml", "metrics.jsonl", "summary.json", "samples/step_0.jsonl", "samples/step_1.jsonl"):
            assert (two_ranks / name).is_file(), name
        assert any((two_ranks / "tensorboard").iterdir())
        summary = json.loads((two_ranks / "summary.json").read_text())
        assert summary["status"] == "completed" and summary["steps"] == 2
        assert summary["tokens_generated"] == sum(s["length"] for k in range(2) for s in samples(two_ranks, k))
        assert [row["step"] for row in lines(two_ranks) if "eval/reward" in row] == [0, 2]
        assert summary["eval_first"]["step"] == 0 and summary["eval_last"]["step"] == 2
        assert {"torch", "megatron-core", "transformers", "python"} <= set(summary["versions"])

    def test_trainer_and_engine_agree(self, two_ranks: Path) -> None:
        for row in rows(two_ranks):
            assert 0 < row["actor/train_rollout_logprob_abs_diff"] < 1e-4

    def test_phases_add_up_to_the_step(self, two_ranks: Path) -> None:
        for row in rows(two_ranks):
            phases = sum(v for k, v in row.items() if k.startswith("timing_s/"))
            assert phases == pytest.approx(row["perf/step_time"], rel=0.02)

    def test_every_token_has_the_version_that_made_it(self, two_ranks: Path) -> None:
        for step in range(2):
            assert all(s["version"] == [step, step] for s in samples(two_ranks, step))
            assert {s["engine"] for s in samples(two_ranks, step)} == {0, 1}

    def test_four_ranks_sample_the_same_responses(self, two_ranks: Path, tmp_path: Path) -> None:
        """Actor TP 2 x DP 2 and four engines: the same weights and seeds give the same first step."""
        torchrun(4, *TRAIN, *SHORT, "--train-iters", "1", "--eval-interval", "0", "--output-dir", str(tmp_path)).check()
        ours, theirs = samples(two_ranks, 0), samples(tmp_path, 0)
        assert [s["output_token_ids"] for s in ours] == [s["output_token_ids"] for s in theirs]
        assert len({s["engine"] for s in theirs}) == 4

    def test_resume_repeats_the_uninterrupted_run(self, two_ranks: Path, tmp_path: Path) -> None:
        torchrun(2, *TRAIN, *SHORT, "--train-iters", "1", "--output-dir", str(tmp_path)).check()
        output = torchrun(2, *TRAIN, *SHORT, "--load", "auto", "--output-dir", str(tmp_path)).check()
        assert "resum" in output
        assert [r["step"] for r in rows(tmp_path)] == [0, 1]
        assert [s["output_token_ids"] for s in samples(tmp_path, 1)] == [
            s["output_token_ids"] for s in samples(two_ranks, 1)
        ]
        assert rows(tmp_path)[1]["actor/loss"] == rows(two_ranks)[1]["actor/loss"]

    def test_export_loads_in_transformers(self, two_ranks: Path) -> None:
        from transformers import AutoModelForCausalLM

        exported = AutoModelForCausalLM.from_pretrained(two_ranks / "hf")
        original = AutoModelForCausalLM.from_pretrained(MODEL)
        assert set(exported.state_dict()) == set(original.state_dict())
        changed = [k for k, v in exported.state_dict().items() if not v.equal(original.state_dict()[k])]
        assert "model.embed_tokens.weight" in changed

    def test_history_is_drafted_from(self, tmp_path: Path) -> None:
        """Four prompts, visited in every step: from the second on, what was generated before serves as drafts. The
        log-probabilities of accepted tokens are still those of the actor."""
        words = ("--histospec", "--num-prompts", "4", "--train-iters", "3", "--eval-interval", "2")
        torchrun(2, *TRAIN, *SHORT, *words, "--output-dir", str(tmp_path)).check()
        first, _, last = rows(tmp_path)
        assert last["histospec/tokens_per_request_step"] > first["histospec/tokens_per_request_step"] > 1
        assert last["histospec/history_bytes_per_token"] < 20
        assert all(0 < row["actor/train_rollout_logprob_abs_diff"] < 1e-4 for row in (first, last))

    def test_windows_carry_samples_over_a_checkpoint_and_another_layout(self, tmp_path: Path) -> None:
        """Windows leave samples to the next one, history follows; the run is resumed with one engine of two ranks where
        there were two of one. Every sample is trained exactly once, in its step or the next."""
        words = (
            "--histospec", "--histopipe-carry", "0.25", "--histopipe-layout", "spread", "--num-prompts", "4",
            "--eval-interval", "0", "--train-iters", "6", "--max-response-len", "64",
        )  # fmt: skip
        # The last window of a run leaves nothing, so the checkpoint to resume is one in its middle.
        first = (*words, "--save-interval", "2", "--keep-last", "9", "--output-dir", str(tmp_path / "b"))
        torchrun(2, *TRAIN, *SHORT, *first).check()
        windows = [json.loads(line) for line in (tmp_path / "b" / "windows.jsonl").read_text().splitlines()]
        assert [w["step"] for w in windows] == list(range(6))
        assert windows[1]["carried_out"] > 0 and windows[-1]["carried_out"] == 0
        again = ("--load", str(tmp_path / "b" / "checkpoints" / "step_00000002"), "--vllm-tensor-parallel-size", "2")
        torchrun(2, *TRAIN, *SHORT, *words, *again, "--output-dir", str(tmp_path / "c")).check()
        seen = [s for k in range(6) for s in samples(tmp_path / ("b" if k < 2 else "c"), k)]
        ids = [(s["step"], s["prompt_id"], s["sample_index"]) for s in seen]
        assert len(ids) == len(set(ids)) == 6 * 4 * 4
        assert all(s["version"][1] - s["version"][0] <= 1 for s in seen)
        carried = [s for s in samples(tmp_path / "c", 2) if s["step"] == 1]
        assert carried and any(s["version"] == [1, 2] for s in carried)
        stale = rows(tmp_path / "c")[0]
        assert stale["stale/token_share"] > 0 and stale["histospec/tokens_per_request_step"] > 1.3


def said_once(result: Result, message: str) -> None:
    """One clear message, and a non-zero status."""
    assert result.status != 0, result.output[-3000:]
    assert result.output.count(message) == 1, result.output[-6000:]


@pytest.mark.distributed
class TestBadInput:
    """Each ends within 30 s (on an idle machine) with one message that names the option, file or rank."""

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--hf-checkpoint", "nowhere"), "model folder 'nowhere' does not exist"),
            (("--tensor-model-parallel-size", "3"), "--tensor-model-parallel-size 3"),
            (("--pipeline-model-parallel-size", "2"), "does not divide the number of ranks"),
            (("--reward", "no_such_reward"), "no_such_reward"),
            (("--prompt-data", "nowhere.jsonl"), "nowhere.jsonl"),
            (("--context-parallel-size", "2", "--tensor-model-parallel-size", "1"), "--context-parallel-size"),
        ],
    )
    def test_refused_before_work(self, words: tuple[str, ...], message: str, tmp_path: Path) -> None:
        said_once(torchrun(2, *TRAIN, *SHORT, "--output-dir", str(tmp_path), *words, timeout=90), message)

    def test_unsupported_architecture(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
        result = torchrun(
            2, *TRAIN, *SHORT, "--hf-checkpoint", str(tmp_path), "--output-dir", str(tmp_path), timeout=90
        )
        said_once(result, "architecture 'MambaForCausalLM' is not supported")

    def test_malformed_data_line(self, tmp_path: Path) -> None:
        file = tmp_path / "prompts.jsonl"
        file.write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": "1+1="\n')
        result = torchrun(2, *TRAIN, *SHORT, "--prompt-data", str(file), "--output-dir", str(tmp_path), timeout=90)
        said_once(result, f"{file}:2")

    def test_reward_that_raises(self, tmp_path: Path) -> None:
        (tmp_path / "my_reward.py").write_text(
            "def grade(response, label, **info):\n    raise KeyError('no such column')\n"
        )
        result = torchrun(
            2, *TRAIN, *SHORT, "--reward", "my_reward:grade", "--output-dir", str(tmp_path / "run"),
            timeout=120, env={"PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        assert result.status != 0
        message = re.search(r"my_reward:grade.*KeyError.*no such column.*prompt \d+", result.output)
        assert message and result.output.count(message[0]) == 1, result.output[-6000:]

    def test_a_weight_that_is_not_finite(self, tmp_path: Path) -> None:
        """Weights are checked before any engine serves them, and the tensor is named."""
        from safetensors.torch import load_file, save_file

        model = shutil.copytree(MODEL, tmp_path / "model")
        tensors = load_file(model / "model.safetensors")
        tensors["model.layers.2.self_attn.o_proj.weight"][3, 5] = float("nan")
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        words = ("--hf-checkpoint", str(model), "--output-dir", str(tmp_path / "run"))
        result = torchrun(2, *TRAIN, *SHORT, *words, timeout=120)
        said_once(
            result, "decoder.layers.2.self_attention.linear_proj.weight of the actor has values that are not finite"
        )

    def test_kv_cache_too_small_for_one_request(self, tmp_path: Path) -> None:
        words = ("--vllm-kv-cache-memory-gib", "0.0001", "--output-dir", str(tmp_path))
        said_once(torchrun(2, *TRAIN, *SHORT, *words, timeout=120), "--vllm-kv-cache-memory-gib 0.0001")

    def test_a_killed_rank_is_named(self, tmp_path: Path) -> None:
        """SIGKILL to rank 1 while it trains: the run ends, and the survivor says which rank it was."""
        process = start(
            2, (*TRAIN, *SHORT, "--train-iters", "500", "--eval-interval", "0", "--output-dir", str(tmp_path))
        )
        try:
            deadline = time.monotonic() + 150
            while not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").read_text():
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.5)
            victim = rank_process(process.pid, 1)
            os.kill(victim, signal.SIGKILL)
            killed = time.monotonic()
            result = finish(process, 60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert time.monotonic() - killed < 45
        assert result.status != 0
        assert re.search(rf"rank 1 .*{victim}", result.output), result.output[-6000:]


def rank_process(agent: int, rank: int) -> int:
    """Process id of a rank under a torchrun agent, from the environment that the agent gave it."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            status = (folder / "status").read_text()
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"PPid:\t{agent}\n" in status and f"RANK={rank}".encode() in environment:
            return int(folder.name)
    raise AssertionError(f"no process of rank {rank} under {agent}")


@pytest.mark.distributed
@pytest.mark.engine
def test_full_disk_keeps_the_previous_checkpoint(two_ranks: Path, tmp_path: Path) -> None:
    """Checkpoint files larger than the process may write: the save fails with a message, and what was there stays whole."""
    first = torchrun(2, *TRAIN, *SHORT, "--train-iters", "1", "--eval-interval", "0", "--output-dir", str(tmp_path))
    first.check()
    before = {
        p.relative_to(tmp_path): p.read_bytes() for p in sorted((tmp_path / "checkpoints").rglob("*")) if p.is_file()
    }
    assert before
    words = ("--load", "auto", "--eval-interval", "0", "--output-dir", str(tmp_path), "--tensorboard", "False")
    result = torchrun(2, "--module", "tests.small_disk", *TRAIN[2:], *SHORT, *words)
    assert result.status != 0 and re.search(
        "No space left|File too large|could not be written in full", result.output
    ), result.output[-6000:]
    after = {
        p.relative_to(tmp_path): p.read_bytes() for p in sorted((tmp_path / "checkpoints").rglob("*")) if p.is_file()
    }
    assert after == before
    again = torchrun(2, *TRAIN, *SHORT, "--load", "auto", "--eval-interval", "0", "--output-dir", str(tmp_path)).check()
    assert "resuming" in again
