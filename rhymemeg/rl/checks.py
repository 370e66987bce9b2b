"""What an algorithm's options must not contradict. Pure; each problem is one ConfigError that names the options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rhymemeg.errors import ConfigError
from rhymemeg.rl.advantages import GROUP_ESTIMATORS

if TYPE_CHECKING:
    from rhymemeg.config import Config


def check_algorithm(config: Config) -> None:
    """Raises ConfigError for the first contradiction."""
    _check_groups(config)
    _check_critic(config)
    _check_replay(config)
    _check_corrections(config)
    _check_rewards(config)


def _check_groups(config: Config) -> None:
    a, r = config.algorithm, config.rollout
    if a.advantage_estimator in GROUP_ESTIMATORS and r.n_samples_per_prompt < 2:
        raise ConfigError(
            f"--advantage-estimator {a.advantage_estimator} compares samples of a prompt: --n-samples-per-prompt must "
            "be >= 2"
        )
    if a.dynamic_sampling and r.n_samples_per_prompt < 2:
        raise ConfigError(
            "--dynamic-sampling drops groups of equal rewards, and a group of one is always equal: "
            "--n-samples-per-prompt must be >= 2"
        )
    for option, share in (
        ("--histopipe-carry", config.histopipe.histopipe_carry),
        ("--histopipe-early", config.histopipe.histopipe_early),
    ):
        if a.dynamic_sampling and share:
            raise ConfigError(
                f"--dynamic-sampling with {option} {share:g}: a step that may sample more prompts has no fixed window to "
                "leave samples to; choose one"
            )
    if a.overlong_buffer_len > r.max_response_len:
        raise ConfigError(
            f"--overlong-buffer-len {a.overlong_buffer_len} exceeds --max-response-len {r.max_response_len}"
        )
    if a.eps_clip_c is not None and a.policy_loss != "ppo_clip":
        raise ConfigError(f"--eps-clip-c is the dual clip of --policy-loss ppo_clip; {a.policy_loss} has none")


def _check_critic(config: Config) -> None:
    a, c = config.algorithm, config.critic
    if not a.needs_critic:
        for name, field in type(c).model_fields.items():
            if getattr(c, name) != field.default:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is of the critic, which --advantage-estimator {a.advantage_estimator} does "
                    "not have: use gae"
                )
        return
    if c.critic_warmup_steps >= config.run.train_iters > 0:
        raise ConfigError(
            f"--critic-warmup-steps {c.critic_warmup_steps} is not less than --train-iters {config.run.train_iters}: the "
            "actor would never be trained"
        )


def _check_replay(config: Config) -> None:
    a = config.algorithm
    if config.moe.moe_router_replay == "actor":
        if a.old_log_probs != "actor":
            raise ConfigError(
                "--moe-router-replay actor records the experts with the actor's old log-probabilities: use --old-log-probs actor"
            )
        if a.ppo_epochs * a.num_minibatches == 1:
            raise ConfigError(
                "--moe-router-replay actor has no effect with one optimizer step a rollout (--ppo-epochs 1 and "
                "--num-minibatches 1), whose weights are those of the recording"
            )


def _check_corrections(config: Config) -> None:
    a, r = config.algorithm, config.rollout
    truncated = "--top-p" if r.top_p < 1 else "--top-k" if r.top_k > 0 else ""
    for option, given in (
        ("--old-log-probs engine", a.old_log_probs == "engine"),
        (f"--rollout-is {a.rollout_is}", a.rollout_is != "none"),
        (f"--rollout-rs {a.rollout_rs}", a.rollout_rs != "none"),
        ("--rollout-token-veto-threshold", a.rollout_token_veto_threshold is not None),
        ("--decoupled-ppo", a.decoupled_ppo),
    ):
        if given and truncated:
            raise ConfigError(
                f"{option} with {truncated}: the engine's log-probabilities are those of the truncated distribution, "
                "the actor's are not, and the two cannot be compared"
                + ("; use --old-log-probs actor" if option.startswith("--old") else "")
            )
    if a.old_log_probs == "engine":
        if a.rollout_is != "none":
            raise ConfigError(
                f"--rollout-is {a.rollout_is} weights by pi_old / pi_engine, which is 1 under --old-log-probs engine: "
                "use --old-log-probs actor"
            )
        if a.decoupled_ppo:
            raise ConfigError("--decoupled-ppo takes the ratio to the actor: use --old-log-probs actor")
    if a.rollout_is_bound != "truncate" and a.rollout_is == "none":
        raise ConfigError(f"--rollout-is-bound {a.rollout_is_bound} has no effect without --rollout-is")
    if a.rollout_is_bound == "icepop" and a.rollout_is_threshold_lower >= a.rollout_is_threshold:
        raise ConfigError(
            f"--rollout-is-threshold-lower {a.rollout_is_threshold_lower} is not below --rollout-is-threshold "
            f"{a.rollout_is_threshold}"
        )


def _check_rewards(config: Config) -> None:
    a, d = config.algorithm, config.data
    if a.kl_coef > 0 and a.kl_loss_coef > 0:
        raise ConfigError("--kl-coef (KL in the reward) and --kl-loss-coef (KL in the loss) are both given: choose one")
    if a.gamma < 1 and a.advantage_estimator not in ("gae", "reinforce_pp"):
        raise ConfigError(f"--gamma has no effect with --advantage-estimator {a.advantage_estimator}")
    if a.lam < 1 and a.advantage_estimator != "gae":
        raise ConfigError(f"--lam has no effect with --advantage-estimator {a.advantage_estimator}")
    if d.reward_range is not None and d.reward_range[0] >= d.reward_range[1]:
        raise ConfigError(f"--reward-range {d.reward_range[0]:g} {d.reward_range[1]:g}: the first must be smaller")
    if d.rewards:
        for option, given in (
            ("--reward", d.reward != "auto"),
            ("reward_args", bool(d.reward_args)),
            ("--reward-range", d.reward_range is not None),
        ):
            if given:
                raise ConfigError(f"{option} and rewards are both given: each reward of the sum has its own")
