"""What every test shares: how hypothesis behaves, and the databases."""

import os

from hypothesis import settings

pytest_plugins = ("tests.services",)

# Timings never decide a test, so no deadlines; CI draws the same examples every time.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
