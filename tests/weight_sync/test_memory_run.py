"""The extra memory of a push, measured."""

import json
from pathlib import Path

import pytest

from tests.torchrun import torchrun
from tests.weight_sync.models import config

pytestmark = pytest.mark.distributed


def test_a_push_needs_two_buckets(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config("LlamaForCausalLM", num_attention_heads=8, **sizes)))
    words = ["tests/weight_sync/memory_program.py", str(tmp_path)]
    out = torchrun(2, *words, timeout=200, env={"PYTHONPATH": "."}).check()
    found = json.loads(next(line for line in out.splitlines() if line.startswith("MEMORY "))[7:])
    assert found["received"] > 4 * found["bucket"]  # without buckets, this is what would be needed
    slack = 8 << 20  # Gloo's own, allocator, sampling
    assert found["extra"] < 2 * found["bucket"] + slack, found
