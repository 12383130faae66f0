import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("schemas", "gates", "registry", "workers", "migrations")
SHIPPED = {"deploy/policies": "workers/deploy/policies", "deploy/suites": "workers/deploy/suites"}


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without the variables that would let Python find the checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A new environment with only the wheel in it; its requirements are seen through a path file."""
    home = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=home)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


def test_the_wheel_is_for_any_machine_and_has_our_top_level_names_only(wheel):
    assert wheel.name == "sluicegate-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
    assert top == {*PACKAGES, "sluicegate-0.1.0.dist-info"}


def test_every_file_of_the_packages_and_the_example_documents_is_in_the_wheel(wheel):
    expected = {
        f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, inside in (*((package, package) for package in PACKAGES), *SHIPPED.items())
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if not name.startswith("sluicegate-0.1.0.dist-info/")}
    assert found == expected
    assert {f"{package}/py.typed" for package in PACKAGES} <= found


@pytest.mark.parametrize("package", PACKAGES)
def test_an_installed_package_is_imported_from_the_wheel(installed, package):
    where = run(installed / "bin" / "python", "-c", f"import {package}; print({package}.__file__)", cwd=installed)
    assert Path(where.strip()).is_relative_to(installed)


def test_the_version_is_the_projects(installed):
    code = "import importlib.metadata as found; print(found.version('sluicegate'))"
    assert run(installed / "bin" / "python", "-c", code, cwd=installed).strip() == "0.1.0"


def test_the_installed_command_tells_its_commands(installed):
    said = run(installed / "bin" / "sluicegate", "--help", cwd=installed)
    for command in (
        "up",
        "demo",
        "login",
        "bundle",
        "policy",
        "suite",
        "target",
        "release",
        "gate",
        "evidence",
        "runner",
    ):
        assert re.search(rf"^\W*{command}\b", said, re.MULTILINE), said


def test_importing_the_client_pulls_in_no_part_of_the_service(installed):
    code = "import sys, registry.client, registry.cli; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = set(run(installed / "bin" / "python", "-c", code, cwd=installed).split())
    assert "httpx" in loaded
    assert not loaded & {"alembic", "celery", "fastapi", "psycopg", "redis", "sqlalchemy", "uvicorn", "workers"}


@pytest.mark.parametrize("kind", ["policies", "suites"])
def test_the_example_documents_are_found_in_the_installed_package(installed, kind):
    code = f"from workers.examples import examples; print(examples({kind!r}))"
    where = Path(run(installed / "bin" / "python", "-c", code, cwd=installed).strip())
    assert where.is_relative_to(installed)
    assert any(where.iterdir())
