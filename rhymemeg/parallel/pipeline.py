"""Messages between pipeline stages.

Megatron exchanges the shapes of micro-batches before their contents. With two pipeline ranks and virtual stages the
previous and the next rank are the same one, and its exchange of shapes (one batch of sends and receives between the
same two ranks, told apart by nothing) then swaps forward and backward. `PairwiseCommunicator` sends the shapes the
way Megatron sends the contents when they are not batched, which keeps the two directions apart.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, _p2p_ops
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rhymemeg.parallel.cpu_backend import current_device


class PairwiseCommunicator(P2PCommunicator):
    """See the module."""

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        def shape_of(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else torch.tensor(tensor.shape, dtype=torch.int64, device=tensor.device)

        def room(wanted: bool) -> Tensor | None:
            return torch.empty(3, dtype=torch.int64, device=current_device()) if wanted else None

        from_prev, from_next = room(recv_prev), room(recv_next)
        requests = _p2p_ops(
            tensor_send_prev=shape_of(tensor_send_prev),
            tensor_recv_prev=from_prev,
            tensor_send_next=shape_of(tensor_send_next),
            tensor_recv_next=from_next,
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        for request in requests.values():
            request.wait()
        nothing = [0, 0, 0]
        return (
            nothing if from_prev is None else from_prev.tolist(),
            nothing if from_next is None else from_next.tolist(),
        )


def schedule_arguments(config: TransformerConfig) -> dict[str, Any]:
    """What Megatron's schedule is given besides its defaults."""
    if config.virtual_pipeline_model_parallel_size is None:
        return {}
    groups = ProcessGroupCollection()
    groups.tp, groups.cp = ps.get_tensor_model_parallel_group(), ps.get_context_parallel_group()
    groups.pp, groups.dp_cp = ps.get_pipeline_model_parallel_group(), ps.get_data_parallel_group(True)
    groups.embd = ps.get_embedding_group(check_initialized=False)
    groups.pos_embd = ps.get_position_embedding_group(check_initialized=False)
    return {"p2p_communicator": PairwiseCommunicator(groups.pp, config), "pg_collection": groups}
