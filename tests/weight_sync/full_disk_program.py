"""One process: exports to a disk that fills up, as far as that can be had without being root (no file may grow beyond a
limit, which fails a write in the middle). Prints a JSON line a case; see test_full_disk.py.

    full_disk_program.py SOURCE_FOLDER SCRATCH_FOLDER
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path

import torch

from rhymemeg.arch import ModelArch
from rhymemeg.config import ModelOptions, ParallelOptions, RunOptions
from rhymemeg.errors import CheckpointError
from rhymemeg.parallel.model import build_model
from rhymemeg.parallel.runtime import init_runtime, shutdown
from rhymemeg.weight_sync.hf_io import export_hf, load_hf_checkpoint

FILE_BYTES = 60_000


def contents(folder: Path) -> dict[str, int]:
    """Every file below `folder` with a hash of its bytes."""
    return {str(p.relative_to(folder)): hash(p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


def main() -> None:
    source, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    parallel = ParallelOptions()
    runtime = init_runtime(RunOptions(device="cpu", distributed_timeout_minutes=1), parallel, seed=1)
    arch = ModelArch.from_pretrained(source)
    chunks = build_model(arch, ModelOptions(), parallel, runtime)
    load_hf_checkpoint(chunks, arch, source, runtime)
    target = scratch / "out" / "hf"
    export_hf(chunks, arch, runtime, target, source, max_file_bytes=FILE_BYTES)
    files = sorted(p.stat().st_size for p in target.glob("*.safetensors"))
    before = contents(scratch)
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.add_(1.0)  # an export that got through would show
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # write then fails with EFBIG
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Not even the configuration fits; the smallest weight file does not; the smallest does and the largest does not.
    for name, limit in (("config", 100), ("first", files[0] // 2), ("largest", files[-1] - 1000)):
        for place in (target, scratch / "new" / "hf"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            message = ""
            try:
                export_hf(chunks, arch, runtime, place, source, max_file_bytes=FILE_BYTES)
            except CheckpointError as error:
                message = str(error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            case = {"limit": name, "older": place == target, "message": message, "same": contents(scratch) == before}
            print("CASE " + json.dumps(case), flush=True)
    # With room again, the same call works and the new weights are there.
    export_hf(chunks, arch, runtime, target, source, max_file_bytes=FILE_BYTES)
    print("CASE " + json.dumps({"limit": "none", "files": len(files), "same": contents(scratch) == before}), flush=True)
    shutdown()


if __name__ == "__main__":
    main()
