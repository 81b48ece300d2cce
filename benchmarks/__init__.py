"""What we measure; `record` keeps it as data. Threads wait for each other as they do where the engine serves."""

import os

from argosy.engine.config import COMPUTE_ENVIRONMENT

for _name, _value in COMPUTE_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)  # OpenMP reads it once, when torch loads
