"""The `nsa-flex` command: needs the `cli` extra, `pip install 'nsa-flex[cli]'`.

Exit codes: 0 all well, 1 the command ran and found something wrong, 2 wrong usage.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `nsa-flex` script; exits with one of the codes above."""
    try:
        from nsa_flex.cli.app import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        print(
            f"nsa-flex: the command line needs {missing}, which is not installed; "
            "install it with: pip install 'nsa-flex[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    app(prog_name="nsa-flex")
