import pytest

from gates.sources.directory import DirectorySource
from gates.sources.source import SourceRefused


@pytest.fixture
def source(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "inner" / "vocab.txt").write_bytes(b"abcdef")
    return DirectorySource(tmp_path)


def test_a_directory_lists_its_files_with_size_and_place(source, tmp_path):
    items = source.list(source.resolve())
    assert [(item.path, item.size, item.place) for item in items] == [
        ("config.json", 2, tmp_path / "config.json"),
        ("inner/vocab.txt", 6, tmp_path / "inner" / "vocab.txt"),
    ]


def test_a_file_opens_at_an_offset_only_while_it_is_the_same_file(source, tmp_path):
    resolved = source.resolve()
    item = next(item for item in source.list(resolved) if item.path == "inner/vocab.txt")
    with source.open(resolved, item, offset=0, tag=None) as opened:
        assert (opened.offset, opened.size, b"".join(opened.chunks)) == (0, 6, b"abcdef")
    with source.open(resolved, item, offset=4, tag=opened.tag) as again:
        assert (again.offset, b"".join(again.chunks)) == (4, b"ef")
    item.place.unlink()
    item.place.write_bytes(b"ABCDEFGH")
    with source.open(resolved, item, offset=4, tag=opened.tag) as changed:
        assert (changed.offset, changed.size, b"".join(changed.chunks)) == (0, 8, b"ABCDEFGH")


def test_a_directory_has_no_revision_until_its_files_were_read(source):
    resolved = source.resolve()
    assert (resolved.kind, resolved.location, resolved.revision) == ("directory", None, None)
    files = [("config.json", "sha256:" + "0" * 64, 2), ("inner/vocab.txt", "sha256:" + "1" * 64, 6)]
    pinned = resolved.pinned(files)
    assert pinned.revision == resolved.pinned(files[::-1]).revision
    assert pinned.pinned([]) == pinned
    assert pinned.revision != resolved.pinned(files[:1]).revision


def test_what_is_no_directory_or_gone_is_refused(source, tmp_path):
    with pytest.raises(SourceRefused) as refused:
        DirectorySource(tmp_path / "nothing").resolve()
    assert refused.value.code == "directory-missing"
    resolved = source.resolve()
    (item, *_) = source.list(resolved)
    item.place.unlink()
    with pytest.raises(SourceRefused) as refused, source.open(resolved, item, offset=0, tag=None):
        raise AssertionError("it was opened")
    assert (refused.value.code, refused.value.file) == ("file-unreadable", "config.json")
