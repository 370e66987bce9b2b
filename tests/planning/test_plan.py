"""The plan as a whole: consistent, monotone, and useful advice. Pure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymemeg.errors import ConfigError
from rhymemeg.histopipe.cost import ENGINE_STEPS, CostModel
from rhymemeg.parallel.layout_checks import describe_layout
from rhymemeg.planning.activations import in_flight
from rhymemeg.planning.compute import drain_seconds, sequence_flops
from rhymemeg.planning.hardware import GPUS, gpu_type
from rhymemeg.planning.memory import kv_bytes_per_token
from rhymemeg.planning.plan import Plan, make_plan, show_bytes
from rhymemeg.planning.shards import actor_shards, engine_shard, largest_engine_layer
from rhymemeg.planning.workload import expected_workload
from rhymemeg.rollout.spec import EngineSpec
from rhymemeg.weight_sync.layouts import hf_tensors
from tests.planning.models import NAMES, arch, config

H100 = GPUS["h100"]


def plan(name: str = "Qwen3-8B", world: int = 8, **changes: Any) -> Plan:
    return make_plan(config(**changes), arch(name), world, "cuda", H100)


@pytest.mark.parametrize("name", NAMES)
def test_shards_add_up_to_the_model(name: str) -> None:
    """TP 2, PP 2, EP 4: what all shards hold, copies counted once, is the model."""
    a = arch(name)
    moe = {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1} if a.is_moe else {}
    uneven = {"decoder_first_pipeline_num_layers": 30} if name == "DeepSeek-V3" else {}
    c = config(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True, **moe, **uneven)
    layout = describe_layout(a, c.parallel, 16)
    held = 0
    for shard in actor_shards(a, layout, a.vocab_size):
        held += 2 * shard.dense + layout.ep * shard.expert
    # Norms, routers and MLA's down-projections are on both TP ranks.
    replicated = sum(
        _size(shape)
        for tensor, shape in hf_tensors(a).items()
        if any(x in tensor for x in ("norm", "gate.weight", "_a_proj"))
    )
    biases = sum(_size(shape) for tensor, shape in hf_tensors(a).items() if tensor.endswith("e_score_correction_bias"))
    assert held - replicated + biases == a.num_parameters()


def _size(shape: tuple[int, ...]) -> int:
    import math

    return math.prod(shape)


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_of_one_rank_holds_the_model(name: str) -> None:
    a = arch(name)
    assert engine_shard(a, 1, False) == a.num_parameters()
    assert engine_shard(a, 1, True) == a.num_parameters()
    assert a.num_parameters() / 8 < engine_shard(a, 8, False) < 1.1 * a.num_parameters() / 8
    assert largest_engine_layer(a, 1, False) < a.num_parameters() / 10


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("Qwen3")])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_keys_and_values_are_those_of_the_engine(name: str, tp: int) -> None:
    c, a = config(vllm_tensor_parallel_size=tp), arch(name)
    if a.num_key_value_heads % tp and tp % a.num_key_value_heads:
        return
    spec = EngineSpec.from_config(c, a, "cuda")
    assert kv_bytes_per_token(a, tp, 2) == spec.kv_bytes_per_token


@pytest.mark.parametrize("stage", range(4))
def test_micro_batches_under_way(stage: int) -> None:
    """1F1B: stage p of P holds P - p. One virtual stage more: as many chunks of half the size, and some more."""
    a, c = arch("Qwen3-8B"), config(pipeline_model_parallel_size=4)
    plain = describe_layout(a, c.parallel, 4)
    assert in_flight(plain, stage, 100) == 4 - stage and in_flight(plain, stage, 2) == min(4 - stage, 2)
    c.parallel.num_layers_per_virtual_pipeline_stage = 3
    interleaved = describe_layout(a, c.parallel, 4)
    assert interleaved.vpp == 3
    assert in_flight(interleaved, stage, 100) == (2 * (4 - stage - 1) + 2 * 4 + 1) / 3


def test_each_option_saves_what_it_should() -> None:
    base = plan(tensor_model_parallel_size=2).memory
    assert plan(tensor_model_parallel_size=4).memory.sizes.parameters < 0.52 * base.sizes.parameters
    recomputed = plan(tensor_model_parallel_size=2, recompute_activations=True).memory
    assert recomputed.sizes.activations < 0.3 * base.sizes.activations
    split = plan(tensor_model_parallel_size=2, sequence_parallel=True).memory
    assert split.sizes.activations < base.sizes.activations
    # The replicated optimizer has DP = 4 times the state.
    replicated = plan(tensor_model_parallel_size=2, use_distributed_optimizer=False).memory
    assert replicated.sizes.optimizer == pytest.approx(4 * base.sizes.optimizer, rel=1e-6)
    away = plan(tensor_model_parallel_size=2, offload_optimizer=True, offload_gradients=True).memory
    by_name = {phase.name: phase.parts for phase in away.phases}
    assert "optimizer state" not in by_name["rollout"] and "gradients" not in by_name["rollout"]
    assert away.host["optimizer state, away"] == base.sizes.optimizer
    awake = plan(tensor_model_parallel_size=2, vllm_enable_sleep_mode=False).memory
    assert "KV cache" in {phase.name: phase.parts for phase in awake.phases}["train"]


def test_what_does_not_fit_is_said_and_helped() -> None:
    found = plan("Qwen3-32B", 16, tensor_model_parallel_size=4, vllm_tensor_parallel_size=2)
    assert not found.fits and found.advice is not None and found.advice.fits
    assert any("too much" in problem for problem in found.problems)
    page = "\n".join(found.lines())
    assert "<- too much" in page and "fits with " + " ".join(found.advice.options) in page
    # The advice, taken, is enough.
    words = " ".join(found.advice.options).split()
    changes: dict[str, Any] = {"tensor_model_parallel_size": 4, "vllm_tensor_parallel_size": 2}
    for i, word in enumerate(words):
        if word.startswith("--"):
            value = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else "true"
            changes[word[2:].replace("-", "_")] = json.loads(value)
    assert plan("Qwen3-32B", 16, **changes).fits


def test_a_model_that_no_layout_helps() -> None:
    found = plan("DeepSeek-V3", 8, tensor_model_parallel_size=8, sequence_parallel=True, vllm_tensor_parallel_size=8)
    assert not found.fits and (found.advice is None or not found.advice.fits)
    assert "no memory is left for the KV cache" in "\n".join(found.problems)


def test_floors_are_below_expectations() -> None:
    found = plan(tensor_model_parallel_size=2, ppo_epochs=2, kl_loss_coef=0.1)
    assert list(found.phases) == ["rollout", "forward passes", "train", "sync"]
    assert all(0 <= floor <= expected for floor, expected in found.phases.values())
    assert found.training is not None
    # Two passes of forward and backward; once each for the old and for the reference's log-probabilities.
    assert found.training.train_flops == pytest.approx(3 * found.training.log_prob_flops)
    assert found.training.train_flops == pytest.approx(6 * sequence_flops(arch("Qwen3-8B"), found.work.lengths))


def test_a_critic_is_a_second_model() -> None:
    plain = plan(tensor_model_parallel_size=2)
    found = plan(tensor_model_parallel_size=2, advantage_estimator="gae")
    mine, theirs = found.memory.sizes, plain.memory.sizes
    assert (mine.parameters, mine.gradients) == (2 * theirs.parameters, 2 * theirs.gradients)
    assert mine.optimizer == 2 * theirs.optimizer and mine.activations == theirs.activations
    assert found.training is not None and plain.training is not None
    assert found.training.train_flops == 2 * plain.training.train_flops
    assert found.training.log_prob_flops == found.training.train_flops / 6


def test_more_gpus_are_faster_and_move_the_bound() -> None:
    few = plan(world=8, tensor_model_parallel_size=2, rollout_batch_size=256)
    many = plan(world=64, tensor_model_parallel_size=2, rollout_batch_size=256)
    assert few.rollout is not None and many.rollout is not None
    assert many.step_seconds[1] < few.step_seconds[1]
    assert few.rollout.even > few.rollout.longest and many.rollout.longest == few.rollout.longest
    assert many.rollout.idle > few.rollout.idle


def test_the_plan_is_plain_data() -> None:
    found = plan()
    again = json.loads(json.dumps(found.as_dict()))
    assert again["fits"] == found.fits
    assert again["step_seconds"]["expected"] == pytest.approx(found.step_seconds[1])


def test_unknown_gpu() -> None:
    with pytest.raises(ConfigError, match=r"--gpu-type: 'h101' is not known \(known: a100-40g, "):
        gpu_type("h101")
    assert gpu_type("H100") is H100


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 8))
def test_an_engine_drains_its_queue(lengths: list[int], slots: int) -> None:
    """Against a loop over steps: a step costs one, whatever runs in it; and with a price for each request."""
    import numpy as np

    priced = CostModel("priced", (1.0, 9.0), (1.0,), ((1.0,), (17.0,)))
    for cost in (ENGINE_STEPS, priced):
        queue, seconds = list(lengths), 0.0
        running: list[int] = []
        while queue or running:
            while queue and len(running) < slots:
                running.append(queue.pop(0))
            seconds += float(cost.step_seconds(len(running)))
            running = [n - 1 for n in running if n > 1]
        assert drain_seconds(np.array(lengths, np.int64), slots, cost) == pytest.approx(seconds)


@pytest.mark.parametrize("mean", [0, 500, 4000])
def test_lengths_have_the_expected_mean(mean: int) -> None:
    c = config(rollout_batch_size=256, n_samples_per_prompt=8)
    work = expected_workload(c, mean)
    assert work.mean_response == pytest.approx(mean or 0.3 * 8192, rel=0.02)
    assert work.responses.max() <= 8192 and work.responses.min() >= 1
    assert (work.responses == expected_workload(c, mean).responses).all()
    with pytest.raises(ConfigError, match="--mean-response-len 9000 exceeds"):
        expected_workload(c, 9000)


def test_sizes_for_people() -> None:
    assert [show_bytes(n) for n in (0, 1023, 1536, 3 << 30, 20 << 40)] == [
        *("0.0 B", "1023.0 B", "1.5 KiB", "3.0 GiB", "20.0 TiB"),
    ]


def test_models_of_the_repository_are_described_by_config_alone() -> None:
    assert len(NAMES) == 6
    for name in NAMES:
        folder = Path("launch/models") / name
        assert [p.name for p in folder.iterdir()] == ["config.json"]
