"""The accounting of memory around an update."""

from hypothesis import given
from hypothesis import strategies as st

from rhymemeg.weight_sync.colocation import Residency, Sizes, peak, phases

SIZES = Sizes(
    parameters=10, gradients=20, optimizer=60, activations=15, engine_weights=12, kv_cache=50, layer=1, bucket=2
)
sizes = st.builds(Sizes, *[st.integers(0, 1000)] * 8)
residencies = st.builds(Residency, *[st.booleans()] * 4)


def test_each_phase_holds_what_it_needs() -> None:
    found = {phase.name: phase.bytes for phase in phases(SIZES, Residency())}
    assert found == {"train": 105, "offload": 10, "wake weights": 22, "sync": 27, "rollout": 72}
    assert peak(SIZES, Residency()).name == "train"


def test_the_order_of_a_step() -> None:
    """Nothing of the engine wakes before the actor has let go; the cache wakes last."""
    sequence = phases(SIZES, Residency())
    assert [phase.name for phase in sequence] == ["train", "offload", "wake weights", "sync", "rollout"]
    assert [sorted(phase.parts) for phase in sequence] == [
        ["activations", "gradients", "optimizer state", "parameters"],
        ["parameters"],
        ["engine weights", "parameters"],
        ["buckets", "engine weights", "layer being loaded", "parameters"],
        ["KV cache", "engine weights", "parameters"],
    ]


def test_everything_resident() -> None:
    stays = Residency(True, True, True, True)
    found = {phase.name: phase.bytes for phase in phases(SIZES, stays)}
    assert found == {"train": 167, "offload": 152, "wake weights": 152, "sync": 157, "rollout": 152}


@given(sizes, residencies)
def test_the_kv_cache_wakes_after_the_update(s: Sizes, stays: Residency) -> None:
    """An update never coincides with a cache that could be asleep, nor rollout with state that could be away."""
    by_name = {phase.name: phase.parts for phase in phases(s, stays)}
    assert ("KV cache" in by_name["sync"]) == stays.engine_while_training
    assert ("optimizer state" in by_name["rollout"]) == stays.optimizer_in_rollout
    assert all("buckets" not in parts for name, parts in by_name.items() if name != "sync")


@given(sizes, residencies)
def test_keeping_less_never_raises_the_peak(s: Sizes, stays: Residency) -> None:
    assert peak(s, Residency(False, False, False, False)).bytes <= peak(s, stays).bytes
