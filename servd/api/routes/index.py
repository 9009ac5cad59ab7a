"""GET /: what this server is, for a person with a browser."""

from __future__ import annotations

from html import escape

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

import servd
from servd.api.context import context_of
from servd.api.openapi import describes
from servd.api.openapi_page import CONTENT_SECURITY_POLICY, HEAD

router = APIRouter()

PAGE = """\
<title>{model} on servd</title></head><body>
<h1>{model}</h1>
<p>This is <b>servd {version}</b>, which serves a language model to OpenAI's clients.
Contexts have up to {max_model_len} tokens.</p>
<p><a href="/docs">Routes and fields</a> · <a href="/v1/models">Models</a> ·
<a href="/health">Health</a> · <a href="/metrics">Metrics</a></p>
<h2>Try it</h2>
<pre><code>curl {url}/v1/chat/completions \\
  -H 'Content-Type: application/json' \\{key}
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hi"}}]}}'</code></pre>
</body></html>
"""
KEY = '\n  -H "Authorization: Bearer $SERVD_API_KEY" \\'


@router.api_route("/", methods=["GET", "HEAD"])
@describes(str, media_types=("text/html",))
async def index(request: Request) -> Response:
    """The model, the version, and where to go on. Needs a key where the other routes do."""
    context = context_of(request)
    page = HEAD + PAGE.format(
        model=escape(context.model_names[0]),
        version=servd.__version__,
        max_model_len=context.max_model_len,
        url=escape(str(request.base_url).rstrip("/")),
        key=KEY if context.config.server.api_key else "",
    )
    return HTMLResponse(page, headers={"content-security-policy": CONTENT_SECURITY_POLICY})
