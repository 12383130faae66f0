"""Every incident that files alone can show has a test under its number."""

import re
from pathlib import Path

STATIC = (
    *(1, 6, 7, 10, 12, 13, 15, 19, 20, 21, 22, 24, 30, 33, 34, 36, 40, 41, 46, 47, 49, 52, 54, 57, 59, 60, 61, 62, 66),
    *(70, 71, 76, 79, 80, 82, 84, 85, 86),
)


def test_every_incident_that_files_can_show_is_tested_under_its_number():
    text = "\n".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_static_*.py"))
    named = {int(number) for number in re.findall(r"^def test_c(\d{3})_", text, re.MULTILINE)}
    assert set(STATIC) <= named
    assert len(STATIC) == 38
