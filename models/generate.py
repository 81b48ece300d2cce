"""Print the generated training text as JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice

from models.chat_format import render
from models.corpus.chat import generate_documents


def main() -> None:
    """Print the first `--count` documents of the stream of `--seed`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rendered", action="store_true", help="print texts in the chat format")
    options = parser.parse_args()
    for document in islice(generate_documents(options.seed), options.count):
        turns = [{"role": turn.role, "content": turn.content} for turn in document.messages]
        line = {"messages": turns} if turns else {"text": document.prose}
        if options.rendered:
            line = {"text": render(document)}
        sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
