"""Exhaustive counterpart of the draft index in plain Python: every position of every document is compared."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_CONTEXT = 64


@dataclass
class Document:
    tokens: list[int]
    context: int
    weight: float
    searchable: bool


def backwards(tokens: list[int], end: int) -> tuple[int, ...]:
    """The context that ends before `end`, last token first."""
    return tuple(tokens[max(0, end - MAX_CONTEXT) : end][::-1])


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@dataclass
class BruteForce:
    """Documents of one prompt."""

    documents: list[Document] = field(default_factory=list)

    def add(self, context: list[int], tokens: list[int], weight: float = 1.0, searchable: bool = True) -> int:
        self.documents.append(Document(list(context) + list(tokens), len(context), weight, searchable))
        return len(self.documents) - 1

    def append(self, document: int, tokens: list[int]) -> None:
        self.documents[document].tokens += tokens

    def draft(
        self,
        document: int,
        limit: int,
        min_match: int = 1,
        max_match: int = 64,
        max_occurrences: int = 64,
        min_path_probability: float = 0.0,
    ) -> tuple[list[int], int, list[float], int]:
        """(tokens, match, probabilities, occurrences) as `DraftIndex.draft` defines them for one row."""
        text = self.documents[document].tokens
        if limit <= 0 or not text:
            return [], 0, [], 0
        query = backwards(text, len(text))
        smaller: list[tuple[tuple[int, ...], int, int]] = []
        larger: list[tuple[tuple[int, ...], int, int]] = []
        for d, doc in enumerate(self.documents):
            if doc.searchable:
                for end in range(max(doc.context, 1), len(doc.tokens)):
                    context = backwards(doc.tokens, end)
                    (smaller if context < query else larger).append((context, d, end))
        smaller.sort(reverse=True)
        larger.sort()
        near = [[(common(query, c), d, end) for c, d, end in side] for side in (smaller, larger)]
        match = min(max((side[0][0] for side in near if side), default=0), max_match)
        if match < min_match:
            return [], 0, [], 0
        found: list[tuple[int, int]] = []
        while len(found) < max_occurrences:
            below, above = (side[0][0] if side else -1 for side in near)
            if max(below, above) < match:
                break
            _, d, end = near[1 if above >= below else 0].pop(0)
            found.append((d, end))
        votes = len(found)
        tokens, match, probabilities = self._walk(found, limit, min_path_probability, match)
        return tokens, match, probabilities, votes if tokens else 0

    def _walk(
        self, found: list[tuple[int, int]], limit: int, min_path_probability: float, match: int
    ) -> tuple[list[int], int, list[float]]:
        tokens: list[int] = []
        probabilities: list[float] = []
        path = 1.0
        while len(tokens) < limit and found:
            votes: dict[int, list[float]] = {}
            for d, at in found:
                vote = votes.setdefault(self.documents[d].tokens[at], [0.0, 0])
                vote[0] += self.documents[d].weight
                vote[1] += 1
            if any(weight > 0 for weight, _ in votes.values()):
                token = max(votes, key=lambda t: (votes[t][0], votes[t][1]))  # max keeps the first of equals
            else:
                token = max(votes, key=lambda t: votes[t][1])
            path *= votes[token][1] / len(found)
            if path < min_path_probability:
                break
            tokens.append(token)
            probabilities.append(path)
            found = [(d, at + 1) for d, at in found if self.documents[d].tokens[at] == token]
            found = [(d, at) for d, at in found if at < len(self.documents[d].tokens)]
        return tokens, match if tokens else 0, probabilities
