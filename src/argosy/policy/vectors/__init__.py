"""Similar texts by their embeddings, in a package of its own because it needs NumPy."""

from argosy.policy.vectors.vector_index import IndexedQuestion, Match, Vector, VectorIndex

__all__ = ["IndexedQuestion", "Match", "Vector", "VectorIndex"]
