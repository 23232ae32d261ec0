"""Futures: what they say of themselves, and to those that wait too short or forget to wait."""

from concurrent.futures import Future

import pytest

from paceline.client.futures import PacelineFuture


def test_a_wait_that_ends_too_early_says_after_how_long_and_that_the_call_goes_on():
    answer = Future()
    future = PacelineFuture(answer)
    with pytest.raises(TimeoutError, match=r"^no answer within 0 s; the call goes on$"):
        future.result(timeout=0)
    answer.set_exception(TimeoutError("the call's own"))
    with pytest.raises(TimeoutError, match="^the call's own$"):
        future.result(timeout=0)
