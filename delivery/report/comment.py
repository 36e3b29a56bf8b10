"""The comment on a merge request: the verdicts of one commit's checks, in one comment that is updated.

A hidden marker at its beginning names the pipeline; the next post finds the comment by it and
edits it: a branch that is pushed to twenty times has one comment, not sixty.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from delivery.errors import EnvironmentLacking
from delivery.gate.report import FILE_NAME, Report, Verdict, worst
from delivery.report import markdown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

TOKEN = "DELIVER_COMMENT_TOKEN"
"""Environment variable with the token that may comment."""
_TIMEOUT_S = 30
_PER_PAGE = 100

Done = Literal["made", "changed", "left as it is"]


@dataclass(frozen=True)
class Thread:
    """The comments of one merge request, over a REST API of GitLab's or GitHub's kind.

    comments: URL of the list, also that of new ones. one: URL of a comment, with `{}` for its id.
    """

    comments: str
    one: str
    headers: Mapping[str, str]
    change: str
    """HTTP method that replaces a comment."""

    def all(self) -> Iterator[dict[str, Any]]:
        """Every comment, oldest first, page after page."""
        page = 1
        while True:
            found = self._call("GET", self.comments, params={"per_page": _PER_PAGE, "page": page})
            yield from found
            if len(found) < _PER_PAGE:
                return
            page += 1

    def post(self, marker: str, text: str) -> Done:
        """Put `text` under `marker`: into the comment that begins with it, or into a new one.

        Raises EnvironmentLacking `comment-refused`.
        """
        body = f"{marker}\n{text}"
        mine = next((c for c in self.all() if str(c["body"]).startswith(marker)), None)
        if mine is None:
            self._call("POST", self.comments, json={"body": body})
            return "made"
        if str(mine["body"]).strip() == body.strip():
            return "left as it is"
        self._call(self.change, self.one.format(mine["id"]), json={"body": body})
        return "changed"

    def _call(self, method: str, url: str, **more: Any) -> Any:
        import requests

        try:
            answer = requests.request(
                method, url, headers=self.headers, timeout=_TIMEOUT_S, allow_redirects=False, **more
            )
        except requests.RequestException as error:
            raise _refused(url, type(error).__name__) from error
        if answer.status_code not in (200, 201):
            raise _refused(url, f"status {answer.status_code}: {answer.text[:200]}")
        try:
            return answer.json()
        except ValueError as error:
            raise _refused(url, "the answer is not JSON") from error


@dataclass(frozen=True, slots=True)
class NoThread:
    """Why nothing is posted."""

    reason: str


def thread_of(environ: Mapping[str, str]) -> Thread | NoThread:
    """The merge request that this CI job belongs to, from the CI system's own variables."""
    if environ.get("GITLAB_CI"):
        number, found = environ.get("CI_MERGE_REQUEST_IID", ""), _gitlab
    elif environ.get("GITHUB_ACTIONS"):
        match = re.match(r"refs/pull/(\d+)/", environ.get("GITHUB_REF", ""))
        number, found = match[1] if match else "", _github
    else:
        return NoThread("this is not a GitLab or GitHub job")
    if not number:
        return NoThread("this job belongs to no merge request")
    if not (token := environ.get(TOKEN, "").strip()):
        return NoThread(f"{TOKEN} is not set")
    return found(environ, number, token)


def marker(pipeline: str) -> str:
    """The first line of a comment, invisible where it is shown."""
    return f"<!-- deliver: {re.sub(r'[^A-Za-z0-9_./-]', '-', pipeline)} -->"


def reports_of(folder: Path, stages: Sequence[str], commit: str) -> list[Report]:
    """The reports that `publish` laid into `folder`, in the order of the stages.

    One of another commit is left out: runners keep their folders, and a check that did not run this
    time has an old one there.
    """
    out = []
    for stage in stages:
        path = folder / stage
        if (path / FILE_NAME).is_file():
            found = Report.read(path)
            if not commit or found.details.get("commit") == commit:
                out.append(found)
    return out


def text_of(reports: Sequence[Report], commit: str) -> str:
    """Markdown: the verdict of all, then each report; one that lets the release go on is folded."""
    whole = worst([r.verdict for r in reports])
    at = f" at `{commit[:12]}`" if commit else ""
    lines = [f"## {markdown.mark(whole.value)} · delivery{at}", ""]
    for report in sorted(reports, key=lambda r: r.verdict.releases):
        body = markdown.document(report)
        if report.verdict.releases and report.verdict is not Verdict.WAIVED:
            heading, _, rest = body.partition("\n")
            title = heading.removeprefix("### ")
            body = f"<details><summary>{title}</summary>\n\n{rest.strip()}\n\n</details>\n"
        lines.append(body)
    return markdown.cut("\n".join(lines))


def _gitlab(environ: Mapping[str, str], number: str, token: str) -> Thread:
    """https://docs.gitlab.com/api/notes/#merge-requests"""
    api, project = environ["CI_API_V4_URL"].rstrip("/"), environ["CI_PROJECT_ID"]
    notes = f"{api}/projects/{project}/merge_requests/{number}/notes"
    return Thread(notes, f"{notes}/{{}}", {"PRIVATE-TOKEN": token}, "PUT")


def _github(environ: Mapping[str, str], number: str, token: str) -> Thread:
    """https://docs.github.com/rest/issues/comments"""
    api = environ.get("GITHUB_API_URL", "https://api.github.com").rstrip("/")
    issues = f"{api}/repos/{environ['GITHUB_REPOSITORY']}/issues"
    headers = {
        "Authorization": f"Bearer {token}",
        "Accept": "application/vnd.github+json",
        "X-GitHub-Api-Version": "2022-11-28",
    }
    return Thread(f"{issues}/{number}/comments", f"{issues}/comments/{{}}", headers, "PATCH")


def _refused(url: str, why: str) -> EnvironmentLacking:
    return EnvironmentLacking(
        "comment-refused",
        f"no comment could be posted through {url}",
        why=why,
        hint=f"{TOKEN} needs the scope `api` on GitLab, `pull-requests: write` on GitHub",
    )
