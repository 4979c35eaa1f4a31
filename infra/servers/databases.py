"""The databases of Prefect and MLflow, checked before a server starts: SQLite below the home, or Postgres by URL.

A server on a damaged database answers its health check, and its clients repeat their requests for minutes without a
message. The URLs hold passwords. They are passed from environment to environment, never to a file, a log, a command
line or a message.
"""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from infra.home import Home, private_file

PREFECT_DATABASE = "GLM46_PREFECT_DATABASE_URL"
MLFLOW_DATABASE = "GLM46_MLFLOW_DATABASE_URL"
CONNECT_TIMEOUT_SECONDS = 5
ASYNC_DRIVER = "asyncpg"


@dataclass(frozen=True)
class Database:
    """The database of one server."""

    server: str
    uri: str
    """The address for SQLAlchemy; may hold a password."""
    variable: str
    """The environment variable that names a Postgres."""

    @property
    def path(self) -> Path | None:
        """The SQLite file; None for Postgres."""
        return Path(self.uri.partition("///")[2]) if self.uri.startswith("sqlite") else None

    @property
    def fix(self) -> str:
        """What the user is to do where it does not answer."""
        if self.path is None:
            return f"start it, or correct {self.variable}"
        return f"move {self.path} away, then run again: it is rebuilt, and what was computed is still in the store"


def mlflow_database(home: Home) -> Database:
    """MLflow's database of a home. Raises ValueError for a URL of another kind."""
    uri = _postgres_uri(MLFLOW_DATABASE, "psycopg2") or f"sqlite:///{home.mlflow_dir / 'mlflow.db'}"
    return Database("mlflow", uri, MLFLOW_DATABASE)


def prefect_database(home: Home) -> Database:
    """Prefect's database of a home. Raises ValueError for a URL of another kind."""
    uri = _postgres_uri(PREFECT_DATABASE, ASYNC_DRIVER) or f"sqlite+aiosqlite:///{home.prefect_dir / 'prefect.db'}"
    return Database("prefect", uri, PREFECT_DATABASE)


def _postgres_uri(variable: str, driver: str) -> str:
    """The URI that a variable holds, for the driver that its server uses; empty where it is not set. Raises ValueError
    for others."""
    scheme, divider, rest = os.environ.get(variable, "").partition("://")
    if not scheme:
        return ""
    if scheme.partition("+")[0] not in ("postgresql", "postgres") or not rest:
        begins = f" begins with {scheme}," if divider and scheme.isalnum() else ""
        raise ValueError(f"{variable}{begins} must be postgresql://user:password@host:port/name")
    if rest.partition("?")[0].count("@") > 1:
        raise ValueError(f"{variable} has more than one @: write those of user and password as %40")
    address, mark, query = rest.partition("?")
    if driver == ASYNC_DRIVER:  # which calls libpq's sslmode so, with the same values
        query = re.sub(r"\bsslmode=", "ssl=", query)
    return f"postgresql+{driver}://{address}{mark}{query}"


def databases(home: Home) -> tuple[Database, Database]:
    """Both databases of a home."""
    return prefect_database(home), mlflow_database(home)


def open_databases(home: Home) -> None:
    """Make each SQLite file private, empty where there is none. Raises ValueError for a damaged file or a Postgres that
    does not answer."""
    for database in databases(home):
        if database.path is not None:
            private_file(database.path)
        check_database(database)


def check_database(database: Database) -> None:
    """Raises ValueError for a damaged file or a Postgres that does not answer, at which MLflow's client waits for
    minutes."""
    problem = find_problem(database)
    if problem:
        raise ValueError(f"{database.server}'s database {problem}: {database.fix}")


def find_problem(database: Database) -> str:
    """The problem of a database, after its address; empty where there is none."""
    path = database.path
    if path is not None:
        damage = _sqlite_damage(path) if path.exists() else ""
        return f"{path} is damaged ({damage})" if damage else ""
    from sqlalchemy.engine import make_url

    url = make_url(database.uri)
    refusal = _postgres_refusal(database.uri, str(url.password or ""))
    return f"at {url.host or 'the local socket'}:{url.port or 5432} does not answer ({refusal})" if refusal else ""


def _sqlite_damage(path: Path) -> str:
    """Reads every page and returns the damage; empty where there is none."""
    try:
        with closing(
            sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=CONNECT_TIMEOUT_SECONDS)
        ) as connection:
            answer = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            return "" if answer == "ok" else answer.splitlines()[-1]
    except sqlite3.DatabaseError as error:
        return str(error)


def _postgres_refusal(uri: str, password: str) -> str:
    try:
        if ASYNC_DRIVER in uri:
            asyncio.run(_connect_async(uri))
        else:
            _connect(uri)
    except Exception as error:  # each driver has errors of its own, and asyncpg's errors are not SQLAlchemy's
        lines = str(getattr(error, "orig", error)).splitlines() or [type(error).__name__]
        return lines[0].replace(password, "***") if password else lines[0]
    return ""


def _connect(uri: str) -> None:
    from sqlalchemy import create_engine

    with create_engine(uri, connect_args={"connect_timeout": CONNECT_TIMEOUT_SECONDS}).connect():
        pass


async def _connect_async(uri: str) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    async with create_async_engine(uri, connect_args={"timeout": CONNECT_TIMEOUT_SECONDS}).connect():
        pass
