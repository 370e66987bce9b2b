"""The training loop. Start it under torchrun, one process a device:

    torchrun --standalone --nproc-per-node 2 --module rhymemeg.train --config launch/configs/quickstart.yaml

Everything above `train` is checks and wiring; `train` is one step after the other, from top to bottom.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

from rhymemeg.arch import ModelArch
from rhymemeg.cli import parse
from rhymemeg.config import Config
from rhymemeg.dry_run import check_engines
from rhymemeg.dry_run import run as run_dry
from rhymemeg.errors import RhymeMegError
from rhymemeg.parallel.layout_checks import check_layout


def train(config: Config, arch: ModelArch) -> None:
    """Run all steps of `config` in this rank. Returns when done; errors go through `parallel.failure`."""
    quieten_libraries()
    from rhymemeg.observe.run import open_run
    from rhymemeg.parallel import failure

    with open_run(config, arch) as run:
        trainer, clock = run.trainer, run.clock
        for step in range(trainer.first_step, config.run.train_iters):
            failure.begin_step(step)
            metrics: dict[str, float] = {}
            with run.step(step):
                if trainer.evaluation_is_due(step):
                    with clock.phase("evaluate"):
                        metrics |= trainer.evaluate()
                with clock.phase("rollout"):
                    prompts = trainer.prompts_at(step)
                    samples = trainer.rollout(step, prompts)
                with clock.phase("reward"):
                    batch, numbers = trainer.score(step, samples, prompts)
                    metrics |= numbers | trainer.remember(step, samples)
                if config.algorithm.dynamic_sampling:
                    batch, metrics = trainer.refill(step, batch, metrics)
                metrics |= trainer.learn(step, batch)
                run.telemetry.trained(batch.summaries)
                with clock.phase("sync"):
                    metrics |= trainer.push_weights(step + 1)
                with clock.phase("log"):
                    run.write_samples(step, batch.samples)
                if trainer.checkpoint_is_due(step + 1):
                    with clock.phase("checkpoint"):
                        trainer.save(step + 1)
            run.log_step(step, metrics)
            run.stop_if_asked(step + 1)
        run.finish()


def quieten_libraries() -> None:
    """Keep remarks of the libraries that concern no user of this program off the screen: that Transformer Engine, apex
    and Triton are optional, and which of their own names are deprecated."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\..*")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


def main(argv: list[str] | None = None) -> int:
    """Parse, check, train. Returns 0 when done and 2 for options that cannot be run; an error while
    running ends the process with status 1, SIGTERM with 75 if all that was done is saved and 143 if not
    (`rhymemeg.parallel.failure`)."""
    from rhymemeg.observe.run_dir import check_output_dir
    from rhymemeg.parallel.runtime import choose_device_type

    try:
        config, dry_run = parse(sys.argv[1:] if argv is None else argv)
        config.check()
        if dry_run is not None:
            return run_dry(config, dry_run)
        arch = ModelArch.from_pretrained(config.model.hf_checkpoint)
        config.check_model(arch)
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        device_type = choose_device_type(config.run.device)
        check_layout(arch, config.parallel, world_size, device_type)
        check_engines(config, world_size, device_type)
        if os.environ.get("RANK", "0") == "0":
            check_output_dir(config.run.output_dir)
    except RhymeMegError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"rhymemeg: error: {error}", file=sys.stderr, flush=True)
        return 2
    train(config, arch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
