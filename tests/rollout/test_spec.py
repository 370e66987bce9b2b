"""Engine specs, sampling options, stop strings and the assignment of samples: no engine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.arch import ModelArch
from rhymemeg.errors import ConfigError
from rhymemeg.rollout.samples import Sample, SampleId
from rhymemeg.rollout.spec import EngineSpec, SamplingOptions, eos_token_ids
from rhymemeg.rollout.stop import StopStrings
from rhymemeg.rollout.window import assign_samples
from tests.rollout import tiny

ARCH = ModelArch.from_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "eos_token_id": 1,
    }
)


def make_spec(**changes: object) -> EngineSpec:
    return replace(EngineSpec.from_config(tiny.config("none"), ARCH, "cpu"), **changes)


class TestSpec:
    def test_cpu_differs_from_gpu(self) -> None:
        config = tiny.config("none")
        cpu, gpu = (EngineSpec.from_config(config, ARCH, device) for device in ("cpu", "cuda"))
        assert (cpu.dtype, gpu.dtype) == ("float32", "bfloat16")
        assert cpu.enforce_eager and not gpu.enforce_eager
        assert gpu.enable_sleep_mode and not cpu.enable_sleep_mode
        assert cpu.kv_cache_memory == int(0.05 * 2**30) and gpu.kv_cache_memory is None
        assert gpu.enable_chunked_prefill and not cpu.enable_chunked_prefill

    def test_room_beyond_prompt_and_response(self) -> None:
        assert make_spec().max_model_len == 64 + 192 + 1
        assert make_spec(speculative={"num_speculative_tokens": 8}).max_model_len == 64 + 192 + 1 + 8
        assert make_spec(max_response_len=448).max_model_len == 512  # the model ends there

    def test_without_chunks_a_whole_sequence_fits_into_a_step(self) -> None:
        assert make_spec(max_num_batched_tokens=8).batched_tokens == 257
        assert make_spec(max_num_batched_tokens=4096).batched_tokens == 4096
        assert make_spec(max_num_batched_tokens=8, device_type="cuda").batched_tokens == 8

    def test_kv_bytes(self) -> None:
        # keys and values, 2 layers, 2 heads of 32, 4 bytes
        assert make_spec().kv_bytes_per_token == 2 * 2 * 2 * 32 * 4
        assert make_spec(tensor_parallel_size=2, dtype="bfloat16").kv_bytes_per_token == 2 * 2 * 1 * 32 * 2

    @pytest.mark.parametrize(
        ("changes", "world_size", "message"),
        [
            ({"tensor_parallel_size": 2}, 3, "--vllm-tensor-parallel-size 2 does not divide the world size 3"),
            ({"tensor_parallel_size": 3}, 3, "--vllm-tensor-parallel-size 3 does not divide the 4 attention heads"),
            ({"max_response_len": 449}, 1, "--max-prompt-len + --max-response-len = 513 exceeds"),
            ({"arch": replace(ARCH, head_dim=16)}, 1, "CPU attention has no heads of width 16"),
            ({"kv_cache_memory": 100 * 1024}, 1, "--vllm-kv-cache-memory-gib"),
        ],
    )
    def test_refused(self, changes: dict[str, object], world_size: int, message: str) -> None:
        make_spec().check(1)
        with pytest.raises(ConfigError) as error:
            make_spec(**changes).check(world_size)
        assert message in str(error.value)

    def test_smallest_kv_cache(self) -> None:
        """257 tokens are 9 blocks of 32; vLLM keeps one more."""
        enough = 10 * 32 * 1024
        make_spec(kv_cache_memory=enough).check(1)
        with pytest.raises(ConfigError, match="holds 319 tokens, but the longest prompt and response need 257"):
            make_spec(kv_cache_memory=enough - 1).check(1)

    def test_ends_of_sequence_of_both_files(self, tmp_path: Path) -> None:
        assert eos_token_ids(str(tmp_path), ARCH) == (1,)
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
        assert eos_token_ids(str(tmp_path), ARCH) == (1, 7)
        (tmp_path / "generation_config.json").write_text("[")
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            eos_token_ids(str(tmp_path), ARCH)

    def test_sampling_options(self) -> None:
        options = SamplingOptions.from_config(tiny.config("none").rollout, temperature=0.0)
        assert options == SamplingOptions(temperature=0.0, max_response_len=192)
        with pytest.raises(ConfigError):
            SamplingOptions(top_p=0.0)
        with pytest.raises(ConfigError, match="--stop"):
            SamplingOptions(stop=("",))

    def test_importing_the_engine_imports_neither_vllm_nor_torch(self) -> None:
        code = "import sys, rhymemeg.rollout.window; sys.exit(bool({'vllm', 'torch'} & set(sys.modules)))"
        assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


class Letters:
    """A tokenizer whose token k stands for `pieces[k]`."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(self.pieces[i] for i in ids)


class TestStopStrings:
    PIECES = ("a", "b", "ab", "ba", "abc", "c")

    @given(
        st.lists(st.integers(0, 5), max_size=12),
        st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
        st.randoms(use_true_random=False),
    )
    def test_same_as_searching_the_whole_text(self, tokens: list[int], strings: list[str], random: object) -> None:
        """However the tokens arrive, the end found is the shortest prefix whose text has a stop string."""
        tokenizer = Letters(list(self.PIECES))
        whole = [n for n in range(len(tokens) + 1) if any(s in tokenizer.decode(tokens[:n]) for s in strings)]
        stop, at, found = StopStrings(strings, tokenizer), 0, None
        while at < len(tokens) and found is None:
            arrived = min(len(tokens), at + random.randint(1, 4))  # type: ignore[attr-defined]
            found = stop.first(tokens[:arrived], at)
            at = arrived
        assert found == (whole[0] if whole else None)


def sample(prompt: int, index: int, length: int = 4) -> Sample:
    return Sample(SampleId(0, prompt, index), (0,) * length)


class TestAssign:
    @given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 5), st.data())
    def test_groups_stay_together_and_load_is_near_the_best(
        self, works: list[int], engines: int, data: st.DataObject
    ) -> None:
        work = {prompt: float(w) for prompt, w in enumerate(works)}
        samples = data.draw(st.permutations([sample(p, i) for p in work for i in range(3)]))
        queues = assign_samples(samples, engines, work)
        assert sorted(s.sample_id for q in queues for s in q) == sorted(s.sample_id for s in samples)
        homes = [{s.sample_id.prompt_id for s in q} for q in queues]
        assert sum(map(len, homes)) == len(work)
        load = [sum(4 + 3 * work[p] for p in home) for home in homes]
        costs = sorted((4 + 3 * w for w in works), reverse=True)
        best = max(costs[0], sum(costs) / engines, sum(costs[engines - 1 : engines + 1]) if len(costs) > engines else 0)
        assert max(load) <= 4 / 3 * best + 1e-9
        for queue in queues:
            per_group = [work[s.sample_id.prompt_id] for s in queue]
            assert per_group == sorted(per_group, reverse=True)

    def test_without_estimates_engines_get_equal_numbers(self) -> None:
        queues = assign_samples([sample(p, i) for p in range(8) for i in range(2)], 4)
        assert [len(q) for q in queues] == [4] * 4
