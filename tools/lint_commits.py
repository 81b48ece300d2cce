"""Check that commit subjects read `area: imperative`, in at most 72 characters.

    python tools/lint_commits.py [RANGE]    default: every commit since the rule was adopted

A shallow clone that does not reach back so far is checked as far as it goes.
"""

from __future__ import annotations

import re
import subprocess
import sys

ADOPTED = "4ee242158390ea2eaa5b7c4922d6e6e929ed78d3"
MAX_LENGTH = 72
SUBJECT = re.compile(r"[a-z][a-z0-9_/.-]*(?:, [a-z][a-z0-9_/.-]*)*: [A-Za-z`][^\s].*[^.]")
NO_COMMAND = re.compile(r": (?:Say|Let|Take|Note)\b", re.IGNORECASE)


def git(*arguments: str) -> str:
    """Return the output of a git command, or nothing if it fails."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def find_problem(subject: str) -> str | None:
    """Return what is wrong with a commit subject; None if nothing is."""
    if len(subject) > MAX_LENGTH:
        return f"{len(subject)} characters, at most {MAX_LENGTH}"
    if not SUBJECT.fullmatch(subject):
        return "not of the form `area: imperative`"
    if NO_COMMAND.search(subject):
        return "starts with a word that says nothing of the change"
    return None


def main(arguments: list[str]) -> int:
    """Print every commit that breaks the rule and return the exit status."""
    reached = git("rev-parse", "--verify", "--quiet", f"{ADOPTED}^{{commit}}")
    commits = arguments[0] if arguments else f"{ADOPTED}..HEAD" if reached else "HEAD"
    status = 0
    for line in git("log", "--no-merges", "--format=%h %s", commits).splitlines():
        commit, _, subject = line.partition(" ")
        if problem := find_problem(subject):
            print(f"{commit}: {problem}: {subject}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
