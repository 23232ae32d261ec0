"""docs/files.md names every file, in the words of the file itself."""

from __future__ import annotations

from file_index import PAGE, file_index


def test_the_page_of_files_is_current():
    assert PAGE.read_text() == file_index(), "run `make files`"
