"""Every recipe is a configuration that runs; one run with most of what they have; the table of their results."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from tests.torchrun import ROOT, torchrun


def load_tool() -> Any:
    """tools/ is a folder of programs, not a package."""
    spec = importlib.util.spec_from_file_location("recipes_table", ROOT / "tools/recipes_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


recipes_table = load_tool()
RECIPES = sorted((ROOT / "launch/configs/recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_recipes_are_valid_and_differ_in_the_algorithm_only(file: Path) -> None:
    config = Config.load_yaml(file)
    config.check()
    config.check_model(ModelArch.from_pretrained(ROOT / config.model.hf_checkpoint))
    base = Config.load_yaml(RECIPES[0])
    assert (config.rollout, config.data, config.parallel) == (base.rollout, base.data, base.parallel)
    assert config.run.output_dir == f"runs/recipes/{file.stem}"


def test_there_is_a_recipe_an_algorithm() -> None:
    assert {f.stem for f in RECIPES} == {"grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_pp", "ppo"}
    documented = (ROOT / "docs/recipes.md").read_text()
    assert all(f"| `{f.stem}` |" in documented for f in RECIPES)


@pytest.mark.engine
@pytest.mark.distributed
def test_a_step_with_everything_switched_on(tmp_path: Path) -> None:
    """Prompts so easy that most groups have equal rewards: dynamic sampling replaces them until its limit."""
    tree = yaml.safe_load((ROOT / "launch/configs/recipes/dapo.yaml").read_text())
    tree["run"] |= {"output_dir": str(tmp_path / "run"), "train_iters": 2, "tensorboard": False}
    tree["rollout"] |= {"rollout_batch_size": 6, "n_samples_per_prompt": 2, "max_response_len": 96}
    tree["algorithm"] |= {
        "dynamic_sampling_max_rounds": 2, "overlong_buffer_len": 64, "overlong_filtering": True, "kl_coef": 0.01,
        "rollout_is": "sequence", "rollout_rs": "geometric",
    }  # fmt: skip
    tree["data"] |= {
        "num_prompts": 24, "task_args": {"max_terms": 2}, "eval_interval": 2, "eval_num_prompts": 4,
        "rewards": {"*": ["auto", {"reward": "length_penalty", "weight": 0.001, "args": {"free": 90, "longest": 96}}]},
        "eval_sets": {"greedy": {"prompt_data": "task:ledger", "num_prompts": 3, "temperature": 0, "n_samples": 1}},
    }  # fmt: skip
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    output = torchrun(2, "--module", "rhymemeg.train", "--config", str(file), "--display", "lines", timeout=300).check()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    assert len(steps) == 2
    for number, row in enumerate(steps):
        assert 1 <= row["dynamic_sampling/rounds"] <= 2
        kept, sampled = row["dynamic_sampling/kept_groups"], row["dynamic_sampling/sampled_groups"]
        assert kept <= 6 <= sampled
        assert (kept < 6) == (row["dynamic_sampling/full"] == 0) == (f"step {number} trains on" in output)
        assert row["actor/trained_samples"] <= 2 * kept
        trained = (tmp_path / f"run/samples/step_{number}.jsonl").read_text().splitlines()
        assert len(trained) == 2 * kept
        assert row["rollout/samples"] == 2 * sampled
        assert {"reward/ledger", "reward/ledger/accuracy", "reward/length_penalty", "reward/overlong_penalty"} <= set(
            row
        )
        phases = sum(v for k, v in row.items() if k.startswith("timing_s/"))
        assert phases == pytest.approx(row["perf/step_time"], rel=0.02)
        if row["actor/updates"]:
            assert row["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1, abs=1e-3)
            assert row["rollout_corr/rollout_rs_masked_fraction"] == 0
            assert abs(row["rollout_corr/kl"]) < 1e-4 and 0 <= row["rollout_corr/k3_kl"] < 1e-4
    evaluated = [line for line in lines if "eval/reward" in line]
    assert [line["step"] for line in evaluated] == [0, 2]
    assert {"eval/pass@2", "eval/pass@2_se", "eval/greedy/reward", "eval/greedy/mean@1"} <= set(evaluated[0])


# ----------------------------------------------------------------------------------------------------------------- table


def write_run(folder: Path, before: float, after: float, **changes: Any) -> None:
    folder.mkdir(parents=True)
    summary = {
        "status": "completed", "eval_first": {"eval/reward": before}, "eval_last": {"eval/reward": after},
        "train_rollout_logprob_abs_diff_largest_mean": 2e-7,
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary | changes))
    rows = [{"perf/step_time": 9.0, "timing_s/evaluate": 5.0}, {"perf/step_time": 2.0}, {"perf/step_time": 6.0}, {}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, after in ((1, 0.6), (2, 0.8)):
        write_run(tmp_path / f"runs/grpo_40/seed_{seed}", 0.5, after)
        write_run(tmp_path / f"trl/seed_{seed}", 0.5, 0.5, train_rollout_logprob_abs_diff_largest_mean=None)
    write_run(tmp_path / "runs/gspo_40/seed_1", 0.5, 0.9, status="failed: no")
    doc = tmp_path / "doc.md"
    doc.write_text(f"before\n{recipes_table.BEGIN}\nold\n{recipes_table.END}\nafter\n")
    words = [
        "--no-run",
        "--seeds",
        "2",
        "--out",
        str(tmp_path / "runs"),
        "--trl",
        str(tmp_path / "trl"),
        "--doc",
        str(doc),
    ]
    assert recipes_table.main(words) == 0
    written = doc.read_text()
    assert "| grpo | 2 | 0.500 | 0.700 ± 0.100 | +0.200 ± 0.100 | 2.0e-07 | 4.0 |" in written
    assert "| TRL GRPO | 2 | 0.500 | 0.500 ± 0.000 | +0.000 ± 0.000 | - | 4.0 |" in written
    assert "gspo" not in written and "old" not in written
    assert (
        written.startswith("before\n") and written.endswith("\nafter\n") and "`python tools/recipes_table.py" in written
    )
    with pytest.raises(SystemExit):
        recipes_table.main(["--only", "grop"])
    assert "--only: no recipe 'grop'" in capsys.readouterr().err


def test_a_document_without_marks_is_left_alone(tmp_path: Path) -> None:
    doc = tmp_path / "doc.md"
    doc.write_text("text")
    with pytest.raises(SystemExit, match="the marks"):
        recipes_table.write_between_marks(doc, "table")
    assert doc.read_text() == "text"
