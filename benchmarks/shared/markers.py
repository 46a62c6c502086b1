"""Where a document shows results: between two markers that name them."""

import re


def fill_in(document: str, name: str, content: str) -> str:
    """Return the document with `content` between the markers of `name`.

    The markers are the lines `<!-- results: NAME -->` and `<!-- end of NAME -->`; whatever stood
    between them is replaced. A document that shows relative accuracy alone has `NAME relative`.
    """
    start, end = f"<!-- results: {name} -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(document):
        raise ValueError(f"no place for {name}: the document needs the lines {start} and {end}")
    return pattern.sub(lambda _: f"{start}\n{content}\n{end}", document)
