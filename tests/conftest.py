"""Settings for the whole suite. Shared helpers are in tests/support/."""

import os

from hypothesis import settings

# No deadline: a slow machine is no failure. On CI the same examples each time, so that a red run can be repeated.
settings.register_profile("ckptctl", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("ckptctl")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write the golden files of tests/report/ anew")
