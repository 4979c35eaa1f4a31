"""The deployment glm46/nightly: the flow `glm46` with a time limit.

So a night that hangs does not stop the next one. Nights differ by code or data: where neither changed, the night finds
everything in the store, ends in minutes, and the trend page leaves it out.
"""

from __future__ import annotations

from flows.full_pipeline import full_pipeline

TIME_LIMIT_SECONDS = 4 * 3600
nightly = full_pipeline.with_options(timeout_seconds=TIME_LIMIT_SECONDS)
