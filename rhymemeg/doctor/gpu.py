"""GPUs as NVML sees them: facts, then findings.

Every query may be missing on some GPU or driver; a fact that could not be had is None, and is listed once as not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rhymemeg.doctor.finding import Finding, Level

HOT = 85
"""Degrees Celsius above which a GPU that does nothing yet is suspicious."""
LOST_CLOCK = 0.9
"""A GPU whose limit lies below this share of its largest clock is throttled by someone's setting."""
MIB = 1 << 20
DRIVER_OF_CUDA = {"12": 525, "13": 580}
"""Oldest driver branch that runs a CUDA release (NVIDIA's CUDA compatibility table)."""


def gather() -> dict[str, Any]:
    """`{"error": reason}` where there is no NVML, else driver, devices and the links between them."""
    try:
        import pynvml as nv
    except ImportError:
        return {"error": "the package nvidia-ml-py is not installed"}
    try:
        nv.nvmlInit()
    except nv.NVMLError as error:
        return {"error": f"no NVIDIA driver answers ({error})"}
    try:
        handles = [nv.nvmlDeviceGetHandleByIndex(i) for i in range(nv.nvmlDeviceGetCount())]
        return {
            "driver": _text(nv.nvmlSystemGetDriverVersion()),
            "cuda": _ask(nv.nvmlSystemGetCudaDriverVersion),
            "devices": [_device(nv, handle) for handle in handles],
            "links": [[_level(nv, a, b) if a is not b else 0 for b in handles] for a in handles],
        }
    finally:
        nv.nvmlShutdown()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _ask(query: Callable[..., Any], *words: Any) -> Any:
    """The answer, or None where GPU or driver has none."""
    try:
        return query(*words)
    except Exception:  # NVMLError, or a function that this binding lacks
        return None


def _device(nv: Any, h: Any) -> dict[str, Any]:
    memory, utilisation = _ask(nv.nvmlDeviceGetMemoryInfo, h), _ask(nv.nvmlDeviceGetUtilizationRates, h)
    ecc = _ask(nv.nvmlDeviceGetEccMode, h)
    remapped = _ask(nv.nvmlDeviceGetRemappedRows, h)
    mig = _ask(nv.nvmlDeviceGetMigMode, h)
    processes = _ask(nv.nvmlDeviceGetComputeRunningProcesses, h)
    links = [_ask(nv.nvmlDeviceGetNvLinkState, h, i) for i in range(getattr(nv, "NVML_NVLINK_MAX_LINKS", 18))]
    known = [state for state in links if state is not None]
    return {
        "name": _text(_ask(nv.nvmlDeviceGetName, h)),
        "uuid": _text(_ask(nv.nvmlDeviceGetUUID, h)),
        "memory": None if memory is None else int(memory.total),
        "memory_used": None if memory is None else int(memory.used),
        "busy": None if utilisation is None else int(utilisation.gpu),
        "processes": None if processes is None else [int(p.pid) for p in processes],
        "ecc": None if ecc is None else bool(ecc[0]),
        "ecc_uncorrected": _ask(
            nv.nvmlDeviceGetTotalEccErrors, h, nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nv.NVML_VOLATILE_ECC
        ),
        "remap_pending": None if remapped is None else bool(remapped[2]),
        "remap_failed": None if remapped is None else bool(remapped[3]),
        "mig": None if mig is None else bool(mig[0]),
        "temperature": _ask(nv.nvmlDeviceGetTemperature, h, nv.NVML_TEMPERATURE_GPU),
        "clock_max": _ask(nv.nvmlDeviceGetMaxClockInfo, h, nv.NVML_CLOCK_SM),
        "clock_limit": _ask(nv.nvmlDeviceGetMaxCustomerBoostClock, h, nv.NVML_CLOCK_SM),
        "throttled": _ask(nv.nvmlDeviceGetCurrentClocksThrottleReasons, h),
        "persistence": _ask(nv.nvmlDeviceGetPersistenceMode, h),
        "pcie": _ask(nv.nvmlDeviceGetCurrPcieLinkWidth, h),
        "pcie_max": _ask(nv.nvmlDeviceGetMaxPcieLinkWidth, h),
        "nvlinks": sum(map(bool, known)) if known else None,
        "nvlinks_down": sum(not state for state in known) if known else None,
    }


def _level(nv: Any, a: Any, b: Any) -> int | None:
    """NVML's topology level: 0 the same board, 10 .. 40 bridges and sockets, 50 across the system."""
    return _ask(nv.nvmlDeviceGetTopologyCommonAncestor, a, b)


# Bits of NVML's throttle reasons that mean trouble: hardware slowdown, its thermal and power-brake forms, software thermal.
_SLOWDOWN = 0x8 | 0x20 | 0x40 | 0x80


def judge(facts: dict[str, Any], torch_cuda: str | None) -> list[Finding]:
    """Findings about the GPUs, given the CUDA release that torch was built for (None: a CPU build)."""
    if "error" in facts:
        if torch_cuda is None:
            text = f"{facts['error']}: GPU, driver, clocks, ECC, topology. This is a CPU build, which needs none"
            return [Finding(Level.UNKNOWN, "gpu", text)]
        return [Finding(Level.ERROR, "gpu", f"torch is built for CUDA {torch_cuda}, but {facts['error']}")]
    found: list[Finding] = []
    devices = facts["devices"]
    if torch_cuda is None:
        text = (
            f"{len(devices)} x {devices[0]['name'] if devices else 'none'}, but torch is a CPU build: they stay unused"
        )
        found.append(Finding(Level.WARNING, "gpu", text))
    elif not devices:
        found.append(Finding(Level.ERROR, "gpu", "the driver lists no GPU"))
    else:
        oldest = DRIVER_OF_CUDA.get(torch_cuda.partition(".")[0])
        if oldest and int(facts["driver"].partition(".")[0]) < oldest:
            text = f"driver {facts['driver']} is too old for CUDA {torch_cuda}, which needs {oldest} or later"
            found.append(Finding(Level.ERROR, "gpu", text))
    for number, device in enumerate(devices):
        found += _judge_device(f"gpu {number}", device)
    names = sorted({d["name"] for d in devices})
    if len(names) > 1:
        found.append(
            Finding(Level.WARNING, "gpu", f"different GPUs in one node ({', '.join(names)}): the slowest decides")
        )
    counts = {d["nvlinks"] for d in devices}
    if len(counts) > 1:
        text = f"GPUs have different numbers of active NVLinks ({', '.join(map(str, sorted(counts, key=str)))})"
        found.append(Finding(Level.ERROR, "topology", text))
    if len(devices) > 1:
        found += _judge_topology(facts, counts)
    missing = sorted({key for d in devices for key, value in d.items() if value is None})
    if missing:
        found.append(Finding(Level.UNKNOWN, "gpu", f"the driver does not tell: {', '.join(missing)}"))
    if devices and not any(f.level >= Level.WARNING for f in found):
        d = devices[0]
        memory = "" if d["memory"] is None else f", {d['memory'] // MIB} MiB"
        found.append(Finding(Level.OK, "gpu", f"{len(devices)} x {d['name']}{memory}, driver {facts['driver']}"))
    return found


def _judge_device(name: str, d: dict[str, Any]) -> list[Finding]:
    found: list[Finding] = []

    def say(condition: Any, level: Level, text: str) -> None:
        if condition:
            found.append(Finding(level, name, text))

    say(d["ecc"] is False, Level.WARNING, "ECC is off: a flipped bit would go unnoticed (nvidia-smi -e 1, then reboot)")
    say(d["ecc_uncorrected"], Level.ERROR, f"{d['ecc_uncorrected']} uncorrected ECC errors since boot: replace it")
    say(d["remap_failed"], Level.ERROR, "a memory row could not be remapped: replace it")
    say(d["remap_pending"], Level.WARNING, "a memory row waits to be remapped: reset the GPU before the run")
    say(d["mig"], Level.ERROR, "MIG is on: a rank would get a part of a GPU")
    say(d["processes"], Level.ERROR, f"other processes use it: {', '.join(map(str, d['processes'] or ()))}")
    idle_memory = d["memory"] and not d["processes"] and d["memory_used"] > max(0.02 * d["memory"], 1024 * MIB)
    say(idle_memory, Level.WARNING, f"{(d['memory_used'] or 0) // MIB} MiB are taken although no process shows")
    say((d["temperature"] or 0) > HOT, Level.WARNING, f"{d['temperature']} °C before any work")
    say(
        (d["throttled"] or 0) & _SLOWDOWN,
        Level.ERROR,
        f"slowed down by hardware or heat (reasons {d['throttled'] or 0:#x})",
    )
    if d["clock_max"] and d["clock_limit"]:
        text = f"SM clock is limited to {d['clock_limit']} of {d['clock_max']} MHz"
        say(d["clock_limit"] < LOST_CLOCK * d["clock_max"], Level.WARNING, text)
    say(d["persistence"] == 0, Level.WARNING, "persistence mode is off: every start takes seconds (nvidia-smi -pm 1)")
    if d["pcie"] and d["pcie_max"]:
        text = f"PCIe link runs with {d['pcie']} of {d['pcie_max']} lanes"
        say(d["pcie"] < d["pcie_max"], Level.WARNING, text)
    say(d["nvlinks"] and d["nvlinks_down"], Level.ERROR, f"{d['nvlinks_down']} NVLinks are down")
    return found


def _judge_topology(facts: dict[str, Any], counts: set[Any]) -> list[Finding]:
    number = len(facts["devices"])
    if counts != {None} and counts != {0}:
        return [Finding(Level.OK, "topology", f"{number} GPUs, {max(c or 0 for c in counts)} NVLinks each")]
    levels = [x for row in facts["links"] for x in row if x is not None]
    if not levels:
        return [Finding(Level.UNKNOWN, "topology", "neither NVLink nor PCIe topology is told")]
    far = "across CPU sockets" if max(levels) >= 50 else "over PCIe"
    text = f"{number} GPUs without NVLink, talking {far}: keep tensor parallelism small"
    return [Finding(Level.WARNING, "topology", text)]
