"""What CI jobs install: this build of deliver, from where it was installed itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any
from urllib.parse import urlsplit

from delivery import __version__

NAME = "deliver[demo]"
PUBLISHED = f"{NAME}=={__version__}"
"""The requirement of this version on a package index."""


def own_package(tell: Callable[[str], object]) -> str | None:
    """A pip requirement for this build if it was installed from a URL or a git repository.

    None if it came from a package index; also if it came from a file or folder of this machine, which no
    job can reach: then `tell` gets a note.
    """
    origin = _origin()
    url = _without_credentials(str(origin.get("url", "")))
    if url.startswith("file:"):
        tell(
            f"note: this build was installed from {url}, but jobs install {PUBLISHED} from a package index;\n"
            "if it is not published there, pass --package REQUIREMENT or set DELIVER_PACKAGE in the CI system"
        )
        return None
    if not url:
        return None
    if (version := origin.get("vcs_info")) is not None:
        return f"{NAME} @ {version['vcs']}+{url}@{version['commit_id']}"
    digest = origin.get("archive_info", {}).get("hashes", {}).get("sha256")
    return f"{NAME} @ {url}" + (f"#sha256={digest}" if digest else "")


def _without_credentials(url: str) -> str:
    """CI definitions are committed. The user of an SSH URL is part of the address."""
    parts = urlsplit(url)
    if not parts.scheme.startswith("http"):
        return url
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _origin() -> dict[str, Any]:
    """direct_url.json, which installers write unless they installed from an index (PEP 610)."""
    try:
        text = distribution("deliver").read_text("direct_url.json")
    except PackageNotFoundError:
        return {}
    found = json.loads(text) if text else {}
    return found if isinstance(found, dict) else {}
