"""The gateway's page in a real browser, on real services with a training loop beside. `make test-page` runs it."""

from __future__ import annotations

import re
from time import time

import httpx
import pytest
from loops import HOSTILE

from paceline import Rollout
from paceline.files.key_changes import add_key

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
    view.picture("page-narrow")
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


def test_another_run_is_drawn_over_the_first(tab, cluster, loops):
    view, slow, fast = tab(), loops["slow"], loops["fast"]
    view.sign_in(cluster.api_key)
    view.choose(fast.run_id)
    view.page.get_by_label("Compare with").select_option(slow.run_id)
    expect(view.value("learning_rate")).to_have_text("0.004")
    expect(view.value("learning_rate", "second")).to_have_text("0.001")
    view.page.get_by_label("Smoothing").fill("0.8")
    view.page.get_by_label("Filter runs").fill("arithmetic")
    expect(view.page.locator("#runs-list li")).to_have_count(2)
    view.picture("page")
    view.page.get_by_label("time", exact=True).check()
    expect(view.value("learning_rate", "second")).to_have_text("0.001")
    view.page.reload()
    expect(view.value("learning_rate", "second")).to_have_text("0.001")
    view.page.get_by_label("Compare with").select_option("")
    expect(view.value("learning_rate", "second")).to_have_count(0)


def test_values_are_found_by_name(tab, cluster, loops):
    view = tab()
    view.sign_in(cluster.api_key)
    view.choose(loops["slow"].run_id)
    expect(view.value("grad_norm")).to_be_visible()
    expect(view.value("tokens:sum")).to_have_count(0)
    view.page.get_by_label("Show", exact=True).fill("tokens:sum")
    expect(view.value("tokens:sum")).to_be_visible()
    expect(view.value("grad_norm")).to_have_count(0)


def test_rollouts_are_read_by_step_and_by_reward_as_text(tab, cluster, client, loops):
    view, slow = tab(), loops["slow"]
    view.sign_in(cluster.api_key)
    view.choose(slow.run_id)
    view.open("Rollouts")
    rollouts = view.page.locator(".rollout")
    newest = client.rollouts(slow.run_id)
    expect(rollouts.first).to_contain_text(newest[0].rollout.prompt)
    view.page.get_by_label("Order").select_option("best")
    best = max(row.rollout.reward for row in newest[:50])
    assert float(rollouts.first.locator(".reward").inner_text()) == best
    view.picture("page-rollouts")
    view.page.get_by_label("Step", exact=True).fill("2")
    view.page.get_by_label("Step", exact=True).press("Enter")
    expect(rollouts).to_have_count(1)
    expect(rollouts.first).to_contain_text("step 2 ")
    view.choose(loops["hostile"].run_id)
    expect(rollouts.first.locator("mark")).to_have_text(HOSTILE)
    expect(rollouts.first.locator(".extra")).to_have_text(f"env {HOSTILE}")
    assert view.page.locator("img").count() == 0
    loops["hostile"].training.log_rollouts([Rollout("later", "one", 2.0)]).result()
    view.page.get_by_role("button", name="Show newer ones").click()
    expect(rollouts.first.locator(".reward")).to_have_text("2")


def test_versions_show_their_steps_and_who_holds_them(tab, cluster, loops):
    view, slow = tab(), loops["slow"]
    view.sign_in(cluster.api_key)
    view.choose(slow.run_id)
    view.open("Versions")
    newest = view.page.locator("#panel-versions tbody tr").first
    run = slow.training.get_info()
    expect(newest.locator("td").nth(0)).to_have_text(str(run.latest_version))
    expect(newest.locator("td").nth(1)).to_have_text(str(run.latest_version * 4))
    expect(newest.locator("code")).to_have_text(re.compile("[0-9a-f]{12}"))
    expect(newest.locator("td").nth(3)).to_contain_text(re.compile(r"\w+"))
    expect(newest.locator("td").nth(3)).not_to_contain_text("loading")


def test_the_system_tab_shows_services_disk_and_commands_that_wait(tab, cluster, loops):
    view, slow = tab(), loops["slow"]
    view.sign_in(cluster.api_key)
    view.choose(slow.run_id)
    view.open("System")
    services = view.page.get_by_role("region", name="Services")
    expect(services.get_by_text("answers", exact=True)).to_have_count(3)
    disk = view.page.get_by_role("region", name="Disk by run")
    expect(disk.locator("tbody tr")).to_have_count(len(loops))
    expect(view.page.get_by_text("No command waits.")).to_be_visible()
    view.picture("page-system")
    cluster.trainer.kill()
    try:
        expect(services.get_by_text("does not answer")).to_be_visible()
    finally:
        cluster.trainer.start()
    expect(services.get_by_text("answers", exact=True)).to_have_count(3)


def test_a_chat_streams_from_the_chosen_version_and_names_it(tab, cluster, loops):
    view, slow = tab(), loops["slow"]
    view.sign_in(cluster.api_key)
    view.choose(slow.run_id)
    view.open("Chat")
    page = view.page
    page.get_by_label("Weights").select_option(f"{slow.run_id}@{slow.training.get_info().latest_version}")
    page.get_by_label("Most tokens").fill("12")
    page.get_by_label("Message").fill(f"12 + 30 = {HOSTILE}")
    page.get_by_label("Message").press("Enter")
    answer = page.locator(".messages .assistant")
    expect(answer).to_contain_text(f"version {slow.training.get_info().latest_version} of {slow.run_id}")
    expect(answer.locator("pre")).not_to_be_empty()
    expect(page.locator(".messages .user pre")).to_have_text(f"12 + 30 = {HOSTILE}")
    assert page.locator("img").count() == 0
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    page.get_by_label("As").select_option("text")
    page.get_by_label("Weights").select_option("model")
    page.get_by_label("Message").fill("12 + 30 =")
    page.get_by_role("button", name="Send").click()
    expect(answer).to_contain_text("the base model")
    page.get_by_label("Most tokens").fill("100000")
    page.get_by_label("Message").fill("too long")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("tabpanel", name="Chat").get_by_role("alert")).to_contain_text("max_tokens")
    expect(page.get_by_label("Message")).to_have_value("too long")


def test_another_tenant_sees_none_of_it(tab, cluster, loops):
    key = add_key(cluster.state / "keys.json", "another", "laptop")
    view = tab()
    view.sign_in(key)
    expect(view.page.get_by_text("No runs yet.")).to_be_visible()
    answer = httpx.get(
        f"{view.address}/ui/api/runs/{loops['slow'].run_id}/rows", headers={"Authorization": f"Bearer {key}"}
    )
    assert answer.status_code == 404
