"""The password of the home's Prefect API: made at the first start, kept in a file that only its owner can read.

Only environments pass it on. Whoever may create a flow run can run any program as this user. So other users and web
pages in this user's browser must not be able to.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from shlex import quote

from infra.home import Home, private_file
from infra.servers.loopback import exports

USER = "glm46"
CLIENT_VARIABLE = "PREFECT_API_AUTH_STRING"
SERVER_VARIABLE = "PREFECT_SERVER_API_AUTH_STRING"
API_URL, MLFLOW_URL, SERVER_HOME = "PREFECT_API_URL", "MLFLOW_TRACKING_URI", "GLM46_SERVER_HOME"
ENVIRONMENT = (API_URL, CLIENT_VARIABLE, MLFLOW_URL, SERVER_HOME)
"""What a shell needs to use the servers of a home."""


def password_path(home: Home) -> Path:
    """The file that holds `user:password`, as Prefect's UI asks for it."""
    return home.prefect_dir / "password"


def api_password(home: Home) -> str:
    """`user:password` of the home, created if there is none."""
    path = password_path(home)
    if not path.exists():
        temporary = private_file(path.with_name(f".{path.name}-{os.getpid()}"))
        temporary.write_text(f"{USER}:{secrets.token_urlsafe(32)}")
        with suppress(FileExistsError):  # another process made one at the same moment
            os.link(temporary, path)
        temporary.unlink()
    return path.read_text()


def environment_path(home: Home) -> Path:
    """The file that `glm46 up` writes for other shells."""
    return home.run_dir / "environment.sh"


def write_environment(home: Home, api_url: str, mlflow_url: str) -> Path:
    """Write what a shell needs to use the servers: `. FILE`, then `prefect` and `mlflow` reach them."""
    values = dict(zip(ENVIRONMENT, (api_url, api_password(home), mlflow_url, str(home.root)), strict=True))
    path = private_file(environment_path(home))
    path.write_text("".join(f"export {name}={quote(value)}\n" for name, value in values.items()) + exports())
    return path
