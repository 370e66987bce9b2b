"""The tokenizer of a model folder. Never from the network, and never code from the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rhymemeg.errors import ConfigError


def load_tokenizer(folder: str) -> Any:
    """The `transformers` tokenizer in `folder`. Raises ConfigError naming the folder."""
    from transformers import AutoTokenizer

    # Without any of these, transformers makes up an empty tokenizer for some model types.
    if not any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ConfigError(
            f"--hf-checkpoint: {folder!r} holds no tokenizer (tokenizer.json, tokenizer.model or vocab.json)"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"--hf-checkpoint: {folder!r} holds no tokenizer that can be loaded: {first}") from None
