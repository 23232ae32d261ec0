"""The gateway's page in a real browser, on real services with a training loop beside. `make test-page` runs it."""

from __future__ import annotations

import re
from time import time

import httpx
import pytest
from loops import HOSTILE

pytest.importorskip("playwright")  # installed apart from what other tests need

from browser import NARROW, expect

pytestmark = [pytest.mark.page, pytest.mark.services]


def test_the_key_is_asked_for_once_and_is_in_no_address(tab, cluster, loops):
    view = tab()
    view.page.goto(view.address)
    view.page.get_by_label("API key").fill("wrong")
    view.page.get_by_role("button", name="Show runs").click()
    expect(view.page.get_by_role("alert")).to_contain_text("the API key is not known")
    view.sign_in(cluster.api_key)
    view.choose(loops["slow"].run_id)
    view.page.reload()
    expect(
        view.page.get_by_role("heading", name=loops["slow"].training.get_info().user_metadata["name"])
    ).to_be_visible()
    assert not [url for url in [*view.urls, view.page.url] if cluster.api_key in url]
    view.page.get_by_role("button", name="Forget key").click()
    view.page.reload()
    expect(view.page.get_by_label("API key")).to_be_visible()


def test_a_curve_shows_a_step_within_a_second_of_its_end(tab, cluster, loops):
    view, fast = tab(), loops["fast"]
    view.sign_in(cluster.api_key)
    view.choose(fast.run_id)
    expect(view.page.locator("#connection")).to_have_text("live")
    expect(view.value("reward")).to_be_visible()
    late = []
    for _ in range(3):
        fast.training.log({"marker": float(fast.step)}).result()
        fast.step += 1
        fast.training.log({"marker": float(fast.step)}).result()
        start = time()
        expect(view.value("marker")).to_have_text(str(fast.step))
        late.append(time() - start)
    assert min(late) < 1
    with fast.running():
        before = fast.step
        expect(view.page.locator("#run-facts")).to_contain_text(re.compile(rf"step (?!{before} )\d+ "))
        expect(view.page.locator(f'[data-run-id="{fast.run_id}"] .dot')).to_have_class("dot training")
    metrics = fast.training.metrics()
    expect(view.page.locator("#run-facts")).to_contain_text(f"step {metrics.steps[-1]} ")
    for name in ("loss:mean", "grad_norm"):
        shown = float(view.value(name).inner_text().replace(",", ""))
        assert shown == pytest.approx(metrics[name][-1], rel=1e-3)


def test_text_of_users_stays_text(tab, cluster, loops):
    view = tab()
    view.sign_in(cluster.api_key)
    view.choose(loops["hostile"].run_id)
    expect(view.page.locator("#run-name")).to_have_text(HOSTILE)
    expect(view.page.locator(f'[data-run-id="{loops["hostile"].run_id}"] .entry-name')).to_have_text(HOSTILE)
    assert view.page.title() == f"{HOSTILE} – Paceline"
    assert view.page.locator("img").count() == 0


def test_the_page_allows_no_scripts_from_elsewhere_and_no_html_in_text(address):
    answer = httpx.get(address)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    again = httpx.get(address, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert httpx.get(f"{address}/ui/api/runs").status_code == 401
    assert httpx.get(f"{address}/ui/../apis.py").status_code == 401


def test_a_narrow_screen_has_one_column(tab, cluster, loops):
    view = tab(NARROW)
    view.sign_in(cluster.api_key)
    expect(view.page.locator("#runs-list")).to_be_hidden()
    view.choose(loops["slow"].run_id)
    expect(view.page.locator("#runs-list")).to_be_hidden()
    expect(view.value("reward")).to_be_visible()
    assert view.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_crosshair_reads_all_curves_also_by_keys(tab, cluster, loops):
    view, slow = tab(), loops["slow"]
    view.sign_in(cluster.api_key)
    view.choose(slow.run_id)
    expect(view.value("reward")).to_be_visible()
    plot = view.page.locator('[data-chart="loss"] .plot')
    plot.focus()
    plot.press("ArrowRight")
    metrics = slow.training.metrics()
    expect(view.page.locator('[data-chart="grad_norm"] .at')).to_have_text("1")
    for name in ("loss:mean", "grad_norm"):
        assert float(view.value(name).inner_text()) == pytest.approx(metrics[name][0], rel=1e-3)
