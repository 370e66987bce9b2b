"""NVML sampling with and without what it needs; MFU by its formula, and none where it would be wrong."""

from __future__ import annotations

import inspect
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from rhymemeg.observe.clock import StepClock
from rhymemeg.observe.nvml import NAMES, Sampler, merged
from rhymemeg.observe.telemetry import Telemetry, peak_flops
from rhymemeg.rl.exchange import SampleSummary
from rhymemeg.rollout.samples import SampleId


class Driver:
    """What pynvml offers, with a device that can do `offers`."""

    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = 0

    class NVMLError(Exception):
        pass

    def __init__(self, offers: set[str], energies: tuple[float, ...] = (1000.0, 61_000.0)) -> None:
        self.offers, self.energies, self.calls = offers, list(energies), 0

    def _give(self, what: str, value: Any) -> Any:
        self.calls += 1
        if what not in self.offers:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> float:
        return self._give("energy", self.energies.pop(0) if len(self.energies) > 1 else self.energies[0])

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        return self._give("utilization", SimpleNamespace(gpu=50))

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return self._give("memory", SimpleNamespace(used=3 << 30))

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return self._give("power", 400_000)

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return self._give("temperature", 61)

    def nvmlDeviceGetClockInfo(self, handle: Any, clock: int) -> int:
        return self._give("clock", 1980)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return self._give("throttled", 0x4)

    def nvmlShutdown(self) -> None: ...


ALL = {"energy", "utilization", "memory", "power", "temperature", "clock", "throttled"}


def test_everything_that_a_device_offers() -> None:
    time = 0.0
    sampler = Sampler(Driver(ALL), None, 0.5, now=lambda: time)
    assert sampler.take() == {"energy_j": 60.0}
    sampler.sample()
    assert set(sampler.take()) == set(NAMES)
    sampler.sample()
    got = sampler.take()
    assert got["utilization"] == 0.5 and got["memory_used_gib"] == 3 and got["power_w"] == 400 and got["throttled"] == 1


def test_energy_without_a_counter_is_power_times_time() -> None:
    time = 0.0
    sampler = Sampler(Driver({"power"}), None, 0.5, now=lambda: time)
    sampler.sample()
    time = 3.0
    assert sampler.take() == {"power_w": 400.0, "energy_j": 1200.0}
    assert sampler.take() == {}


@pytest.mark.parametrize("missing", sorted(ALL))
def test_what_a_device_lacks_is_left_out_and_asked_once(missing: str) -> None:
    driver = Driver(ALL - {missing})
    sampler = Sampler(driver, None, 0.5, now=lambda: 0.0)
    for _ in range(3):
        sampler.sample()
    before = driver.calls
    sampler.sample()
    assert driver.calls - before == (6 if missing == "energy" else 5)
    names = {"memory": "memory_used_gib", "temperature": "temperature_c", "clock": "sm_clock_mhz", "power": "power_w"}
    assert (names.get(missing, missing) in sampler.take()) is False


def test_the_thread_samples_and_ends() -> None:
    sampler = Sampler(Driver(ALL), None, 0.001)
    sampler._thread.start()
    for _ in range(1000):
        if sampler._seen.values:
            break
        threading.Event().wait(0.01)
    sampler.stop()
    assert not sampler._thread.is_alive() and sampler.take()["utilization"] == 0.5
    sampler.stop()


def test_without_driver_or_package_there_is_no_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
        pytest.skip("this machine has NVML")
    except pynvml.NVMLError:
        assert Sampler.start("GPU-0", 0.5) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Sampler.start("GPU-0", 0.5) is None


def test_ranks_are_merged() -> None:
    a, b = {"utilization": 0.2, "energy_j": 10.0, "memory_used_gib": 3.0}, {"utilization": 0.4, "energy_j": 30.0}
    got = merged([a, b, {}])
    assert got == {"gpu/utilization": pytest.approx(0.3), "gpu/energy_j": 40.0, "gpu/memory_used_gib": 3.0}
    assert merged([{}, {}]) == {}


def test_peak_of_known_gpus_only() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    for name in (
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "Tesla T4",
        "NVIDIA A10",
        "",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ):
        assert peak_flops(name) is None


def arch() -> ModelArch:
    return ModelArch.from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 1000,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "max_position_embeddings": 512,
        }
    )


def telemetry(ranks: int = 2) -> Telemetry:
    runtime: Any = SimpleNamespace(
        device_type="cpu", rank=0, world_size=ranks, reduce_max=lambda value: value, device="cpu"
    )
    return Telemetry(Config(), arch(), runtime, StepClock())


def summary(prompt_len: int, response_len: int) -> SampleSummary:
    given: dict[str, Any] = {"sample_id": SampleId(0, 0, 0), "prompt_len": prompt_len, "response_len": response_len}
    for name, parameter in inspect.signature(SampleSummary).parameters.items():
        if parameter.default is inspect.Parameter.empty:
            given.setdefault(name, 0)
    return SampleSummary(**given)


def test_model_flops_by_hand() -> None:
    """Every matrix product of a forward pass, counted one by one."""
    a, lengths = arch(), (10, 25)
    h, d, heads, kv, inner = 64, 16, 4, 2, 96
    total = 0
    for s in lengths:
        for _ in range(a.num_layers):
            total += 2 * s * h * (heads + 2 * kv) * d + 2 * s * heads * d * h + 3 * 2 * s * h * inner
            total += sum(2 * 2 * heads * d * (position + 1) for position in range(s))  # scores, then values
        total += 2 * s * h * 1000
    t = telemetry()
    t.trained([summary(4, 6), summary(5, 20)])
    got = t.metrics({"timing_s/train": 0.5})["perf/train_tflops_per_gpu"] * 1e12 * 2 * 0.5
    # The formula takes s^2 / 2 for the causal half, the sum over positions is s (s + 1) / 2; and norms are weights to it.
    assert got == pytest.approx(3 * total, rel=0.02)


def test_no_mfu_on_a_cpu_and_none_without_a_training_phase() -> None:
    t = telemetry()
    t.trained([summary(4, 6)])
    assert set(t.metrics({"timing_s/train": 0.5})) == {"perf/train_tflops_per_gpu"}
    assert t.metrics({"timing_s/train": 0.0}) == {}
    t.trained([])
    assert t.sampler is None


def test_mfu_is_the_share_of_the_peak() -> None:
    t = telemetry(ranks=4)
    t.peak = 1e9
    t.trained([summary(4, 6)])
    got = t.metrics({"timing_s/train": 2.0})
    assert got["perf/mfu"] == pytest.approx(got["perf/train_tflops_per_gpu"] * 1e12 / 1e9)
