"""Make a project and its first tokens: `python -m registry.bootstrap --admin-token-file F --runner-token-file G`.

A file that does not exist is made with a new secret, mode 0600. Settings come from the environment, and the database
must be migrated. Repeating the command changes nothing.
"""

import argparse
import sys
from pathlib import Path

from pydantic import ValidationError

from registry import projects
from registry.auth import ADMIN_PROJECT
from registry.service import Service
from registry.settings import Settings, explain
from schemas.api import RoleName
from schemas.problems import Problem


def main(arguments: list[str]) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m registry.bootstrap", description="Make a project's first tokens.")
    parser.add_argument("--project", default=ADMIN_PROJECT, help="name of the project")
    parser.add_argument("--admin-token-file", type=Path, required=True, help="file of the administrator's token")
    parser.add_argument("--runner-token-file", type=Path, required=True, help="file of the runners' token")
    chosen = parser.parse_args(arguments)
    try:
        settings = Settings()
    except ValidationError as error:
        sys.stderr.write(f"settings: {explain(error)}\n")
        return 2
    service = Service.build(settings)
    try:
        secrets: dict[RoleName, str] = {
            "admin": projects.secret_from(chosen.admin_token_file),
            "runner": projects.secret_from(chosen.runner_token_file),
        }
        projects.bootstrap(service, chosen.project, secrets)
    except (Problem, OSError, ValueError) as error:
        sys.stderr.write(f"bootstrap: {error}\n")
        return 2
    finally:
        service.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
