"""Navigation of the pages of source code, computed once instead of for each page.

Furo resolves the whole table of contents for every page, which takes a quarter of the time of a build. The pages of
``sphinx.ext.viewcode`` are in no table of contents, so that their navigation depends only on the depth of their folder,
because links are relative.
"""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the hook before the theme's, whose priority is 500."""
    computed: dict[tuple, str] = {}

    def share_toctree(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
        """Replace the function ``toctree`` of the page by one that remembers its results."""
        if not pagename.startswith("_modules/"):
            return
        resolve = context["toctree"]

        def toctree(**options: Any) -> str:
            key = (pagename.count("/"), *sorted(options.items()))
            if key not in computed:
                computed[key] = resolve(**options)
            return computed[key]

        context["toctree"] = toctree

    app.connect("html-page-context", share_toctree, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
