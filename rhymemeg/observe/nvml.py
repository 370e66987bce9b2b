"""What the GPU of this rank does, sampled by NVML in a background thread.

    sampler = Sampler.start(uuid, interval=0.5)        # None where there is no NVML or no such GPU
    numbers = sampler.take()                           # what was seen since the last call; {} after no sample
    sampler.stop()

    utilization       mean share of time in which a kernel ran, 0 .. 1 (not how much of the GPU it used)
    memory_used_gib   most that was in use on the device, by all processes
    power_w           mean
    energy_j          by the device's own counter, or mean power x time where it has none
    temperature_c     highest
    sm_clock_mhz      lowest
    throttled         share of samples in which the clock was held down by power or temperature

What a driver does not offer is left out. `nvidia-ml-py` is optional; nothing else of this package uses NVML while training.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

NAMES = ("utilization", "memory_used_gib", "power_w", "energy_j", "temperature_c", "sm_clock_mhz", "throttled")
# Reasons for a lower clock that slow training down: power cap, thermal slowdown in software and hardware, power brake.
THROTTLE = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


@dataclass
class Seen:
    """Samples since they were last taken."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)


class Sampler:
    """See the module. `nvml` is the module pynvml, initialised; `handle` a device of it."""

    def __init__(self, nvml: Any, handle: Any, interval: float, now: Callable[[], float] = time.monotonic) -> None:
        self.nvml, self.handle, self.interval, self._now = nvml, handle, interval, now
        self._seen, self._lock, self._end = Seen(), threading.Lock(), threading.Event()
        self._missing: set[str] = set()
        self._energy = self._read("energy", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000)
        self._since = now()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

    @classmethod
    def start(cls, uuid: str, interval: float) -> Sampler | None:
        """Sample the GPU with this UUID; None where the package, the driver or the GPU is missing."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError:
            pynvml.nvmlShutdown()
            return None
        sampler = cls(pynvml, handle, interval)
        sampler._thread.start()
        return sampler

    def _read(self, name: str, read: Callable[[], float]) -> float | None:
        """A value, or None where the device does not tell; what it did not tell once is not asked again."""
        if name in self._missing:
            return None
        try:
            return float(read())
        except self.nvml.NVMLError:
            self._missing.add(name)
            return None

    def sample(self) -> None:
        """One look at the device."""
        n, h = self.nvml, self.handle
        found = {
            "utilization": self._read("utilization", lambda: n.nvmlDeviceGetUtilizationRates(h).gpu / 100),
            "memory_used_gib": self._read("memory", lambda: n.nvmlDeviceGetMemoryInfo(h).used / (1 << 30)),
            "power_w": self._read("power", lambda: n.nvmlDeviceGetPowerUsage(h) / 1000),
            "temperature_c": self._read("temperature", lambda: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU)),
            "sm_clock_mhz": self._read("clock", lambda: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM)),
            "throttled": self._read(
                "throttled", lambda: bool(n.nvmlDeviceGetCurrentClocksThrottleReasons(h) & THROTTLE)
            ),
        }
        with self._lock:
            for name, value in found.items():
                if value is not None:
                    self._seen.add(name, value)

    def _run(self) -> None:
        while not self._end.wait(self.interval):
            self.sample()

    def take(self) -> dict[str, float]:
        """See the module."""
        with self._lock:
            seen, self._seen = self._seen.values, Seen()
        now = self._now()
        seconds, self._since = now - self._since, now
        merge: dict[str, Callable[[list[float]], float]] = {
            "memory_used_gib": max, "temperature_c": max, "sm_clock_mhz": min}  # fmt: skip
        numbers = {name: merge.get(name, _mean)(values) for name, values in seen.items()}
        energy = self._read("energy", lambda: self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1000)
        if energy is not None and self._energy is not None:
            numbers["energy_j"] = energy - self._energy
        elif "power_w" in numbers:
            numbers["energy_j"] = numbers["power_w"] * seconds
        self._energy = energy
        return numbers

    def stop(self) -> None:
        """End the thread. Safe to call twice."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        with contextlib.suppress(self.nvml.NVMLError):
            self.nvml.nvmlShutdown()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def merged(parts: list[dict[str, float]]) -> dict[str, float]:
    """`gpu/*` of all ranks: means, and the most or the least where one GPU is what matters; energy is a sum."""
    numbers: dict[str, float] = {}
    for name in NAMES:
        values = [part[name] for part in parts if name in part]
        if values:
            how = {"memory_used_gib": max, "temperature_c": max, "sm_clock_mhz": min, "energy_j": sum}.get(name, _mean)
            numbers[f"gpu/{name}"] = float(how(values))  # type: ignore[operator]
    return numbers
