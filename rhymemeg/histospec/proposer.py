"""HistoSpec in vLLM 0.32's slot for custom drafters (method "custom_class"); the only module of histospec that knows vLLM.

    llm_args = dict(speculative_config=speculative_config(32), worker_extension_cls=WORKER_EXTENSION)
    attach(worker.model_runner, drafter)       or   llm.collective_rpc("attach_histospec", args=(drafter,))

vLLM builds the proposer from its class path with nothing but a VllmConfig, so it starts without a drafter and proposes nothing
until one is attached: then a step costs one comparison more than without. After every engine step vLLM calls `propose` with the
tokens that each row got; which request a row is comes from the runner's input batch. Request ids are those of
`SampleId`, "{step}-{prompt_id}-{sample_index}", with whatever vLLM appends; rows with other ids (probes, warm-up) get no
draft. A draft leaves room for its bonus token within max_model_len and within the request's max_tokens.

Each rank of a tensor-parallel engine runs its own copy and must draft identically. Everything but the measured step times is
the same on all ranks anyway; those are taken from the first rank every `SYNC_EVERY` calls, which all ranks count alike.

`check_exact` and the constructor refuse what vLLM's verification does not keep exact: min_p, logit_bias, custom logits
processors, and rejection methods other than the standard one. On CPU, `attach` checks that the replacements of
`rollout.plugin` are in use, without which verification is not exact.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rhymemeg.errors import ConfigError
from rhymemeg.histospec.cost_model import CostModel
from rhymemeg.histospec.drafter import Drafter, Rows
from rhymemeg.histospec.policy import MAX_DRAFT
from rhymemeg.rollout.samples import SampleId
from rhymemeg.rollout.vllm_compat import check_cpu_sampling

PROPOSER = "rhymemeg.histospec.proposer.HistoSpecProposer"
WORKER_EXTENSION = "rhymemeg.histospec.proposer.HistoSpecWorkerExtension"
SYNC_EVERY = 64


def speculative_config(max_draft: int = 32, max_num_seqs: int | None = None) -> dict[str, Any]:
    """vLLM's speculative_config for drafts of up to `max_draft` tokens.

    With `max_num_seqs` it states the draft length by batch size (always the same), which keeps the scheduler from padding
    requests that have one prompt token left to compute with max_draft placeholders: padding serves full CUDA graphs of
    equally long drafts, which these are not.
    """
    if not 1 <= max_draft <= MAX_DRAFT:
        raise ConfigError(f"drafts may have 1 to {MAX_DRAFT} tokens, not {max_draft}")
    config: dict[str, Any] = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": max_draft}
    if max_num_seqs is not None:
        config["num_speculative_tokens_per_batch_size"] = [(1, max_num_seqs, max_draft)]
    return config


def check_exact(sampling: Any, where: str = "sampling parameters") -> None:
    """ConfigError if a request with these vLLM SamplingParams could not be verified exactly."""
    for name, neutral in (("min_p", 0.0), ("logit_bias", None), ("logits_processors", None)):
        value = getattr(sampling, name, None)
        if value is not None and value != neutral and value != {} and value != []:
            raise ConfigError(
                f"{where}: {name} cannot be combined with speculative decoding (its verification ignores it)"
            )


class HistoSpecProposer:
    """See the module. vLLM calls the constructor, `load_model` and `propose`."""

    def __init__(self, vllm_config: Any) -> None:
        spec = vllm_config.speculative_config
        method = getattr(spec, "rejection_sample_method", "standard")
        if method != "standard":
            raise ConfigError(f"speculative_config: rejection_sample_method {method!r} changes the distribution")
        if getattr(vllm_config.model_config, "logits_processors", None):
            raise ConfigError("custom logits processors cannot be combined with speculative decoding")
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ConfigError("vLLM does not support speculative decoding in pipeline-parallel engines")
        self.max_draft: int = spec.num_speculative_tokens
        self.max_model_len: int = vllm_config.model_config.max_model_len
        self.tensor_parallel_size: int = vllm_config.parallel_config.tensor_parallel_size
        self.drafter: Drafter | None = None
        self._runner: Any = None
        self._calls = 0
        self._most: dict[str, int] = {}  # see _most_drafted_at
        self._agreed: CostModel | None = None  # what the drafter of a tensor-parallel engine decides by

    def load_model(self, model: Any) -> None:
        """Nothing to load; vLLM calls it on CPU without asking."""

    def attach(self, runner: Any, drafter: Drafter | None) -> None:
        """Draft with `drafter` for the requests of this model runner; None switches drafting off. ConfigError if its drafts
        could not be verified exactly in this process."""
        if drafter is not None and drafter.options.max_draft > self.max_draft:
            raise ConfigError(
                f"the drafter drafts up to {drafter.options.max_draft} tokens, the engine was built for {self.max_draft}"
            )
        if drafter is not None and getattr(getattr(runner, "device", None), "type", "") == "cpu":
            check_cpu_sampling()
        # vLLM drops the drafts of all rows when one row is within max_draft of the limit, to protect drafting models. Here each
        # row keeps to its own room.
        runner.effective_drafter_max_model_len = self.max_model_len + self.max_draft
        self._runner, self.drafter = runner, drafter
        self._most.clear()
        if drafter is not None and self.tensor_parallel_size > 1:
            drafter.learner = copy.deepcopy(drafter.cost)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft a row. `num_tokens_no_spec[i]` counts row i's tokens, the sampled ones included."""
        drafter = self.drafter
        if drafter is None:
            return [[] for _ in sampled_token_ids]
        if self.tensor_parallel_size > 1:
            self._agree(drafter)
        if drafter.rests(sampled_token_ids):
            return [[] for _ in sampled_token_ids]
        batch, requests = self._runner.input_batch, self._runner.requests
        count = len(sampled_token_ids)
        ids: list[str] = batch.req_ids[:count]
        lengths = num_tokens_no_spec[:count].tolist()
        new = [tokens if _prompt_id(name) is not None else [] for name, tokens in zip(ids, sampled_token_ids)]
        if len(self._most) > 4 * count + 1024:
            self._most.clear()
        most = [self._most.get(name) or self._most_drafted_at(name, requests) for name in ids]
        rooms = np.minimum(np.array(most) - num_tokens_no_spec[:count], self.max_draft)

        def context(row: int) -> tuple[NDArray[np.int32], int]:
            return token_ids_cpu[row, : lengths[row]], int(batch.num_prompt_tokens[row])

        return drafter.step(
            Rows(
                request_ids=ids,
                new_tokens=new,
                lengths=lengths,
                rooms=rooms,
                prompt_id=lambda row: _prompt_id(ids[row]) or 0,
                context=context,
                # What this step verified: the scheduler may have cut or dropped a draft, and pads with -1.
                scheduled=[len(tokens) - tokens.count(-1) for tokens in batch.spec_token_ids[:count]],
            )
        )

    def _most_drafted_at(self, request_id: str, requests: dict[str, Any]) -> int:
        """Length that a request's tokens and draft may have together, so that the bonus token still fits."""
        most, state = self.max_model_len - 1, requests.get(request_id)
        if state is not None and state.sampling_params is not None and state.sampling_params.max_tokens is not None:
            most = min(most, state.num_prompt_tokens + state.sampling_params.max_tokens - 1)
            self._most[request_id] = most
        return most

    def _agree(self, drafter: Drafter) -> None:
        self._calls += 1
        if self._calls % SYNC_EVERY:
            return
        from vllm.distributed.parallel_state import get_tp_group

        state = get_tp_group().broadcast_object(drafter.learner.state(), src=0)
        drafter.cost.set_state(state)
        drafter.learner.set_state(state)


@functools.lru_cache(maxsize=4096)
def _prompt_id(request_id: str) -> int | None:
    """Prompt of a request of ours; None for any other request."""
    try:
        return SampleId.parse(request_id).prompt_id
    except ValueError:
        return None


class HistoSpecWorkerExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`, for `collective_rpc`."""

    model_runner: Any

    def attach_histospec(self, drafter: Drafter | None) -> None:
        """See `attach`."""
        attach(self.model_runner, drafter)


def attach(model_runner: Any, drafter: Drafter | None) -> None:
    """Make an engine built with `speculative_config` draft with `drafter`; None: draft nothing. ConfigError if it was
    not built so. Call it again after the engine has been rebuilt."""
    proposer = getattr(model_runner, "drafter", None)
    if not isinstance(proposer, HistoSpecProposer):
        raise ConfigError("the engine was not started with histospec's speculative_config, so it has nowhere to draft")
    proposer.attach(model_runner, drafter)
