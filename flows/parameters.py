"""Parameters of the deployed flow: their choices in Prefect's UI, and what is refused before a run does anything.

The server checks choices and patterns, also for `prefect deployment run`. What only the worker's machine knows is
checked when the flow run begins. Help texts are in the flow's docstring, where Prefect reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from configs.load import load_scale, scale_names
from configs.schema import PHASE_TEMPLATES
from flows.stages import PREPARE_DATA, RELEASE_MODEL
from tasks.data.sources.remote_sources import is_remote


def _known_scale(scale: str) -> str:
    load_scale(scale)
    return scale


def existing_data(data: str) -> str:
    """A directory or file of this machine, or an address that is checked when it is listed. Raises ValueError for
    anything else."""
    if not is_remote(data) and not Path(data).exists():
        raise ValueError(
            f"{Path(data).absolute()} is not on this machine: name a directory or file with your documents, "
            f"s3://bucket/prefix or hf://owner/name"
        )
    return data


ScaleName = Annotated[str, Field(pattern=rf"^({'|'.join(scale_names())})$|\.ya?ml$"), AfterValidator(_known_scale)]
DataAddress = Annotated[str, AfterValidator(existing_data)]
StageName = Annotated[
    str, Field(pattern=rf"^({'|'.join([PREPARE_DATA, *PHASE_TEMPLATES, RELEASE_MODEL])})(_[a-z0-9]+)*$")
]
StoreAddress = Annotated[str, Field(pattern="^(/|s3://)")]
"""Whole: a worker runs in the project's directory, where a relative one would be a new store beside the code."""
