"""Pages of rows and rollouts, and curves thinned to some points."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_service.limits.disk_guard import NO_GUARD
from trainer_service.metrics.log_file import LogFile
from trainer_service.metrics.pages import evenly, newest_rollouts, next_rollouts, next_rows, thinned_rows
from trainer_service.metrics.rows import RowSource, StoredRollout, StoredRow
from trainer_service.metrics.shrinking import drop_oldest, thin

NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def rows(tmp_path):
    """A thousand rows, of which each tenth has a reward too."""
    log = LogFile(tmp_path / "metrics.jsonl", StoredRow, 1 << 30, thin, NO_GUARD, "team")
    values = [{"loss": 1.0 / step, **({"reward": 1.0} if step % 10 == 0 else {})} for step in range(1, 1001)]
    log.append([StoredRow(step=0, source=RowSource.TRAINER, time=NOW, values=each) for each in values])
    return log


@pytest.fixture
def rollouts(tmp_path):
    log = LogFile(tmp_path / "rollouts.jsonl", StoredRollout, 1 << 30, drop_oldest, NO_GUARD, "team")
    log.append([StoredRollout(step=number // 10, time=NOW, completion=f"{number}") for number in range(1, 101)])
    return log


def numbers(found):
    return [row.number for row in found]


def test_pages_follow_each_other_to_the_end(rows):
    after, found = 0, []
    while (page := next_rows(rows, after, page_size=300)).rows:
        found += numbers(page.rows)
        after = page.next_after
    assert found == list(range(1, 1001))
    assert next_rows(rows, 1000).next_after == 1000


def test_named_values_come_alone_and_rows_without_them_are_left_out(rows):
    page = next_rows(rows, 50, ["reward"], 3)
    assert numbers(page.rows) == [60, 70, 80]
    assert all(row.values == {"reward": 1.0} for row in page.rows)
    assert next_rows(rows, 0, ["absent"]).rows == []


def test_a_page_of_large_rows_ends_before_it_is_too_large_for_a_reply(tmp_path):
    log = LogFile(tmp_path / "metrics.jsonl", StoredRow, 1 << 30, thin, NO_GUARD, "team")
    values = {f"{number:0128}": 1.0 for number in range(256)}
    log.append([StoredRow(step=0, source=RowSource.CLIENT, time=NOW, values=values)] * 200)
    page = next_rows(log, 0, page_size=10_000)
    assert 0 < len(page.rows) < 200
    assert page.next_after == page.rows[-1].number
    assert 2 <= len(thinned_rows(log, 0, (), 10_000).rows) < 100


@pytest.mark.parametrize("most", [1, 2, 3, 7, 100, 999, 1000, 5000])
def test_a_thinned_curve_has_at_most_so_many_points_its_ends_among_them(rows, most):
    found = numbers(thinned_rows(rows, 0, (), most).rows)
    assert len(found) == min(most, 1000)
    assert found[-1] == 1000
    assert most == 1 or found[0] == 1


def test_a_curve_of_one_value_is_thinned_by_itself(rows):
    assert numbers(thinned_rows(rows, 0, ["reward"], 4).rows) == [10, 340, 670, 1000]
    assert numbers(thinned_rows(rows, 500, ["reward"], 2).rows) == [510, 1000]
    assert thinned_rows(rows, 0, ["absent"], 4).rows == []


@given(st.integers(0, 500), st.integers(2, 500))
def test_points_are_evenly_spaced(count, most):
    chosen = evenly(count, most)
    assert len(chosen) == min(count, most)
    assert chosen == sorted(set(chosen))
    gaps = {later - earlier for earlier, later in pairwise(chosen)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_rollouts_come_newest_first_or_after_a_number(rollouts):
    assert numbers(newest_rollouts(rollouts, 0, None, 3)) == [100, 99, 98]
    assert numbers(newest_rollouts(rollouts, 98, None, 2)) == [97, 96]
    assert numbers(newest_rollouts(rollouts, 1, None, 2)) == []
    assert numbers(newest_rollouts(rollouts, 0, 3, 100)) == list(range(39, 29, -1))
    assert numbers(next_rollouts(rollouts, 0, None, 2)) == [1, 2]
    assert numbers(next_rollouts(rollouts, 33, 3, 100)) == list(range(34, 40))
    assert len(newest_rollouts(rollouts, 0, None, 0)) == 100
