"""All-to-all among the ranks of a group that autograd can follow: the backward pass is the reverse exchange.

The exchange is split into its start and its end, so that something can be computed between them. In the backward pass
the end starts the reverse exchange and the start ends it. Between the two, autograd goes back through what was
computed between them.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Exchange:
    """One exchange of rows: `sent[r]` go to rank r of the group, `received[r]` come from it; rows are in the order of
    the ranks.

    Every rank of the group makes the same exchanges in the same order, also a rank that sends or receives nothing.
    """

    def __init__(self, sent: list[int], received: list[int], group: ProcessGroup) -> None:
        self.sent, self.received, self.group = sent, received, group
        self._travelling: tuple[Tensor, dist.Work] | None = None

    def start(self, rows: Tensor) -> Tensor:
        """Begins the exchange. The result may only be given to `finish`: by then its rows have arrived."""
        return cast(Tensor, _Start.apply(rows, self))

    def finish(self, arriving: Tensor) -> Tensor:
        return cast(Tensor, _Finish.apply(arriving, self))

    def depart(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        arriving = rows.new_empty(sum(received), *rows.shape[1:])
        work = dist.all_to_all_single(arriving, rows.contiguous(), received, sent, group=self.group, async_op=True)
        assert self._travelling is None and work is not None, "an exchange was started twice"
        self._travelling = arriving, work
        return arriving

    def wait(self) -> Tensor:
        assert self._travelling is not None, "an exchange was not started"
        arrived, work = self._travelling
        work.wait()
        self._travelling = None
        return arrived


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """The rows that the ranks of the group send to this one."""
    exchange = Exchange(sent, received, group)
    return exchange.finish(exchange.start(rows))


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.depart(rows, exchange.sent, exchange.received)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, arriving: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return arriving.view_as(arriving)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.depart(grads[0], exchange.received, exchange.sent)
        # What `_Start` gets as a gradient and does not look at: the gradient is on its way.
        return grads[0], None
