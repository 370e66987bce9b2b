"""Options: YAML and command line, precedence, refusals with the nearest name or the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rhymemeg.cli import parse
from rhymemeg.config import Config, option_sections
from rhymemeg.errors import ConfigError


def valid(**changes: object) -> Config:
    """A configuration that passes `check`, with changes by option name."""
    tree = {"hf_checkpoint": "model", "prompt_data": "task:ledger", "max_prompt_len": 64, "max_response_len": 64}
    return Config.from_tree(tree | changes, where="test")


def test_yaml_round_trip(tmp_path: Path) -> None:
    config = valid(lr=3e-4, stop=["a", "b"], task_args={"max_terms": 3}, eps_clip_high=0.3)
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    assert Config.load_yaml(file) == config


def test_command_line_wins_over_yaml(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("parallel: {tensor_model_parallel_size: 2}\nlr: 1.0e-3\nsequence_parallel: false\n")
    config, dry_run = parse(
        ["--config", str(file), "--tensor_model_parallel_size", "4", "--sequence-parallel", "--dry-run"]
    )
    assert config.parallel.tensor_model_parallel_size == 4 and config.parallel.sequence_parallel
    assert config.optimizer.lr == 1e-3 and dry_run


def test_options_with_trees_come_from_the_file(tmp_path: Path) -> None:
    """Also where keys of theirs are called like options."""
    sets = {"a": {"prompt_data": "x", "n_samples": 2}, "b": {"prompt_data": "y"}}
    tree = {"eval_sets": sets, "task_args": {"max_terms": 3}, "rewards": {"*": ["auto"]}}
    file = tmp_path / "a.yaml"
    file.write_text(json.dumps(tree))
    config, _ = parse(["--config", str(file), "--lr", "0.5"])
    assert (config.data.eval_sets, config.data.task_args, config.data.rewards) == tuple(tree.values())
    assert config.optimizer.lr == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tensor_model_paralel_size: 2",
            "unknown option 'tensor_model_paralel_size', did you mean tensor_model_parallel_size",
        ),
        ("parallel: {lr: 1}", "unknown option 'lr' in section 'parallel'"),
        ("lr: fast", "--lr: Input should be a valid number"),
        ("lr: -1.0", "--lr: Input should be greater than 0"),
        ("- lr", "expected option names and values"),
        ("lr: [", "not valid YAML"),
        ("[" * 5000, "nested too deeply"),
        ("lr: .inf", "--lr: Input should be a finite number"),
        ("entropy_coef: .nan", "--entropy-coef: Input should be a finite number"),
        ("reward_range: [0, .inf]", "--reward-range.1: Input should be a finite number"),
        ("parallel: 3", "section 'parallel' holds int"),
        ("parallel: {3: 4}", "unknown option 3 in section 'parallel'"),
    ],
)
def test_bad_yaml_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        Config.load_yaml(file)
    assert message in str(error.value) and str(file) in str(error.value)


def test_missing_yaml_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--config: nowhere\.yaml does not exist"):
        parse(["--config", "nowhere.yaml"])


def test_two_yaml_files_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--config is given 2 times \(a, b\)"):
        parse(["--config", "a", "--config=b"])


def test_unknown_option_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        parse(["--vllm-max-num-seq", "4"])
    printed = capsys.readouterr()
    assert exit_status.value.code == 2
    assert "--vllm-max-num-seqs" in printed.err + printed.out


def test_only_rank_0_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as exit_status:
        parse(["--nonsense", "4"])
    printed = capsys.readouterr()
    assert exit_status.value.code == 2 and printed.err + printed.out == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hf_checkpoint": ""}, "--hf-checkpoint is required"),
        ({"prompt_data": ""}, "--prompt-data is required"),
        ({"advantage_estimator": "grop"}, "--advantage-estimator: unknown name 'grop', did you mean grpo"),
        ({"policy_loss": "xyz"}, r"--policy-loss: unknown name 'xyz' \(known: cispo, "),
        ({"loss_agg_mode": "token-mean"}, "did you mean token_mean"),
        ({"histospec": True, "histospec_policy": "fixed:x"}, "--histospec-policy fixed:x"),
        ({"min_lr": 1.0}, "--min-lr 1.0 exceeds --lr"),
        ({"ref_hf_checkpoint": "x"}, "--kl-loss-coef and --kl-coef are 0"),
        ({"n_samples_per_prompt": 1}, "--n-samples-per-prompt must be >= 2"),
        ({"num_minibatches": 64}, "--num-minibatches 64 exceeds --rollout-batch-size 32"),
        ({"old_log_probs": "engine", "top_p": 0.9}, "use --old-log-probs actor"),
        ({"max_tokens_per_microbatch": 100}, "less than the longest sequence"),
        ({"vllm_speculative_config": "[" * 100_000}, "--vllm-speculative-config: not JSON"),
        ({"vllm_speculative_config": '{"method": 1}'}, "--vllm-speculative-config: method 1 is not a name"),
        ({"vllm_speculative_config": '{"method": "ngram", "num_speculative_tokens": -3}'}, "num_speculative_tokens -3"),
    ],
)
def test_contradictions_are_refused_with_the_reason(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        valid(**changes).check()


def test_the_valid_configuration_is_valid() -> None:
    valid().check()


def test_help_names_what_is_registered() -> None:
    from rhymemeg.config import AlgorithmOptions
    from rhymemeg.rl.advantages import ADVANTAGES, VALUE_ESTIMATORS
    from rhymemeg.rl.losses import AGGREGATIONS, POLICY_LOSSES

    for option, known in (
        ("advantage_estimator", (*ADVANTAGES, *VALUE_ESTIMATORS)),
        ("policy_loss", POLICY_LOSSES),
        ("loss_agg_mode", AGGREGATIONS),
    ):
        described = AlgorithmOptions.model_fields[option].description or ""
        assert set(described.rstrip(".").replace(" or ", ", ").split(", ")) == set(known)


def test_every_option_is_documented_and_unique() -> None:
    owner = option_sections()
    assert len(owner) > 80
    for name, section in owner.items():
        field = type(getattr(Config(), section)).model_fields[name]
        assert field.description and field.description.endswith("."), name
