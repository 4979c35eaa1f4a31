"""The environments by the kind of prompt that is answered in them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tasks.data.environments import calculator, retail
from tasks.data.environments.environment import Environment, Tool
from tasks.data.environments.task import Task

OPENERS: dict[str, Callable[[str], Environment]] = {
    calculator.KIND: calculator.open_calculator,
    retail.KIND: retail.open_retail,
}
"""Functions from a prompt's column `answer` to the environment in the state in which an episode begins."""
TOOLS: dict[str, tuple[Tool, ...]] = {calculator.KIND: calculator.TOOLS, retail.KIND: retail.TOOLS}
GENERATORS: dict[str, Callable[[Random], Task]] = {calculator.KIND: calculator.make_task, retail.KIND: retail.make_task}
"""Functions that make a task of the kind from random numbers."""
