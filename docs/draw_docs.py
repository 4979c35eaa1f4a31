"""Draws the pictures of docs/ from the configurations: python -m docs.draw_docs [--check]

--check says whether the files are what would be drawn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from configs.load import load_scale
from docs.draw_course import draw_course
from docs.draw_packing import draw_packing
from docs.draw_walk import draw_walk

DOCS_DIR = Path(__file__).resolve().parent


def pictures() -> dict[str, str]:
    """File name -> content."""
    return {"course.svg": draw_course(load_scale("full")), "packing.svg": draw_packing(), "walk.svg": draw_walk()}


def main() -> None:
    """Write the pictures, or compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 where a file is not what would be drawn")
    is_check = parser.parse_args().check
    differing = [
        name
        for name, text in pictures().items()
        if not (DOCS_DIR / name).exists() or (DOCS_DIR / name).read_text() != text
    ]
    for name, text in pictures().items():
        if not is_check:
            (DOCS_DIR / name).write_text(text)
    if is_check and differing:
        raise SystemExit(f"draw again: {', '.join(differing)}")
    print(f"{', '.join(differing) or 'nothing'} {'differs' if is_check else 'changed'}")


if __name__ == "__main__":
    main()
