"""The environments by the kind of prompt that is answered in them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tasks.data.environments import calculator, passages, python_programs, repository, retail
from tasks.data.environments.environment import Environment, Tool
from tasks.data.environments.task import Task

OPENERS: dict[str, Callable[[str], Environment]] = {
    calculator.KIND: calculator.open_calculator,
    retail.KIND: retail.open_retail,
    python_programs.KIND: python_programs.open_python,
    passages.KIND: passages.open_search,
    repository.KIND: repository.open_repository,
}
"""Functions from a prompt's column `answer` to the environment in the state in which an episode begins."""
TOOLS: dict[str, tuple[Tool, ...]] = {
    module.KIND: module.TOOLS for module in (calculator, retail, python_programs, passages, repository)
}
GENERATORS: dict[str, Callable[[Random], Task]] = {
    module.KIND: module.make_task for module in (calculator, retail, python_programs, passages)
}
"""Functions that make a task of the kind from random numbers."""
