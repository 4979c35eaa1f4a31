"""Options that several commands of glm46 share."""

from __future__ import annotations

from typing import Annotated

import typer

SCALE = Annotated[str, typer.Argument(metavar="SCALE|FILE.yaml", help="micro, tiny, ... or a YAML file of your own")]
JSON = Annotated[bool, typer.Option("--json", help="end with one JSON line on standard output")]
STORE = Annotated[
    str | None, typer.Option(metavar="URI", help="a directory or s3://bucket/prefix; by default $GLM46_HOME/store")
]
ADDRESS = "DIR|s3://BUCKET/PREFIX|hf://OWNER/NAME"
