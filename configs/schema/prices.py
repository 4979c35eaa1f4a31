"""What a plan counts costs with, as one YAML below configs/prices/ states it. No step reads it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from configs.schema.base import Frozen

Amount = Annotated[float, Field(ge=0)]


class Prices(Frozen):
    """Prices of a cluster, of people and of data, and the power that ranks draw."""

    currency: str
    """What the amounts are in; only printed."""
    rank_hour: dict[str, Amount]
    """Of one rank for an hour, by machine (`glm46 plan --machine`); `cpu` for ranks without an accelerator."""
    rank_watts: dict[str, Amount]
    """Power that one rank draws at work, with its share of the node and of the cooling; by machine as above."""
    engineer_month: Amount
    """Of one person."""
    engineer_months: dict[str, Amount]
    """People times months that a scale takes, by scale; what is not listed costs nothing."""
    data: dict[str, Amount]
    """What the documents of a scale cost to get, by scale; likewise."""
