"""The page at / of a served model: a chat in the browser, from one file that asks no other server for anything.

It asks the server that it comes from, as any client does. A key is asked for where the server wants one, and kept by
the open page only.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from aiohttp import web

PAGE = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
NONCE = "NONCE"
POLICY = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What a browser lets the page do: run its own script, and ask its own server."""


async def chat_page(request: web.Request) -> web.Response:
    """The page, with a policy of its own for each answer."""
    nonce = secrets.token_urlsafe()
    headers = {
        "Content-Security-Policy": POLICY.format(nonce),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    return web.Response(text=PAGE.replace(NONCE, nonce), content_type="text/html", headers=headers)
