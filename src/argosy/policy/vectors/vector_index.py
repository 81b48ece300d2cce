"""Vectors of questions by partition, bounded in number and bytes, of which the most similar ones are found."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from argosy.policy.tenant_memory import MemoryEntry, TenantMemory

Vector = NDArray[np.float32]
QUESTION_OVERHEAD_BYTES = 512
"""Approximate size of a question without its text and vector."""
MAX_ROWS_PER_QUESTION = 4
"""Rows of a partition for each of its questions, at most."""


class IndexedQuestion(MemoryEntry, eq=False):
    """A question whose answer is kept."""

    partition: str
    text: str
    answer_key: str
    """Key of the answer in the cache of whole responses."""
    stored_at: float
    dimensions: int
    row: int
    """Row in its partition."""


class Match(msgspec.Struct, frozen=True):
    """A question that is similar to another one."""

    question: IndexedQuestion
    similarity: float
    """Cosine of the angle between the vectors."""


class _Partition:
    """Rows of one partition. A removed row is overwritten by the last one."""

    def __init__(self, size: int) -> None:
        self.vectors: Vector = np.zeros((1, size), np.float32)
        self.questions: list[IndexedQuestion] = []

    def add(self, question: IndexedQuestion, vector: Vector) -> None:
        question.row = len(self.questions)
        if question.row == len(self.vectors):
            self.vectors = np.concatenate([self.vectors, np.zeros_like(self.vectors)])
        self.vectors[question.row] = vector
        self.questions.append(question)

    def remove(self, question: IndexedQuestion) -> None:
        last = self.questions.pop()
        if last is not question:
            self.vectors[question.row] = self.vectors[last.row]
            self.questions[question.row] = last
            last.row = question.row
        if MAX_ROWS_PER_QUESTION * len(self.questions) <= len(self.vectors):
            self.vectors = self.vectors[: len(self.vectors) // 2].copy()


class VectorIndex:
    """Questions of all tenants. Not thread-safe.

    A tenant beyond its number of entries loses those that were used least recently. Beyond the bytes of the index, the
    tenant with the most loses them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._memory = TenantMemory(max_bytes)
        self._partitions: dict[tuple[str, int], _Partition] = {}
        """By name and length of the vectors."""
        self._by_tenant: dict[str, OrderedDict[str, IndexedQuestion]] = {}
        """Questions by the key of their answer, least recently used first."""

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def find(
        self, partition: str, vector: Vector, threshold: float, limit: int, min_stored_at: float
    ) -> list[Match]:
        """Return up to `limit` questions with at least this similarity, most similar first.

        Args:
            partition: Name of the partition.
            vector: A vector of length 1.
            threshold: Smallest similarity.
            limit: Most questions to return.
            min_stored_at: Older questions are left out.
        """
        rows = self._partitions.get((partition, len(vector)))
        if rows is None:
            return []
        similarities = rows.vectors[: len(rows.questions)] @ vector
        if len(similarities) > limit:
            nearest = np.argpartition(similarities, -limit)[-limit:]
        else:
            nearest = np.arange(len(similarities))
        matches = [
            Match(rows.questions[row], float(similarities[row]))
            for row in nearest
            if similarities[row] >= threshold and rows.questions[row].stored_at >= min_stored_at
        ]
        return sorted(matches, key=lambda each: -each.similarity)

    def add(
        self,
        tenant: str,
        partition: str,
        text: str,
        vector: Vector,
        *,
        answer_key: str,
        max_entries: int,
        now: float,
    ) -> None:
        """Add a question with a vector of length 1, in the place of an older one with the same answer."""
        self.remove(tenant, answer_key)
        size_bytes = len(text.encode()) + QUESTION_OVERHEAD_BYTES
        size_bytes += MAX_ROWS_PER_QUESTION * vector.nbytes
        question = IndexedQuestion(
            tenant,
            answer_key,
            size_bytes,
            lambda key: self._drop(tenant, key),
            partition,
            text,
            answer_key,
            now,
            len(vector),
            0,
        )
        while len(self._by_tenant.get(tenant, ())) >= max_entries:
            self.remove(tenant, next(iter(self._by_tenant[tenant])))
        if self._memory.add_cached(question):
            name = partition, len(vector)
            if name not in self._partitions:
                self._partitions[name] = _Partition(len(vector))
            self._partitions[name].add(question, vector)
            self._by_tenant.setdefault(tenant, OrderedDict())[answer_key] = question

    def use(self, tenant: str, answer_key: str) -> None:
        """Count the question with an answer as used now, if it is still there."""
        if answer_key in self._by_tenant.get(tenant, ()):
            self._by_tenant[tenant].move_to_end(answer_key)

    def remove(self, tenant: str, answer_key: str) -> None:
        """Remove the question with an answer, if there is one."""
        questions = self._by_tenant.get(tenant)
        question = None if questions is None else questions.get(answer_key)
        if question is not None:
            self._memory.remove(question)
            self._drop(tenant, answer_key)

    def remove_matching(self, matches: Callable[[str], bool]) -> None:
        """Remove all questions whose answers have keys that match."""
        for tenant, questions in tuple(self._by_tenant.items()):
            for answer_key in filter(matches, tuple(questions)):
                self.remove(tenant, answer_key)

    def _drop(self, tenant: str, answer_key: str) -> None:
        """Drop a question whose memory is no longer counted."""
        questions = self._by_tenant[tenant]
        question = questions.pop(answer_key)
        if not questions:
            del self._by_tenant[tenant]
        name = question.partition, question.dimensions
        partition = self._partitions[name]
        partition.remove(question)
        if not partition.questions:
            del self._partitions[name]
