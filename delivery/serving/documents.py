"""Text of an uploaded document: plain text or PDF."""

from __future__ import annotations

from io import BytesIO

from delivery.serving.problem import Problem

_MAX_PAGES = 2000


def extract_text(body: bytes, content_type: str) -> str:
    """The text of a PDF (known by its first bytes) or of a UTF-8 file; anything else is a 400."""
    if content_type.startswith("multipart/"):
        raise Problem(400, "form_not_taken", "send the bytes of the file as the body, not as a form")
    if body.startswith(b"%PDF-") or content_type.startswith("application/pdf"):
        return _pdf_text(body)
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Problem(400, "not_text", f"neither a PDF nor UTF-8 text: byte {error.start}") from error
    if "\0" in text:
        raise Problem(400, "not_text", "the file holds NUL bytes, so it is not text")
    return text


def _pdf_text(body: bytes) -> str:
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    try:
        reader = PdfReader(BytesIO(body))
        if reader.is_encrypted:
            raise Problem(400, "pdf_encrypted", "the PDF is encrypted")
        if len(reader.pages) > _MAX_PAGES:
            raise Problem(413, "pdf_too_long", f"the PDF has over {_MAX_PAGES} pages")
        text = "\n".join(page.extract_text() for page in reader.pages).strip()
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Problem(400, "pdf_unreadable", f"the PDF cannot be read: {error}") from error
    if not text:
        raise Problem(400, "pdf_without_text", "the PDF holds no text (a scan?)")
    return text
