"""The CPU backend reaches Megatron's modules and nothing else. In a process of its own: installing cannot be undone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.parallel.launch import environment

SCRIPT = """
import sys
import torch
import torch._dynamo  # exchanges torch.manual_seed for its own
import torch.distributed as dist
from torch.overrides import _get_current_function_mode_stack

from rhymemeg.parallel import cpu_backend

before = {module: dict(vars(module)) for module in (torch, torch.cuda, dist, torch.nn.functional)}
tensor_before = {name: getattr(torch.Tensor, name) for name in dir(torch.Tensor)}
with cpu_backend.megatron_calls():  # not installed: nothing to do
    assert torch.ones(1).type() == "torch.FloatTensor"
cpu_backend.install()
cpu_backend.install()

for module, names in before.items():
    changed = [name for name, value in names.items() if vars(module).get(name) is not value]
    assert not changed, f"{module.__name__}: {changed}"
assert {name: getattr(torch.Tensor, name) for name in dir(torch.Tensor)} == tensor_before
assert not _get_current_function_mode_stack()
try:
    torch.zeros(1, device="cuda")
    raise SystemExit("torch itself accepts a CUDA device")
except (RuntimeError, AssertionError):
    pass

import megatron.core.optimizer.optimizer as user
assert user.torch is not torch and user.torch.Tensor is torch.Tensor and user.torch.float32 is torch.float32
assert user.torch.zeros(2, device="cuda").device.type == "cpu"
assert user.torch.tensor([1.0], device=user.torch.cuda.current_device()).device.type == "cpu"
assert user.torch.cuda.is_available() is torch.cuda.is_available()
user.torch.cuda.synchronize()

x = torch.ones(1)
with cpu_backend.megatron_calls():
    with cpu_backend.megatron_calls():
        assert x.type() == "torch.cuda.FloatTensor" and x.cuda() is x
    assert x.type() == "torch.cuda.FloatTensor" and x.type(torch.float64).dtype == torch.float64
assert x.type() == "torch.FloatTensor" and "type" not in vars(torch.Tensor) and "cuda" not in vars(torch.Tensor)
try:
    with cpu_backend.megatron_calls():
        raise ValueError
except ValueError:
    pass
assert x.type() == "torch.FloatTensor"
"""


@pytest.mark.distributed  # imports Megatron, which takes as long as a start
def test_only_megatron_is_changed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, env=environment()
    )
    assert done.returncode == 0, done.stderr[-3000:]
