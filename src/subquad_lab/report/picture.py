"""SVG files as images of the page. A browser runs no script of an image, and its ids and styles stay inside."""

from urllib.parse import quote

UNQUOTED = " !()*+,-./:;=?@[]_{|}~"


def image(svg: bytes, text: str) -> dict[str, str]:
    """Return the source of an image and its alternative text.

    >>> image(b'<?xml version="1.0"?><svg id="a"/>', "a plot")["source"]
    'data:image/svg+xml,%3Csvg id=%22a%22/%3E'
    """
    content = svg[svg.index(b"<svg") :].decode().replace("\n", " ")
    return {"source": f"data:image/svg+xml,{quote(content, safe=UNQUOTED)}", "text": text}
