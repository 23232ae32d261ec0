"""Which lines stay when a file is too long."""

from trainer_service.metrics.shrinking import Lines, drop_oldest, thin


def kept(keep, lines):
    return [step for step, is_kept in zip(lines.steps, keep, strict=True) if is_kept]


def test_every_second_step_of_the_trainers_rows_goes_from_the_older_half_with_all_its_rows():
    steps = [step for step in range(8) for _ in range(2)]
    lines = Lines([1] * 16, steps, [1] * 16)
    assert kept(thin(lines, 12), lines) == [0, 0, 2, 2, *steps[8:]]


def test_rows_of_clients_go_only_if_those_of_the_trainer_do_not_suffice():
    lines = Lines([1] * 8, range(8), [1, 0] * 4)
    assert kept(thin(lines, 8), lines) == list(range(8))
    assert kept(thin(lines, 6), lines) == [0, 2, 4, 5, 6, 7]


def test_the_oldest_go_if_thinning_does_not_suffice_and_the_newest_stays_whatever_its_size():
    lines = Lines([1, 1, 1, 100], range(4), [0] * 4)
    assert kept(thin(lines, 10), lines) == [3]
    assert kept(drop_oldest(lines, 102), lines) == [1, 2, 3]
    assert kept(drop_oldest(lines, 1000), lines) == [0, 1, 2, 3]


def test_nothing_is_dropped_from_what_is_empty():
    assert thin(Lines([], [], []), 1) == drop_oldest(Lines([], [], []), 1) == bytearray()
