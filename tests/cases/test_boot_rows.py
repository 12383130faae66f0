"""Every incident about boots, processes and workers, and every failure class of theirs, has a test under its number."""

import re
from pathlib import Path

CASES = (69, 74, 121, 122, 126, 129, 133, 134, 135, 139, 141, 142, 147, 149, 150, 151)
CLASSES = (*range(18, 28), 63)


def test_every_incident_about_boots_and_workers_is_tested_under_its_number():
    text = "\n".join(path.read_text("utf-8") for path in Path(__file__).parents[1].rglob("test_*.py"))
    named = re.findall(r"^(?:async )?def test_([bc])0*(\d+)_", text, re.MULTILINE)
    assert {("c", str(number)) for number in CASES} | {("b", str(number)) for number in CLASSES} <= set(named)
