"""The tokenizer of a model folder. Never from the network, and never code from the folder."""

from __future__ import annotations

from typing import Any

from rhymemeg.errors import ConfigError


def load_tokenizer(folder: str) -> Any:
    """The `transformers` tokenizer in `folder`. Raises ConfigError naming the folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"--hf-checkpoint: {folder!r} holds no tokenizer that can be loaded: {first}") from None
