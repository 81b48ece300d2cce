"""Golden sets, whose versions never change, the results of their runs, and graded samples of answers."""

from __future__ import annotations

import msgspec
from sqlalchemy import Integer, cast, delete, func, insert, select, update

from argosy.store import schema
from argosy.store.api_keys import generate_id
from argosy.store.errors import NotFoundError
from argosy.store.record_tables import ALL_RECORDS, PageRequest, RecordTables, find_records
from argosy.store.records import QualityRun, QualitySample, QualitySet, SampledTexts

MAX_RUNS_PER_SET = 200
"""Runs of one version of a set that are kept. The oldest are deleted."""

MAX_SAMPLES_PER_PROJECT = 1000
"""Samples of one project that are kept. The oldest are deleted."""
_samples = schema.quality_samples


class SampleSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Grades of the samples of one version of a model, by one judge."""

    model: str
    version: str
    judge: str
    """Model that graded. Empty for fixed checks."""
    samples: int
    passed: int
    score: float
    """Mean of the scores."""
    first_at: float
    """Time of the first sample, in seconds since the epoch."""


class Quality(RecordTables):
    """Reads and changes golden sets, their runs and samples. `actor` names who makes a change, for the audit log.

    The content of a version is checked before it comes here. See `RecordTables` for the errors.
    """

    def add_version(
        self,
        name: str,
        content: bytes,
        *,
        digest: str,
        items: int,
        judge: str = "",
        organisation: str | None = None,
        actor: str,
    ) -> QualitySet:
        """Add a version with the next number, unless the latest one has the same content, which is returned then.

        Args:
            name: Name of the set.
            content: The set as JSON.
            digest: SHA-256 of the content, as hexadecimal digits.
            items: Number of its items.
            judge: Model that grades by rubrics.
            organisation: Id of the owner. None for that of this view, or else the whole gateway.
            actor: Who makes the change.
        """
        with self._begin_transaction(actor) as transaction:
            organisation = self._find_owner(transaction, organisation, None)
            others = transaction.find_records(QualitySet, organisation=organisation, name=name)
            latest = max(others, key=lambda each: each.version, default=None)
            if latest is not None and latest.digest == digest and latest.deleted_at is None:
                return latest
            added = transaction.create_record(
                QualitySet(
                    id=generate_id("golden_set"),
                    organisation=organisation,
                    name=name,
                    version=1 if latest is None else latest.version + 1,
                    digest=digest,
                    items=items,
                    judge=judge,
                    created_at=transaction.now,
                    created_by=actor,
                )
            )
            sets = schema.quality_sets
            transaction.connection.execute(
                update(sets).where(sets.c.id == added.id).values(content=content)
            )
            return added

    def list_sets(
        self, organisation: str | None = None, page: PageRequest = ALL_RECORDS
    ) -> list[QualitySet]:
        """List the versions of an organisation, or of all, that are not deleted, oldest first."""
        owner = {} if organisation is None else {"organisation": organisation}
        with self._database.read_transaction() as connection:
            return find_records(
                connection, QualitySet, self._organisation_id, page, **owner, deleted_at=None
            )

    def get_set(self, quality_set: str) -> QualitySet:
        """Return the version with this id, or raise NotFoundError."""
        return self._get_record(QualitySet, quality_set)

    def find_set(self, reference: str) -> QualitySet:
        """Return a version by its id, or one of the whole gateway as `NAME` (the latest) or `NAME@NUMBER`.

        Raises NotFoundError if there is none.
        """
        name, _, version = reference.partition("@")
        found = [
            each
            for each in self.list_sets()
            if each.id == reference
            or (
                each.organisation is None
                and each.name == name
                and version in {"", str(each.version)}
            )
        ]
        if not found:
            raise NotFoundError(
                f"The store has no golden set {reference!r} of the whole gateway. Add it with `argosy quality import`."
            )
        return max(found, key=lambda each: each.version)

    def read_content(self, quality_set: QualitySet) -> bytes:
        """Return the content of a version. Raises NotFoundError if it is deleted."""
        sets = schema.quality_sets.c
        with self._database.read_transaction() as connection:
            content = connection.execute(
                select(sets.content).where(sets.id == quality_set.id)
            ).scalar_one_or_none()
        if content is None:
            raise NotFoundError(f"The golden set {quality_set.reference} is deleted.")
        return bytes(content)

    def delete(self, quality_set: str, *, actor: str) -> QualitySet:
        """Delete the content of a version, and its runs. Its number is not used again."""
        with self._begin_transaction(actor) as transaction:
            found = transaction.get_active_record(QualitySet, quality_set)
            sets, runs = schema.quality_sets, schema.quality_runs
            transaction.connection.execute(
                update(sets).where(sets.c.id == found.id).values(content=None)
            )
            transaction.connection.execute(delete(runs).where(runs.c.quality_set == found.id))
            return transaction.update_record(found, "delete", deleted_at=transaction.now)

    def add_run(
        self,
        quality_set: str,
        *,
        model: str,
        against: str = "",
        verdict: str = "",
        score: float,
        result: str,
        actor: str,
    ) -> QualityRun:
        """Add the result of a run. The oldest runs of the same version of the set are deleted.

        Args:
            quality_set: Id of the version of the set.
            model: Model that was graded.
            against: Model that it was compared with.
            verdict: Verdict of the comparison.
            score: Mean score of the model, from 0 to 1.
            result: Figures as JSON.
            actor: Who makes the change.
        """
        with self._begin_transaction(actor) as transaction:
            found = transaction.get_active_record(QualitySet, quality_set)
            runs = schema.quality_runs
            kept = (
                select(runs.c.id)
                .where(runs.c.quality_set == quality_set)
                .order_by(runs.c.created_at.desc(), runs.c.id.desc())
                .limit(MAX_RUNS_PER_SET - 1)
            )
            transaction.connection.execute(
                delete(runs).where(runs.c.quality_set == quality_set, runs.c.id.not_in(kept))
            )
            return transaction.create_record(
                QualityRun(
                    id=generate_id("quality_run"),
                    organisation=found.organisation,
                    quality_set=quality_set,
                    model=model,
                    against=against,
                    verdict=verdict,
                    score=score,
                    result=result,
                    created_at=transaction.now,
                    created_by=actor,
                )
            )

    def list_runs(
        self,
        organisation: str | None = None,
        quality_set: str | None = None,
        page: PageRequest = ALL_RECORDS,
    ) -> list[QualityRun]:
        """List the runs of an organisation or of all, and of one version of a set or of all, oldest first."""
        return self._find_records(
            QualityRun, page, organisation=organisation, quality_set=quality_set
        )

    # --- samples ---------------------------------------------------------------------------------

    def add_sample(self, sample: QualitySample, texts: SampledTexts) -> bool:
        """Keep a sample. Returns False, and keeps nothing, if its project does not permit that any more."""
        projects, columns = schema.projects.c, _samples.c
        consent = select(projects.quality).where(projects.id == sample.project)
        kept = (
            select(columns.id)
            .where(columns.project == sample.project)
            .order_by(columns.created_at.desc(), columns.id.desc())
            .limit(MAX_SAMPLES_PER_PROJECT - 1)
        )
        with self._database.write_transaction() as connection:
            # Locked, so that a project that withdraws its consent meanwhile deletes this sample too.
            given = connection.execute(consent.with_for_update()).scalar_one_or_none()
            if given not in ({"judged"} if sample.judge else {"automatic", "judged"}):
                return False
            too_old = (columns.project == sample.project) & columns.id.not_in(kept)
            connection.execute(delete(_samples).where(too_old))
            values = msgspec.structs.asdict(sample) | msgspec.structs.asdict(texts)
            connection.execute(insert(_samples).values(values))
        return True

    def list_samples(
        self,
        organisation: str | None = None,
        project: str | None = None,
        page: PageRequest = ALL_RECORDS,
    ) -> list[QualitySample]:
        """List the samples of an organisation and a project or of all, without their texts, oldest first."""
        return self._find_records(QualitySample, page, organisation=organisation, project=project)

    def get_sample(self, sample: str) -> QualitySample:
        """Return the sample of the response with this id, or raise NotFoundError."""
        return self._get_record(QualitySample, sample)

    def read_texts(self, sample: QualitySample) -> SampledTexts:
        """Return the texts of a sample. Raises NotFoundError if it is deleted."""
        columns = [_samples.c[name] for name in SampledTexts.__struct_fields__]
        with self._database.read_transaction() as connection:
            row = connection.execute(select(*columns).where(_samples.c.id == sample.id)).first()
        if row is None:
            raise NotFoundError(f"The sample {sample.id} is deleted.")
        return SampledTexts(**row._asdict())

    def summarise_samples(self, since: float) -> list[SampleSummary]:
        """Return the grades since a time by model, version and judge."""
        groups = [_samples.c[name] for name in ("model", "version", "judge")]
        passed = func.sum(cast(_samples.c.has_passed, Integer))
        query = (
            select(
                *groups,
                func.count().label("samples"),
                passed.label("passed"),
                func.avg(_samples.c.score).label("score"),
                func.min(_samples.c.created_at).label("first_at"),
            )
            .where(_samples.c.created_at >= since)
            .group_by(*groups)
            .order_by(*groups)
        )
        if self._organisation_id is not None:
            query = query.where(_samples.c.organisation == self._organisation_id)
        with self._database.read_transaction() as connection:
            return [SampleSummary(**row._asdict()) for row in connection.execute(query)]
