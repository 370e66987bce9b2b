"""The draft index (C++); what it does and every call is documented in `_index.pyi`."""

from rhymemeg.histospec._index import MAX_CONTEXT, MAX_DOCUMENT_LENGTH, AcceptanceModel, DraftIndex, pack, unpack

MAX_DOCUMENTS = 4096
"""Documents of one prompt, history and requests together."""

__all__ = ["MAX_CONTEXT", "MAX_DOCUMENTS", "MAX_DOCUMENT_LENGTH", "AcceptanceModel", "DraftIndex", "pack", "unpack"]
