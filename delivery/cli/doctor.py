"""Check this machine and print the command that fixes each problem."""

from __future__ import annotations

from dataclasses import asdict

import click

from delivery.cli._session import Session, json_option, pass_session, workdir_option
from delivery.errors import EnvironmentLacking

_MARKS = {"ok": "ok", "info": "--", "warning": "!!", "error": "XX"}


@click.command()
@json_option
@workdir_option
@pass_session
def command(session: Session, as_json: bool) -> int:
    """Check the driver, CUDA, torch, triton, GPUs, memory, disk and helm.

    The exit code is 6 if a problem keeps deliver from working on this machine, else 0.
    """
    from delivery.cli._doctor import examine, gather

    facts = gather(session.workdir)
    checks = examine(facts)
    broken = [check for check in checks if check.status == "error"]
    if as_json:
        out = {"ok": not broken, "checks": [asdict(c) for c in checks], "facts": facts.to_json()}
        session.answer(out)
    else:
        for check in checks:
            click.echo(f"{_MARKS[check.status]}  {check.name}: {check.found}")
            for label, text in (("why", check.why), ("fix", check.fix)):
                if text:
                    click.echo(f"      {label}: {text}")
        click.echo("this machine has problems" if broken else "this machine is ready")
    return EnvironmentLacking.exit_code if broken else 0
