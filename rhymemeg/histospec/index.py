"""The draft index (C++); what it does and every call is documented in `_index.pyi`."""

from rhymemeg.histospec._index import MAX_CONTEXT, MAX_DOCUMENT_LENGTH, AcceptanceModel, DraftIndex, pack, unpack

__all__ = ["MAX_CONTEXT", "MAX_DOCUMENT_LENGTH", "AcceptanceModel", "DraftIndex", "pack", "unpack"]
