"""Lessons of the console: simulations on the digital twin, each with two or more variants to compare.

`LESSONS` declares them as data, which the gateway lists. `python -m argosy.lessons ID` reads the values of the controls
as JSON and prints the `LessonRun`. A lesson builds a scenario of the twin for each variant (`catalogue`, `challenges`).
`measurement` runs them, and reads the same plots and figures from every run. So all decisions are those of the product.
Only `speculation` has no fleet: it runs the policy for drafts over batch sizes.
"""

from argosy.lessons.catalogue import LESSONS, run_lesson

__all__ = ["LESSONS", "run_lesson"]
