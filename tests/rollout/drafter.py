"""A drafter for tests: continues as after the last occurrence of the last token; nothing where there is none."""

from __future__ import annotations

from typing import Any


class RepeatDrafter:
    """vLLM's interface of custom drafters."""

    def __init__(self, vllm_config: Any) -> None:
        self.k = vllm_config.speculative_config.num_speculative_tokens
        self.max_len = vllm_config.model_config.max_model_len

    def load_model(self, model: Any) -> None:
        """Nothing to load."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """One draft a row."""
        drafts = []
        for row, sampled in enumerate(sampled_token_ids):
            n = int(num_tokens_no_spec[row])
            context = token_ids_cpu[row, :n]
            seen = (context[:-1] == context[-1]).nonzero()[0]
            room = min(self.k, self.max_len - n - 1)
            drafts.append(context[seen[-1] + 1 :][: max(room, 0)].tolist() if sampled and len(seen) else [])
        return drafts
