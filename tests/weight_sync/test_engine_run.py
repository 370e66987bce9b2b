"""Three pushes with changing weights into vLLM: log-probabilities as those of a fresh engine on an export. Planted faults."""

import json
from pathlib import Path
from typing import Any

import pytest

from rhymemeg.weight_sync.verify import ROTATION
from tests.torchrun import torchrun
from tests.weight_sync.models import write_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.distributed]

TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
ENGINE2: dict[str, Any] = {"vllm_tensor_parallel_size": 2}
# One launch each. Experts first: vLLM makes their group only if the process's first engine has some.
CASES: list[list[list[Any]]] = [
    [["moe", EP2, {}], ["dense", TP2, {}]],
    [["moe", EP2, ENGINE2], ["dense", PP2, ENGINE2]],
]
# vLLM's attention on CPU wants a head dimension of at least 32.
SIZES: dict[str, Any] = {"head_dim": 32, "hidden_size": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for version in range(3):
        write_checkpoint(folder / f"dense-{version}", "Qwen3ForCausalLM", version, tie_word_embeddings=True, **SIZES)
        write_checkpoint(folder / f"moe-{version}", "Qwen3MoeForCausalLM", version, mlp_only_layers=[1], **SIZES)
    return folder


@pytest.mark.parametrize("cases", CASES, ids=["tp1", "tp2"])
def test_engines_serve_the_actors_weights(folder: Path, cases: list[list[Any]]) -> None:
    words = ["tests/weight_sync/engine_program.py", json.dumps(cases), str(folder)]
    out = torchrun(2, *words, timeout=400, env={"PYTHONPATH": "."}).check()
    outcomes = [json.loads(line[5:]) for line in out.splitlines() if line.startswith("CASE ")]
    assert [o["case"] for o in outcomes] == cases
    for outcome in outcomes:
        assert outcome["worst"] < 1e-5, outcome
        assert outcome["moved"] > 0.1, outcome  # the versions do differ
        assert outcome["metrics"]["sync/tensors_verified"] == outcome["metrics"]["sync/tensors"]
        faults = ["gate and up swapped", "stale tensor", "NaN", "missing name", "rows off by one"]
        faults += ["expert index"] if outcome["case"][0] == "moe" else []
        assert outcome["faults_found"] == [*faults, "padded row"]
        assert outcome["pushes_until_found"] <= ROTATION
