"""One of two ranks that torchrun restarts: torchrun --max-restarts 1 restart_worker.py. In the first attempt, rank 1 kills
itself; the second must find each other, and nothing that the first has said."""

from __future__ import annotations

import os
import signal
import time

from rhymemeg.config import Config
from rhymemeg.parallel import failure
from rhymemeg.parallel.runtime import init_runtime, shutdown


def main() -> None:
    config = Config.from_tree({"tensor_model_parallel_size": 2, "distributed_timeout_minutes": 2}, where="test")
    runtime = init_runtime(config.run, config.parallel, seed=1)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    with failure.guard(runtime):
        failure.phase(f"attempt {attempt}")
        runtime.barrier("start")
        if attempt == "0" and runtime.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        runtime.barrier("end")
        time.sleep(1.5)  # long enough to notice a message of the first attempt
        print(f"rank {runtime.rank} ends attempt {attempt}", flush=True)
    shutdown()


if __name__ == "__main__":
    main()
