"""Where the databases of the tests lie, and what becomes of those that a killed session left in memory."""

import os
from pathlib import Path

from tests.support.postgres import NEW_SECONDS, PREFIX, hold, memory


def made(place: Path, name: str, age_seconds: float) -> Path:
    folder = place / f"{PREFIX}{name}"
    (folder / "data").mkdir(parents=True)
    began = folder.stat().st_mtime - age_seconds
    os.utime(folder, (began, began))
    return folder


def test_what_a_killed_session_left_is_removed_and_what_somebody_uses_or_begins_is_not(tmp_path: Path) -> None:
    left, new = made(tmp_path, "left", NEW_SECONDS + 60), made(tmp_path, "new", 0)
    used, other = made(tmp_path, "used", NEW_SECONDS + 60), tmp_path / "other"
    other.mkdir()
    held = hold(used)
    assert held is not None
    assert hold(used) is None
    assert memory(tmp_path, room_bytes=0) == tmp_path
    assert [one.exists() for one in (left, new, used, other)] == [False, True, True, True]
    os.close(held)
    memory(tmp_path, room_bytes=0)
    assert not used.exists()


def test_without_room_in_memory_a_disk_is_used(tmp_path: Path) -> None:
    assert memory(tmp_path, room_bytes=1 << 60) is None
    assert memory(tmp_path / "nowhere", room_bytes=0) is None
