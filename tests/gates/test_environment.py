import base64
import hashlib
import time

import pytest

from gates import environment as environments
from gates.environment import EnvironmentAltered, NotInstalled, environment


def install(place, name, version="1.0", *, requires=(), files=None):
    """Write a distribution as an installer does."""
    files = files or {f"{name}/__init__.py": b"x = 1\n"}
    info = f"{name}-{version}.dist-info"
    lines = [f"Requires-Dist: {requirement}" for requirement in requires]
    files = {**files, f"{info}/METADATA": "\n".join([f"Name: {name}", f"Version: {version}", *lines, ""]).encode()}
    records = []
    for path, content in files.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        records.append(f"{path},sha256={digest},{len(content)}")
    (place / info / "RECORD").write_text("\n".join([*records, f"{info}/RECORD,,", ""]))
    return place / info


def identify(place, name="engine"):
    return environment(name, path=[str(place)])


def test_the_same_files_have_the_same_digest_wherever_they_are_installed(tmp_path):
    for place in ("a", "b"):
        install(tmp_path / place, "engine")
    first, second = identify(tmp_path / "a"), identify(tmp_path / "b")
    assert first == second
    assert (first.version, first.distributions, first.files) == ("1.0", ("engine==1.0",), 2)
    assert first.digest.startswith("sha256:")


def test_what_an_installer_adds_is_no_part_of_the_identity(tmp_path):
    install(tmp_path / "a", "engine")
    info = install(tmp_path / "b", "engine")
    (info / "INSTALLER").write_text("uv")
    (info / "direct_url.json").write_text("{}")
    with (info / "RECORD").open("a") as record:
        record.write(f"{info.name}/INSTALLER,sha256=x,2\n{info.name}/direct_url.json,,\n")
        record.write("engine/__pycache__/__init__.cpython-311.pyc,,\n../../../bin/engine,sha256=x,1\n")
    assert identify(tmp_path / "a") == identify(tmp_path / "b")


@pytest.mark.parametrize(
    "change",
    [{"version": "1.1"}, {"files": {"engine/__init__.py": b"x = 2\n"}}, {"files": {"engine/b.py": b"x = 1\n"}}],
)
def test_another_version_file_or_content_is_another_environment(tmp_path, change):
    install(tmp_path / "a", "engine")
    install(tmp_path / "b", "engine", **change)
    assert identify(tmp_path / "a").digest != identify(tmp_path / "b").digest


def test_what_it_requires_belongs_to_it_but_not_its_extras_or_other_platforms(tmp_path):
    install(tmp_path, "engine", requires=["kernels>=2", "absent; extra == 'all'", "absent2; sys_platform == 'win32'"])
    install(tmp_path, "kernels", "2.0", requires=["engine"])
    install(tmp_path, "stranger")
    assert identify(tmp_path).distributions == ("engine==1.0", "kernels==2.0")
    before = identify(tmp_path).digest
    install(tmp_path, "kernels", "2.0", requires=["engine"], files={"kernels/__init__.py": b"changed\n"})
    assert identify(tmp_path).digest != before


def test_a_file_changed_after_installing_is_refused(tmp_path):
    install(tmp_path, "engine")
    (tmp_path / "engine/__init__.py").write_bytes(b"x = 2\n")
    with pytest.raises(EnvironmentAltered, match="is not the file that was installed"):
        identify(tmp_path)


def test_a_file_removed_after_installing_is_refused(tmp_path):
    install(tmp_path, "engine")
    (tmp_path / "engine/__init__.py").unlink()
    with pytest.raises(EnvironmentAltered, match="cannot be read"):
        identify(tmp_path)


def test_a_file_recorded_without_hash_is_refused(tmp_path):
    info = install(tmp_path, "engine")
    with (info / "RECORD").open("a") as record:
        record.write("engine/late.py,,\n")
    with pytest.raises(EnvironmentAltered, match="without hash"):
        identify(tmp_path)


def test_a_distribution_without_a_record_is_refused(tmp_path):
    info = install(tmp_path, "engine")
    (info / "RECORD").unlink()
    with pytest.raises(EnvironmentAltered, match="no record"):
        identify(tmp_path)


def test_an_engine_or_requirement_that_is_not_installed_is_refused(tmp_path):
    with pytest.raises(NotInstalled, match="engine is not installed"):
        identify(tmp_path)
    install(tmp_path, "engine", requires=["kernels"])
    with pytest.raises(NotInstalled, match="kernels is not installed"):
        identify(tmp_path)


def settled(place):
    """Name an environment whose files are so old that it is remembered."""
    time.sleep(environments._SETTLED_SECONDS + 0.05)
    return identify(place)


def test_files_that_nobody_touched_are_not_read_again(tmp_path, monkeypatch):
    install(tmp_path, "engine", requires=["kernels"])
    install(tmp_path, "kernels")
    found, read = settled(tmp_path), []
    monkeypatch.setattr(environments, "_verify", read.append)
    assert identify(tmp_path) == found
    assert read == []


def test_files_that_were_written_a_moment_ago_are_read_again(tmp_path):
    install(tmp_path, "engine")
    identify(tmp_path)
    (tmp_path / "engine/__init__.py").write_bytes(b"x = 2\n")
    with pytest.raises(EnvironmentAltered, match="is not the file that was installed"):
        identify(tmp_path)


@pytest.mark.parametrize("change", ["altered", "removed", "moved", "recorded", "editable", "uninstalled"])
def test_a_change_after_it_was_named_shows(tmp_path, change):
    install(tmp_path, "engine", requires=["kernels"])
    info = install(tmp_path, "kernels")
    settled(tmp_path)
    file = tmp_path / "kernels/__init__.py"
    if change == "altered":
        file.write_bytes(b"x = 2\n")
    elif change == "removed":
        file.unlink()
    elif change == "moved":
        (tmp_path / "another.py").write_bytes(b"x = 3\n")
        (tmp_path / "another.py").replace(file)
    elif change == "recorded":
        (info / "RECORD").write_text((info / "RECORD").read_text() + "kernels/late.py,,\n")
    elif change == "editable":
        (info / "direct_url.json").write_text('{"url": "file:///kernels", "dir_info": {"editable": true}}')
    else:
        (info / "METADATA").unlink()
        info.rename(tmp_path / "kernels.gone")
    with pytest.raises((EnvironmentAltered, NotInstalled)):
        identify(tmp_path)
