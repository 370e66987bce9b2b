"""TRL's GRPO on the quickstart model and task, for comparison: same weights, prompts in the same order, batch sizes,
temperature, lengths, learning rate and loss as launch/configs/quickstart.yaml, on one CPU process.

TRL is no dependency of this package. In an environment of its own:

    python -m venv trl && trl/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu
    trl/bin/pip install trl pydantic pyyaml numpy
    trl/bin/python benchmarks/trl_grpo.py --seed 1 --steps 40 --out runs/trl/seed_1

Writes metrics.jsonl and summary.json in the form of a run directory, with the held-out reward before and after, so that
tools/recipes_table.py and `rhymemeg report` read both. The step time is wall time without the evaluations.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=ROOT / "launch/configs/quickstart.yaml")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rhymemeg.config import Config
    from rhymemeg.data.prompts import batch_at, load_prompts
    from rhymemeg.data.tasks.ledger import verify

    config = Config.load_yaml(options.config)
    rollout, algorithm, data = config.rollout, config.algorithm, config.data
    model_folder = str(ROOT / config.model.hf_checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    prompts, held_out = load_prompts(data, tokenizer), load_prompts(data, tokenizer, evaluation=True)
    order = [
        i
        for step in range(options.steps)
        for i in batch_at(step, rollout.rollout_batch_size, options.seed, data.shuffle, len(prompts))
    ]
    rows = [{"prompt": prompts[i].text, "label": json.dumps(prompts[i].label)} for i in order]
    lines: list[dict[str, Any]] = []

    def reward(prompts: list[str], completions: list[str], label: list[str], **_: Any) -> list[float]:
        return [verify(text, json.loads(one))["score"] for text, one in zip(completions, label)]

    @torch.no_grad()
    def evaluate(current: Any) -> dict[str, float]:
        """Held-out reward, sampled as the configuration says, and its standard error over prompts."""
        current.eval()
        torch.manual_seed(options.seed + 1)
        means = []
        for first in range(0, len(held_out), 32):
            chunk = [held_out[i] for i in range(first, min(first + 32, len(held_out)))]
            inputs = tokenizer([p.text for p in chunk], return_tensors="pt", padding=True, padding_side="left")
            inputs.pop("token_type_ids", None)
            out = current.generate(
                **inputs, do_sample=data.eval_temperature > 0, temperature=data.eval_temperature or 1.0, top_k=0, top_p=1.0,
                max_new_tokens=rollout.max_response_len, num_return_sequences=data.eval_n_samples,
            )  # fmt: skip
            texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            n = data.eval_n_samples
            for k, prompt in enumerate(chunk):
                scores = [verify(text, prompt.label)["score"] for text in texts[k * n : (k + 1) * n]]
                means.append(sum(scores) / n)
        current.train()
        values = torch.tensor(means, dtype=torch.float64)
        return {"eval/reward": float(values.mean()), "eval/reward_se": float(values.std() / len(values) ** 0.5)}

    class Times(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            lines.append({"step": state.global_step - 1, "perf/step_time": time.perf_counter() - self.began})

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
        ) -> None:
            if lines and logs and "reward" in logs:
                lines[-1] |= {"reward/mean": float(logs["reward"])}
                lines[-1] |= {"rollout/response_len_mean": float(logs.get("completions/mean_length", 0.0))}

    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    arguments = GRPOConfig(
        output_dir=str(options.out / "trl"), use_cpu=True, bf16=False, seed=options.seed, report_to=[], save_strategy="no",
        max_steps=options.steps, logging_steps=1, per_device_train_batch_size=samples, gradient_accumulation_steps=1,
        num_generations=rollout.n_samples_per_prompt, max_completion_length=rollout.max_response_len,
        temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, beta=algorithm.kl_loss_coef,
        epsilon=algorithm.eps_clip, epsilon_high=algorithm.eps_clip_high or algorithm.eps_clip, loss_type="dapo",
        scale_rewards="group", num_iterations=1, max_grad_norm=config.optimizer.clip_grad, shuffle_dataset=False,
        disable_dropout=True, gradient_checkpointing=False,
    )  # fmt: skip
    o = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), o.lr, (o.adam_beta1, o.adam_beta2), o.adam_eps, weight_decay=o.weight_decay
    )
    # The first step is at 1 / warm-up steps, as ours; schedules of transformers begin at 0.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / max(o.lr_warmup_iters, 1)))
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=arguments, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, callbacks=[Times()], optimizers=(optimizer, schedule),
    )  # fmt: skip
    first = evaluate(trainer.model) | {"step": 0}
    print(f"before: {first}", flush=True)
    trainer.train()
    last = evaluate(trainer.model) | {"step": options.steps}
    print(f"after: {last}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    lines[0] |= first
    (options.out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, last]))
    summary = {"status": "completed", "steps": len(lines), "eval_first": first, "eval_last": last}
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
