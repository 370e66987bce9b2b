"""Every option of a run, once: typed, documented, and the source of the command line, the YAML file and `--help`.

An option belongs to a section (a small pydantic model) and its name is unique over all sections, so the command line is
flat (`--tensor-model-parallel-size 2`) while a YAML file may group options by section or not:

    parallel:
      tensor_model_parallel_size: 2
    lr: 1.0e-5

Megatron's and vLLM's own names are kept where they mean the same thing (vLLM's with the prefix `vllm_`). Precedence:
command line over YAML file over default. What contradicts something else is refused by `Config.check` and, where the
model or the number of ranks is needed, by `Config.check_model`; each error is one `ConfigError` that names the option.
Parsing of the command line is in `rhymemeg.cli`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rhymemeg.arch import ModelArch
from rhymemeg.errors import ConfigError


class Section(BaseModel):
    """Base of the sections: unknown names are errors, numbers are finite, values are checked on assignment too."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False)


class RunOptions(Section):
    """What runs, for how long, and where it writes."""

    output_dir: str = Field(
        "runs/default", description="Run directory: config, metrics, samples, checkpoints, summary."
    )
    seed: int = Field(1234, ge=0, description="Everything random derives from this number.")
    train_iters: int = Field(100, ge=0, description="Number of training steps in all (a resumed run counts on).")
    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="auto: CUDA if there is a GPU, else CPU.")
    distributed_timeout_minutes: float = Field(10.0, gt=0, description="No collective or wait lasts longer than this.")
    preemption_grace_seconds: float = Field(
        25.0,
        ge=0,
        description="After SIGTERM, the current step may take this long to end and be saved; 0: stop at once.",
    )
    step_budget_minutes: float = Field(
        30.0, ge=0, description="A step that takes longer leaves the stacks of all ranks in stacks/; 0: never."
    )
    display: Literal["auto", "live", "lines", "off"] = Field(
        "auto", description="Progress on rank 0: a live panel, a line a step, or nothing. auto: live on a terminal."
    )
    tensorboard: bool = Field(True, description="Write TensorBoard events to the run directory.")
    save_samples_interval: int = Field(1, ge=0, description="Write samples/step_N.jsonl every so many steps; 0: never.")


class ModelOptions(Section):
    """The model, as a Hugging Face folder."""

    hf_checkpoint: str = Field("", description="Folder with config.json, safetensors weights and tokenizer.")
    ref_hf_checkpoint: str = Field("", description="Reference model for the KL term; empty: the initial weights.")
    params_dtype: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 on GPU, fp32 on CPU.")
    make_vocab_size_divisible_by: int = Field(
        128, ge=1, description="Pad the vocabulary to a multiple of this times TP."
    )
    transformer_impl: Literal["auto", "local", "transformer_engine"] = Field(
        "auto", description="auto: Transformer Engine on GPU where installed, else Megatron's local layers."
    )
    recompute_activations: bool = Field(False, description="Recompute each layer in the backward pass to save memory.")


class ParallelOptions(Section):
    """How Megatron splits the actor over the ranks. Data parallelism takes what is left."""

    tensor_model_parallel_size: int = Field(1, ge=1, description="TP: ranks that share each layer.")
    pipeline_model_parallel_size: int = Field(1, ge=1, description="PP: stages of layers.")
    num_layers_per_virtual_pipeline_stage: int | None = Field(
        None, ge=1, description="Layers a virtual stage; set it to interleave the pipeline schedule."
    )
    decoder_first_pipeline_num_layers: int | None = Field(
        None, ge=1, description="Layers on the first stage, if uneven."
    )
    decoder_last_pipeline_num_layers: int | None = Field(None, ge=1, description="Layers on the last stage, if uneven.")
    context_parallel_size: int = Field(1, ge=1, description="CP: ranks that share each sequence (GPU only).")
    expert_model_parallel_size: int = Field(1, ge=1, description="EP: ranks that share the experts.")
    expert_tensor_parallel_size: int | None = Field(None, ge=1, description="TP inside an expert; default: as TP.")
    sequence_parallel: bool = Field(False, description="Split activations along the sequence over the TP ranks.")
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = Field(
        "alltoall", description="How tokens reach experts."
    )
    moe_grouped_gemm: bool = Field(False, description="One kernel for all local experts (Transformer Engine only).")
    use_distributed_optimizer: bool = Field(True, description="Shard optimizer state over the data-parallel ranks.")
    overlap_grad_reduce: bool = Field(False, description="Reduce gradients while the backward pass runs (GPU).")
    overlap_param_gather: bool = Field(False, description="Gather parameters while the next forward pass runs (GPU).")


class OptimizerOptions(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of the decay.")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape of the decay.")
    lr_warmup_iters: int = Field(0, ge=0, description="Steps of linear warm-up from zero.")
    lr_decay_iters: int | None = Field(None, ge=1, description="Steps until --min-lr; default: --train-iters.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment.")
    adam_eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    clip_grad: float = Field(1.0, ge=0, description="Largest global gradient norm; 0: no clipping.")


class RolloutOptions(Section):
    """Which samples a step draws, and how."""

    rollout_batch_size: int = Field(32, ge=1, description="Prompts a step.")
    n_samples_per_prompt: int = Field(8, ge=1, description="Samples a prompt: the group of GRPO.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1: off.")
    top_k: int = Field(0, ge=0, description="Sample among the k likeliest tokens; 0: off.")
    max_response_len: int = Field(1024, ge=1, description="Longest response in tokens; longer ones are truncated.")
    max_prompt_len: int = Field(1024, ge=1, description="Longest prompt in tokens; longer ones are refused.")
    stop: tuple[str, ...] = Field((), description="Strings that end a response.")
    stop_token_ids: tuple[int, ...] = Field((), description="Token ids that end a response, besides the model's own.")
    rollout_timeout_minutes: float = Field(30.0, gt=0, description="A rollout phase that takes longer is an error.")


class EngineOptions(Section):
    """The vLLM engines, one to every `vllm_tensor_parallel_size` ranks. Names are vLLM's, with the prefix."""

    vllm_tensor_parallel_size: int = Field(1, ge=1, description="TP of each engine; independent of the actor's.")
    vllm_max_num_seqs: int = Field(256, ge=1, description="Most requests an engine runs at once.")
    vllm_max_num_batched_tokens: int | None = Field(None, ge=1, description="Most tokens an engine step takes.")
    vllm_gpu_memory_utilization: float = Field(0.6, gt=0, lt=1, description="Share of GPU memory for the engine.")
    vllm_kv_cache_memory_gib: float = Field(1.0, gt=0, description="KV cache of an engine on CPU, in GiB a rank.")
    vllm_enforce_eager: bool = Field(False, description="No CUDA graphs (always so on CPU).")
    vllm_enable_prefix_caching: bool = Field(True, description="Share keys and values of equal prefixes.")
    vllm_enable_sleep_mode: bool = Field(True, description="Free the engine's memory while the actor trains (GPU).")
    vllm_speculative_config: str = Field(
        "", description='vLLM\'s own speculative decoding, as JSON: {"method": "ngram", ...}; not with --histospec.'
    )
    vllm_enable_expert_parallel: bool = Field(False, description="Engines split experts instead of each expert.")


class AlgorithmOptions(Section):
    """What is learned from the samples."""

    advantage_estimator: str = Field(
        "grpo", description="grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline or gae."
    )
    policy_loss: str = Field("ppo_clip", description="ppo_clip, gspo, cispo or reinforce.")
    eps_clip: float = Field(0.2, gt=0, description="Lower clip: the ratio counts down to 1 - this.")
    eps_clip_high: float | None = Field(None, gt=0, description="Upper clip; default: --eps-clip.")
    eps_clip_c: float | None = Field(
        None, gt=1, description="Dual clip's bound for negative advantages; default: none."
    )
    loss_agg_mode: str = Field(
        "token_mean", description="token_mean, seq_mean_token_mean, seq_mean_token_sum or dr_grpo."
    )
    kl_loss_coef: float = Field(
        0.0, ge=0, description="Weight of the KL term to the reference model; 0: no such model."
    )
    kl_loss_type: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator of that KL.")
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus.")
    ppo_epochs: int = Field(1, ge=1, description="Passes over the samples of a step.")
    num_minibatches: int = Field(1, ge=1, description="Optimizer steps a pass.")
    max_tokens_per_microbatch: int = Field(8192, ge=1, description="Token budget of a micro-batch, padding included.")
    old_log_probs: Literal["engine", "actor"] = Field(
        "actor",
        description="Where the ratio's denominator comes from: the engine, or the actor before its first update.",
    )
    rollout_is: Literal["none", "token", "sequence", "geometric"] = Field(
        "none",
        description="Weights against a train/rollout mismatch: pi_old / pi_engine of a token, its product over the "
        "response, or its geometric mean.",
    )
    rollout_is_bound: Literal["truncate", "mask", "icepop"] = Field(
        "truncate", description="truncate: weights count up to the threshold; mask: 0 above it; icepop: 0 outside both."
    )
    rollout_is_threshold: float = Field(2.0, gt=0, description="Upper threshold of --rollout-is.")
    rollout_is_threshold_lower: float = Field(0.5, ge=0, description="Lower threshold of --rollout-is-bound icepop.")
    rollout_rs: Literal["none", "sequence", "geometric"] = Field(
        "none", description="Leave out responses whose ratio (product, geometric mean) is outside of the thresholds."
    )
    rollout_rs_threshold: float = Field(2.0, ge=1, description="Upper threshold of --rollout-rs.")
    rollout_rs_threshold_lower: float | None = Field(
        None, ge=0, le=1, description="Lower threshold of --rollout-rs; default: 1 / the upper one."
    )
    rollout_token_veto_threshold: float | None = Field(
        None, gt=0, lt=1, description="Leave out responses that have a token with a ratio below this."
    )
    decoupled_ppo: bool = Field(
        False,
        description="Tokens of an older version: the ratio is to the actor before its first update, and a weight "
        "corrects for the policy that made them.",
    )
    behav_imp_weight_cap: float = Field(
        5.0, gt=1, description="Tokens with a larger weight than this are left out under --decoupled-ppo."
    )
    kl_coef: float = Field(
        0.0, ge=0, description="Weight of the KL penalty in the reward; 0: no reference model for it."
    )
    kl_type: Literal["k1", "k2", "k3"] = Field("k1", description="Estimator of the KL in the reward.")
    gamma: float = Field(1.0, gt=0, le=1, description="Discount of rewards per token (gae, reinforce_pp).")
    lam: float = Field(1.0, ge=0, le=1, description="Lambda of the generalised advantage estimator.")
    overlong_buffer_len: int = Field(
        0, ge=0, description="Overlong shaping: the penalty grows over the last so many tokens; 0: none."
    )
    overlong_penalty_factor: float = Field(1.0, gt=0, description="Penalty of a response of the largest length.")
    overlong_filtering: bool = Field(False, description="Truncated responses are compared, but not trained on.")
    dynamic_sampling: bool = Field(False, description="Replace groups of equal rewards by those of new prompts.")
    dynamic_sampling_max_rounds: int = Field(
        4, ge=1, description="Rollouts a step may take for it; then it trains on what there is."
    )

    @property
    def needs_reference(self) -> bool:
        """A KL term needs the log-probabilities of a reference model."""
        return self.kl_loss_coef > 0 or self.kl_coef > 0

    @property
    def needs_critic(self) -> bool:
        """The estimator takes the values of a critic."""
        return self.advantage_estimator == "gae"


class CriticOptions(Section):
    """The critic of `--advantage-estimator gae`: a second model of the actor's size that predicts returns."""

    critic_lr: float = Field(1e-5, gt=0, description="Peak learning rate of the critic; the schedule is the actor's.")
    critic_warmup_steps: int = Field(0, ge=0, description="Steps in which the critic alone is trained.")
    value_clip: float | None = Field(
        0.5,
        gt=0,
        description="Values may move this far from the old ones in a step before they are clipped; none: no clip.",
    )


class MoeOptions(Section):
    """Models with experts: which experts the tokens of a step go to, and how evenly."""

    moe_router_replay: Literal["none", "actor", "rollout"] = Field(
        "none",
        description="Train with recorded experts: those of the actor before its first update (R2), or the engine's (R3).",
    )
    moe_aux_loss_coeff: float = Field(
        0.0, ge=0, description="Weight of the auxiliary loss for an even load, a sequence at a time; 0: none."
    )


class DataOptions(Section):
    """Prompts and rewards."""

    prompt_data: str = Field(
        "", description="JSONL or Parquet file, or task:NAME for a generator (ledger, any reasoning-gym task)."
    )
    prompt_key: str = Field("prompt", description="Field of a line that holds the prompt (text or chat messages).")
    label_key: str = Field("label", description="Field of a line that holds the reference answer.")
    source_key: str = Field("data_source", description="Field that may name a line's data set, for `rewards`.")
    apply_chat_template: bool = Field(False, description="Wrap prompts with the tokenizer's chat template.")
    num_prompts: int = Field(512, ge=1, description="Prompts to generate (generators only).")
    data_seed: int = Field(0, ge=0, description="Seed of the generator.")
    task_args: dict[str, Any] = Field(
        {}, description="Arguments of the generator, say {max_terms: 12} (in a YAML file only)."
    )
    reward: str = Field(
        "auto",
        description="ledger, reasoning_gym, math_verify, exact_match, format_match, length_penalty, code_tests or "
        "module:function. auto: the task's own.",
    )
    reward_args: dict[str, Any] = Field({}, description="Arguments of the reward function (in a YAML file only).")
    reward_range: tuple[float, float] | None = Field(
        None, description="Smallest and largest reward that the function may return; others end the run."
    )
    rewards: dict[str, Any] = Field(
        {}, description="Weighted sums of rewards by data source, in place of --reward (in a YAML file only)."
    )
    allow_code_execution: bool = Field(
        False, description="Let the reward code_tests run what the model writes, in isolated processes."
    )
    reward_timeout: float = Field(30.0, gt=0, description="Seconds that a reward may take for one sample.")
    reward_workers: int = Field(0, ge=0, description="Processes that compute rewards; 0: in the rank itself.")
    shuffle: bool = Field(True, description="A new order of the prompts each epoch.")
    eval_interval: int = Field(0, ge=0, description="Evaluate held-out prompts every so many steps; 0: never.")
    eval_prompt_data: str = Field("", description="Held-out prompts; empty: the generator with --eval-data-seed.")
    eval_num_prompts: int = Field(64, ge=1, description="Held-out prompts to generate (generators only).")
    eval_data_seed: int = Field(1_000_003, ge=0, description="Seed of the held-out prompts.")
    eval_n_samples: int = Field(1, ge=1, description="Samples a held-out prompt.")
    eval_temperature: float = Field(1.0, ge=0, description="Temperature of the evaluation; 0: greedy.")
    eval_sets: dict[str, Any] = Field(
        {}, description="More held-out sets by name: their prompt_data, and what differs (in a YAML file only)."
    )
    eval_pass_score: float = Field(1.0, description="A response with at least this reward passes, for pass@k.")


class HistoSpecOptions(Section):
    """Speculative rollouts from history. The output distribution does not change."""

    histospec: bool = Field(False, description="Draft from last epoch's responses to the same prompt.")
    histospec_policy: str = Field("goodput", description="Draft length: goodput, paper, published, or fixed:K.")
    histospec_max_draft: int = Field(16, ge=1, le=128, description="Longest draft in tokens.")
    histospec_branch: Literal["count", "paper", "recency", "reward_recency"] = Field(
        "count", description="Which continuation to draft where history has several."
    )
    histospec_siblings: bool = Field(True, description="Draft from the running samples of the same prompt, too.")
    histospec_memory_gib: float = Field(8.0, gt=0, description="History an engine keeps, in GiB of host memory.")
    histospec_profile: str = Field(
        "", description="Step times measured by rhymemeg.histospec.profile; empty: built-in."
    )
    histospec_warm_start: str = Field(
        "", description="JSONL of responses (a run's samples, or a rollout dump) to start with."
    )


class HistoPipeOptions(Section):
    """Scheduling of rollouts by last epoch's lengths: who generates what, and what a window may leave to the next."""

    histopipe_policy: Literal["complement", "random", "paper", "pull"] = Field(
        "complement", description="Placement of samples on engines. random: an even split, as without a plan."
    )
    histopipe_layout: Literal["group", "spread"] = Field(
        "group", description="A prompt's samples on one engine (drafts and prompt are shared), or spread over all."
    )
    histopipe_carry: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="Largest share of a step's samples that a window may leave unfinished for the next; 0: on-policy.",
    )
    histopipe_groups: Literal["complete", "available"] = Field(
        "complete", description="Train a group when all of it is complete, or each sample against the siblings known."
    )
    histopipe_early: float = Field(
        0.0, ge=0, le=1, description="Share of the next step's samples that engines without work may start."
    )
    histopipe_steal: bool = Field(True, description="Engines without work take requests that others have not started.")
    histopipe_ranking_groups: int = Field(8, ge=1, description="Ranking groups of the policy paper.")
    histopipe_profile: str = Field(
        "measured", description="Engine step times: measured while running, steps (all alike), a100-7b, or a file."
    )


class SyncOptions(Section):
    """Moving weights from the actor into the engines."""

    update_weight_buffer_size: int = Field(512 << 20, ge=1, description="Bytes of weights in flight at once.")
    weight_sync_verify: Literal["off", "sampled", "full"] = Field("sampled", description="Checksums after each update.")
    offload_optimizer: bool = Field(
        False, description="Optimizer state waits in host memory while the engines generate (GPU)."
    )
    offload_gradients: bool = Field(False, description="Gradient buffers are freed while the engines generate.")


class ObserveOptions(Section):
    """What is measured besides the times of the phases."""

    trace_steps: str = Field(
        "", description="Steps to trace for Perfetto into traces/step_N.json, such as 3,10-12; empty: none."
    )
    nvml_interval: float = Field(0.5, ge=0, description="Seconds between looks at the GPU by NVML; 0: none.")
    gpu_peak_tflops: float = Field(
        0.0, ge=0, description="Peak of a GPU for the MFU, dense BF16, in 1e12 FLOPs a second; 0: by its name."
    )


class CheckpointOptions(Section):
    """Saving and resuming."""

    save_interval: int = Field(0, ge=0, description="Save every so many steps; 0: only at the end.")
    save_final: bool = Field(True, description="Save after the last step.")
    load: str = Field("", description="Checkpoint folder to resume from; 'auto': the newest of this run, if any.")
    keep_last: int = Field(2, ge=1, description="How many of the newest checkpoints are kept.")
    keep_every: int = Field(0, ge=0, description="Checkpoints of every so many steps are kept for good; 0: none.")
    export_hf: bool = Field(True, description="Export the final model as a Hugging Face folder.")


class Config(Section):
    """All sections. `load_yaml`, `check` and `check_model` are the only ways in; `to_yaml` writes it with the run."""

    run: RunOptions = RunOptions()
    model: ModelOptions = ModelOptions()
    parallel: ParallelOptions = ParallelOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    rollout: RolloutOptions = RolloutOptions()
    engine: EngineOptions = EngineOptions()
    algorithm: AlgorithmOptions = AlgorithmOptions()
    critic: CriticOptions = CriticOptions()
    moe: MoeOptions = MoeOptions()
    data: DataOptions = DataOptions()
    histospec: HistoSpecOptions = HistoSpecOptions()
    histopipe: HistoPipeOptions = HistoPipeOptions()
    sync: SyncOptions = SyncOptions()
    observe: ObserveOptions = ObserveOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()

    # ------------------------------------------------------------------------------------------------ reading and writing

    @classmethod
    def load_yaml(cls, file: str | Path) -> Config:
        """Read a YAML file of options, grouped by section or flat. Raises ConfigError naming file and option."""
        import yaml

        path = Path(file)
        try:
            tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"--config: {path} does not exist") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--config: cannot read {path}: {error}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"--config: {path} is not valid YAML: {error}") from None
        except RecursionError:
            raise ConfigError(f"--config: {path} is nested too deeply") from None
        return cls.from_tree({} if tree is None else tree, where=str(path))

    @classmethod
    def from_tree(cls, tree: Any, where: str) -> Config:
        """Build from a parsed YAML tree; unknown names are refused with the nearest known one."""
        if not isinstance(tree, dict):
            raise ConfigError(f"{where}: expected option names and values, got {type(tree).__name__}")
        sections, owner = section_types(), option_sections()
        grouped: dict[str, dict[str, Any]] = {name: {} for name in sections}
        for key, value in tree.items():
            if key in sections and (isinstance(value, dict) or key not in owner):  # histospec is both
                if not isinstance(value, dict):
                    raise ConfigError(f"{where}: section {key!r} holds {type(value).__name__}, not options")
                for option, inner in value.items():
                    if owner.get(option) != key:
                        raise ConfigError(
                            f"{where}: unknown option {option!r} in section {key!r}{did_you_mean(str(option))}"
                        )
                    grouped[key][option] = inner
            elif key in owner:
                grouped[owner[key]][key] = value
            else:
                raise ConfigError(f"{where}: unknown option {key!r}{did_you_mean(str(key))}")
        try:
            return cls(**{name: sections[name](**values) for name, values in grouped.items()})
        except ValidationError as error:
            raise ConfigError(f"{where}: {first_problem(error)}") from None

    def to_yaml(self) -> str:
        """All options with their values, by section; `load_yaml` reads it back unchanged."""
        import yaml

        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    # ---------------------------------------------------------------------------------------------------------- checks

    @property
    def max_model_len(self) -> int:
        """Longest sequence of prompt and response, in tokens."""
        return self.rollout.max_prompt_len + self.rollout.max_response_len

    def check(self) -> None:
        """Refuse what is missing or contradicts itself, before anything is loaded."""
        from rhymemeg.rl.advantages import ADVANTAGES, VALUE_ESTIMATORS
        from rhymemeg.rl.checks import check_algorithm
        from rhymemeg.rl.losses import AGGREGATIONS, POLICY_LOSSES

        a, o, r = self.algorithm, self.optimizer, self.rollout
        for value, option in ((self.model.hf_checkpoint, "--hf-checkpoint"), (self.data.prompt_data, "--prompt-data")):
            if not value:
                raise ConfigError(f"{option} is required")
        for value, option, known in (
            (a.advantage_estimator, "--advantage-estimator", (*ADVANTAGES, *VALUE_ESTIMATORS)),
            (a.policy_loss, "--policy-loss", POLICY_LOSSES),
            (a.loss_agg_mode, "--loss-agg-mode", AGGREGATIONS),
        ):
            if value not in known:
                raise ConfigError(f"{option}: unknown name {value!r}{did_you_mean(value, known)}")
        if self.histospec.histospec:
            from rhymemeg.histospec.cost_model import CostModel
            from rhymemeg.histospec.policy import make_policy

            try:
                make_policy(
                    self.histospec.histospec_policy, CostModel.built_in("cpu"), self.histospec.histospec_max_draft
                )
            except (ConfigError, ValueError) as error:
                raise ConfigError(f"--histospec-policy {self.histospec.histospec_policy}: {error}") from None
        self._check_histopipe()
        if self.engine.vllm_speculative_config:
            if self.histospec.histospec:
                raise ConfigError("--vllm-speculative-config and --histospec both draft: choose one")
            try:
                parsed = json.loads(self.engine.vllm_speculative_config)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"--vllm-speculative-config: not JSON: {error}") from None
            if not isinstance(parsed, dict) or "method" not in parsed:
                raise ConfigError('--vllm-speculative-config: expected an object with "method"')
            if not isinstance(parsed["method"], str):
                raise ConfigError(f"--vllm-speculative-config: method {parsed['method']!r} is not a name")
            drafts = parsed.get("num_speculative_tokens", 1)
            if type(drafts) is not int or drafts < 1:
                raise ConfigError(
                    f"--vllm-speculative-config: num_speculative_tokens {drafts!r} is not a number above 0"
                )
        check_algorithm(self)
        if self.data.eval_interval:
            from rhymemeg.evaluation import set_options

            set_options(self.data)
        from rhymemeg.observe.trace import parse_steps

        parse_steps(self.observe.trace_steps)
        if o.min_lr > o.lr:
            raise ConfigError(f"--min-lr {o.min_lr} exceeds --lr {o.lr}")
        if self.model.ref_hf_checkpoint and not a.needs_reference:
            raise ConfigError(
                "--ref-hf-checkpoint is given but --kl-loss-coef and --kl-coef are 0, so it would not be used"
            )
        if a.num_minibatches > r.rollout_batch_size:
            raise ConfigError(
                f"--num-minibatches {a.num_minibatches} exceeds --rollout-batch-size {r.rollout_batch_size}"
            )
        if a.max_tokens_per_microbatch < self.max_model_len:
            raise ConfigError(
                f"--max-tokens-per-microbatch {a.max_tokens_per_microbatch} is less than the longest sequence "
                f"(--max-prompt-len + --max-response-len = {self.max_model_len})"
            )

    def _check_histopipe(self) -> None:
        from rhymemeg.histopipe.cost import cost_model

        h = self.histopipe
        if h.histopipe_profile != "measured":
            try:
                cost_model(h.histopipe_profile)
            except ConfigError as error:
                raise ConfigError(f"--histopipe-profile: {error}") from None
        if h.histopipe_policy == "random" and h.histopipe_early:
            raise ConfigError("--histopipe-early has no effect with --histopipe-policy random: leave it out")
        if (h.histopipe_carry or h.histopipe_early) and (self.rollout.top_p < 1 or self.rollout.top_k > 0):
            raise ConfigError(
                "--histopipe-carry and --histopipe-early with --top-p or --top-k: tokens of older weights are trained "
                "against the engine's log-probabilities, which are those of the truncated distribution"
            )

    def check_model(self, arch: ModelArch) -> None:
        """Refuse what does not fit the model. The layout itself is checked by `rhymemeg.parallel.layout_checks`."""
        if self.max_model_len > arch.max_position_embeddings:
            raise ConfigError(
                f"--max-prompt-len + --max-response-len = {self.max_model_len} exceeds the model's "
                f"max_position_embeddings = {arch.max_position_embeddings}"
            )
        if arch.num_attention_heads % self.engine.vllm_tensor_parallel_size:
            raise ConfigError(
                f"--vllm-tensor-parallel-size {self.engine.vllm_tensor_parallel_size} does not divide the "
                f"{arch.num_attention_heads} attention heads"
            )
        for given, option in (
            (self.engine.vllm_enable_expert_parallel, "--vllm-enable-expert-parallel"),
            (self.moe.moe_router_replay != "none", f"--moe-router-replay {self.moe.moe_router_replay}"),
            (self.moe.moe_aux_loss_coeff > 0, "--moe-aux-loss-coeff"),
        ):
            if given and not arch.is_moe:
                raise ConfigError(f"{option}: the model has no experts")


# ------------------------------------------------------------------------------------------------------------ reflection


def section_types() -> dict[str, type[Section]]:
    """Section name -> its class, in the order of `Config`."""
    return {name: _section_class(field.annotation) for name, field in Config.model_fields.items()}


def _section_class(annotation: Any) -> type[Section]:
    kind = get_args(annotation)[0] if get_args(annotation) else annotation
    assert issubclass(kind, Section)
    return kind


def option_sections() -> dict[str, str]:
    """Option name -> name of its section. Names are unique over all sections."""
    owner: dict[str, str] = {}
    for section, kind in section_types().items():
        for option in kind.model_fields:
            assert option not in owner, f"option {option} is in {owner[option]} and {section}"
            owner[option] = section
    return owner


def did_you_mean(name: str, known: Any = None) -> str:
    """'' or ', did you mean ...?' with the nearest known name (of the options, unless `known` is given)."""
    import difflib

    candidates = list(option_sections()) if known is None else sorted(known)
    near = difflib.get_close_matches(name.lstrip("-").replace("-", "_"), candidates, n=1, cutoff=0.5)
    if not near:
        return "" if known is None else f" (known: {', '.join(candidates)})"
    shown = near[0] if known is not None or not name.startswith("--") else "--" + near[0].replace("_", "-")
    return f", did you mean {shown}?"


def first_problem(error: ValidationError) -> str:
    """One sentence about the first problem that pydantic found, with the option's command-line name."""
    problem = error.errors()[0]
    option = "--" + ".".join(str(part) for part in problem["loc"]).replace("_", "-")
    return f"{option}: {problem['msg']} (got {problem.get('input')!r})"
