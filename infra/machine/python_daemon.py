"""The process that Spark forks the Python workers of a local master from: python -m infra.machine.python_daemon.

Spark starts it, and ends workers that are idle for a minute. Spark's own daemon leaves all imports to the workers:
half a processor second for each. This one has the libraries in memory that nearly all of them use; Arrow imports pandas
where it converts an array. The imports start one thread, jemalloc's, whose own handlers make it safe to fork.

A worker collects garbage after every task, which looks at all objects of these libraries. They are frozen, so it does
not: a deduplication of 2,000 documents took 1.8 processor seconds in two workers, and 0.4 with both.
"""

import gc

import pandas  # noqa: F401
import pyarrow.parquet  # noqa: F401
import pyspark.worker  # noqa: F401
import scipy.sparse.csgraph  # noqa: F401
from pyspark.daemon import manager
from pyspark.sql.pandas import serializers  # noqa: F401

if __name__ == "__main__":
    gc.freeze()
    manager()
