from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from hypothesis import HealthCheck, settings

# Threads that wait for each other on busy cores cost more than they give to tiny models. It is read
# when torch is loaded, here and in processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What is kept for this user stays as it is. Processes that tests start find the same folder.
if "KVSTRATA_TEST_CACHE" not in os.environ:
    os.environ["KVSTRATA_TEST_CACHE"] = tempfile.mkdtemp(prefix="kvstrata-tests-")
    atexit.register(shutil.rmtree, os.environ["KVSTRATA_TEST_CACHE"], ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = os.environ["KVSTRATA_TEST_CACHE"]

_SLOW_TO_DRAW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile("quick", max_examples=200, deadline=None)
settings.register_profile(
    "thorough", max_examples=5000, deadline=None, suppress_health_check=_SLOW_TO_DRAW
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
