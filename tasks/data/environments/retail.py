"""Environment `retail`: a shop's customers and orders, tools that read and change them, and a wanted end state.

A request may be one that the shop's rules refuse: then the right end is an unchanged database and the order's status as
an answer.
"""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

from tasks.data.environments.environment import Environment, Parameter, Tool, ToolError
from tasks.data.environments.task import Task

KIND = "retail"
STATUSES = ("pending", "shipped", "delivered", "cancelled")
_STATUS = "|".join(STATUSES)
_NOT_SAID = re.compile(
    rf"(?:\bnot|n[\'\u2019]t|\bno longer|\bonly|\bneither|\bnor)(?: (?:be|been|yet))* (?:{_STATUS})\b"
    rf"|\b(?:{_STATUS})(?: (?:and|or) (?:{_STATUS}))* orders\b|\bcannot be (?:{_STATUS})\b"
)
"""What an answer denies, or says of the shop's orders in general, is no status of the order."""
ORDER = Parameter("order_id", "string", "For example W1042")
TOOLS = (
    Tool(
        "find_orders",
        "Lists the numbers of a customer's orders.",
        (Parameter("email", "string", "Address of the customer"),),
    ),
    Tool("look_up_order", "Shows the items, the address and the status of an order.", (ORDER,)),
    Tool("cancel_order", "Cancels a pending order. Others cannot be cancelled.", (ORDER,)),
    Tool(
        "change_address",
        "Sends a pending order to another address. Others cannot be changed.",
        (ORDER, Parameter("address", "string", "Street and number")),
    ),
    Tool(
        "return_item",
        "Takes back one item of a delivered order. Of others nothing can be returned.",
        (ORDER, Parameter("item", "string", "Name of the item")),
    ),
)
NAMES = ("ada", "ben", "cleo", "dan", "eva", "finn", "gus", "hana", "ivo", "june", "kofi", "lena")
ITEMS = ("lamp", "kettle", "desk", "chair", "mirror", "carpet", "clock", "shelf", "vase", "blanket")
STREETS = ("Mill Lane", "Oak Street", "Harbour Road", "Church Hill", "Station Road", "Park Avenue")
Orders = dict[str, dict[str, Any]]
"""Orders by number: email, items, address, status."""


def open_retail(expected: str) -> Environment:
    """`expected` is JSON: `orders` before and `wanted` after, and `said`, the one of STATUSES that the answer must
    state; it is empty where any answer will do. "Shipped, not pending" states one."""
    task = json.loads(expected)
    orders: Orders = task["orders"]
    functions = {tool.name: (tool, function) for tool, function in zip(TOOLS, _functions(orders), strict=True)}

    def judge(answer: str) -> bool:
        stated = _NOT_SAID.sub("", answer.lower())
        said = {status for status in STATUSES if status in stated}
        return orders == task["wanted"] and (not task["said"] or said == {task["said"]})

    return Environment(functions, judge)


def _functions(orders: Orders) -> tuple[Any, ...]:
    """The functions of TOOLS, in their order."""

    def order_of(order_id: str, status: str = "") -> dict[str, Any]:
        if order_id not in orders:
            raise ToolError(f"there is no order {order_id}")
        if status and orders[order_id]["status"] != status:
            raise ToolError(f"order {order_id} is {orders[order_id]['status']}, not {status}")
        return orders[order_id]

    def find_orders(email: str) -> str:
        numbers = [number for number, order in sorted(orders.items()) if order["email"] == email]
        if not numbers:
            raise ToolError(f"there is no customer {email}")
        return ", ".join(numbers)

    def look_up_order(order_id: str) -> str:
        return json.dumps(order_of(order_id))

    def cancel_order(order_id: str) -> str:
        order_of(order_id, "pending")["status"] = "cancelled"
        return f"order {order_id} is cancelled"

    def change_address(order_id: str, address: str) -> str:
        order_of(order_id, "pending")["address"] = address
        return f"order {order_id} goes to {address}"

    def return_item(order_id: str, item: str) -> str:
        order = order_of(order_id, "delivered")
        if item not in order["items"]:
            raise ToolError(f"order {order_id} has no {item}")
        order["items"].remove(item)
        return f"{item} of order {order_id} is taken back"

    return find_orders, look_up_order, cancel_order, change_address, return_item


def make_task(draw: Random) -> Task:
    """A customer's request about one of two to four orders of a small shop: told by number, or to be found by
    address and item."""
    orders = _make_orders(draw)
    number = draw.choice(sorted(orders))
    order, email = orders[number], orders[number]["email"]
    item, address = draw.choice(order["items"]), f"{draw.choice(STREETS)} {draw.randint(1, 99)}"
    requests = {
        "cancel_order": (f"Cancel order {number}.", {"order_id": number}, "pending"),
        "change_address": (f"Send order {number} to {address}.", {"order_id": number, "address": address}, "pending"),
        "return_item": (
            f"I want to return the {item} of order {number}.",
            {"order_id": number, "item": item},
            "delivered",
        ),
        "look_up_order": (f"What is the status of order {number}?", {"order_id": number}, ""),
    }
    possible = sorted(name for name, (_, _, needed) in requests.items() if needed == order["status"])
    action = draw.choice(possible if possible and draw.random() < 0.5 else sorted(requests))
    request, arguments, needed = requests[action]
    calls: list[tuple[str, dict[str, str]]] = [("look_up_order", {"order_id": number})]
    said = order["status"] if needed != order["status"] else ""
    if needed == order["status"]:
        calls.append((action, arguments))
    own = [each for each in orders.values() if each["email"] == email]
    if len(own) == 1 and draw.random() < 0.5:
        request = request.replace(f"order {number}", "my order")
        calls.insert(0, ("find_orders", {"email": email}))
    question = f"I am {email}. {request} If that cannot be done, tell me the status of the order."
    if action == "look_up_order":
        question = f"I am {email}. {request}"
    wanted: Orders = json.loads(json.dumps(orders))
    shop = dict(zip((tool.name for tool in TOOLS), _functions(wanted), strict=True))
    for name, given in calls:
        shop[name](**given)
    expected = json.dumps({"orders": orders, "wanted": wanted, "said": said})
    return Task(question, expected, calls, f"The order is {said}." if said else "Done.", f"{question} {orders}")


def _make_orders(draw: Random) -> Orders:
    emails = [f"{name}@example.com" for name in draw.sample(NAMES, 3)]
    numbers = draw.sample(range(1000, 10000), draw.randint(2, 4))
    return {
        f"W{number}": {
            "email": draw.choice(emails),
            "items": draw.sample(ITEMS, draw.randint(1, 3)),
            "address": f"{draw.choice(STREETS)} {draw.randint(1, 99)}",
            "status": draw.choice(STATUSES[:3]),
        }
        for number in numbers
    }
