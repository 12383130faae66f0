from workers.embedded.logs import CappedLog


def test_a_full_log_begins_anew_at_a_line_and_the_oldest_goes(tmp_path):
    log = CappedLog(tmp_path / "web.log", cap_bytes=100, kept=2)
    for number in range(60):
        log.write(f"line {number:03}\n".encode())
    log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["web.log", "web.log.1", "web.log.2"]
    texts = [(tmp_path / name).read_text() for name in ("web.log.2", "web.log.1", "web.log")]
    assert all(0 < len(text) <= 100 for text in texts)
    kept = "".join(texts).splitlines()
    assert kept == [f"line {number:03}" for number in range(60 - len(kept), 60)]


def test_a_line_longer_than_a_file_is_cut_and_never_lost(tmp_path):
    log = CappedLog(tmp_path / "web.log", cap_bytes=100, kept=5)
    log.write(b"x" * 250 + b"\n")
    log.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 251


def test_the_tail_is_what_was_written_last_without_control_characters(tmp_path):
    log = CappedLog(tmp_path / "web.log")
    log.write(b"".join(b"line %d\n" % number for number in range(30)))
    log.write(b"\x1b[31mred\x1b[0m and unfinished")
    assert log.tail()[0] == "line 11"
    assert log.tail()[-2:] == ["line 29", "[31mred[0m and unfinished"]
    log.close()


def test_a_log_that_was_taken_away_with_its_folder_begins_anew(tmp_path):
    log = CappedLog(tmp_path / "web.log")
    log.write(b"before\n")
    (tmp_path / "web.log").unlink()
    tmp_path.rmdir()
    log.write(b"after\n")
    log.close()
    assert (tmp_path / "web.log").read_text() == "after\n"


def test_an_existing_log_is_continued(tmp_path):
    (tmp_path / "web.log").write_text("before\n")
    log = CappedLog(tmp_path / "web.log")
    log.write(b"after\n")
    log.close()
    assert (tmp_path / "web.log").read_text() == "before\nafter\n"
