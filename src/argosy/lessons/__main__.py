"""`python -m argosy.lessons ID`: runs a lesson with the values that the standard input has as JSON."""

import sys

import msgspec

from argosy.lessons import run_lesson

if __name__ == "__main__":
    values = msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, int])
    sys.stdout.buffer.write(msgspec.json.encode(run_lesson(sys.argv[1], values)))
