"""The learning rate of each optimizer step. Pure.

Linear warm-up from lr / W to lr over the first W updates (the first update is not wasted on a rate of zero), then, with
D updates in all,

    constant   lr
    linear     min_lr + (lr - min_lr) (1 - x)
    cosine     min_lr + (lr - min_lr) (1 + cos(pi x)) / 2,        x = (k - W) / (D - W), at most 1,

for update k counted from 0. Options count training steps; a step may be several optimizer updates.
"""

from __future__ import annotations

import math

from rhymemeg.config import OptimizerOptions
from rhymemeg.errors import ConfigError


def learning_rate(options: OptimizerOptions, update: int, updates_per_step: int, train_iters: int) -> float:
    """Rate of optimizer update number `update` (from 0)."""
    warmup = options.lr_warmup_iters * updates_per_step
    if update < warmup:
        return options.lr * (update + 1) / warmup
    if options.lr_decay_style == "constant":
        return options.lr
    decay = (options.lr_decay_iters or train_iters) * updates_per_step
    x = min((update - warmup) / max(decay - warmup, 1), 1.0)
    share = 1 - x if options.lr_decay_style == "linear" else (1 + math.cos(math.pi * x)) / 2
    return options.min_lr + (options.lr - options.min_lr) * share


def check_schedule(options: OptimizerOptions, train_iters: int) -> None:
    """Refuse a warm-up that is longer than the whole decay."""
    decay = options.lr_decay_iters or train_iters
    if options.lr_decay_style != "constant" and options.lr_warmup_iters >= decay > 0:
        raise ConfigError(
            f"--lr-warmup-iters {options.lr_warmup_iters} must be less than "
            + (f"--lr-decay-iters {decay}" if options.lr_decay_iters else f"--train-iters {decay}")
        )
