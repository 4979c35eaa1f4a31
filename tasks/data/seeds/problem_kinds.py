"""The kinds of problems with a checkable answer, in files of role `prompts` and among the generated ones.

Runs in ranks: imports the standard library only.
"""

from __future__ import annotations

EXACT = "exact"
"""Generated problems: the answer is a short text, which is compared as it is."""
MATH, CODE = "math", "code_with_tests"
CHOICE = "choice"
"""One of several choices, by its letter."""
CONSTRAINTS = "constraints"
"""An instruction whose form a program checks, as in IFEval."""
TOOLS = "tools"
"""The function calls that a request asks for."""
SAFETY = "safety"
"""A request that must be declined, or a harmless one that must be answered."""
DOMAIN_OF_KIND = {MATH: "math", CODE: "code", CHOICE: "chat", CONSTRAINTS: "chat", TOOLS: "chat", SAFETY: "safety"}
"""Domain of a kind's prompts, where their entry in glm46-data.yaml names none."""
