"""Actor and engine on one device: in which order memory changes hands around an update, and what the peak is. Pure.

Training needs the actor's parameters, gradients, optimizer state and activations; a rollout needs the engine's weights
and its KV cache; an update needs both sets of weights and the buckets in flight. The order that keeps the peak lowest:

    train           engine asleep (level 1 keeps its weights on the host; level 2 drops them, since the update brings them)
    offload         gradients freed, optimizer state to the host
    wake weights    the engine's weights get their memory back
    sync            two buckets, and the layer that the engine's loader holds until it is complete
    release actor   parameters to the host, unless they stay
    wake KV cache   rollout
    sleep           the engine's memory is free again; parameters, optimizer state and gradients come back

`phases` lists them with the bytes on the device in each; `peak` is the largest.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Bytes of one rank. `parameters`, `gradients`, `optimizer`: of the actor and of a critic; `activations`: of one of
    them, as they never meet; `layer`: the largest layer of the engine's weights; `bucket`: --update-weight-buffer-size."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    engine_weights: int
    kv_cache: int
    layer: int
    bucket: int


@dataclass(frozen=True)
class Residency:
    """What stays on the device while it is not in use."""

    engine_while_training: bool = False
    optimizer_in_rollout: bool = False
    gradients_in_rollout: bool = False
    parameters_in_rollout: bool = True


@dataclass(frozen=True)
class Phase:
    name: str
    parts: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


def phases(sizes: Sizes, stays: Residency) -> list[Phase]:
    """What is on the device in each phase, in order."""
    actor = {"parameters": sizes.parameters}
    state = {
        name: size
        for name, size, kept in (
            ("gradients", sizes.gradients, stays.gradients_in_rollout),
            ("optimizer state", sizes.optimizer, stays.optimizer_in_rollout),
        )
        if kept
    }
    engine = {"engine weights": sizes.engine_weights}
    cache = {"KV cache": sizes.kv_cache}
    resident = {**engine, **cache} if stays.engine_while_training else {}
    training = {
        **actor,
        "gradients": sizes.gradients,
        "optimizer state": sizes.optimizer,
        "activations": sizes.activations,
        **resident,
    }
    moving = {"buckets": 2 * sizes.bucket, "layer being loaded": sizes.layer}
    asleep = cache if stays.engine_while_training else {}
    return [
        Phase("train", training),
        Phase("offload", {**actor, **state, **resident}),
        Phase("wake weights", {**actor, **state, **engine, **asleep}),
        Phase("sync", {**actor, **state, **engine, **asleep, **moving}),
        Phase("rollout", {**(actor if stays.parameters_in_rollout else {}), **state, **engine, **cache}),
    ]


def peak(sizes: Sizes, stays: Residency) -> Phase:
    """The phase that needs the most."""
    return max(phases(sizes, stays), key=lambda phase: phase.bytes)
