// The page: the key, the list of runs, the chosen run and its tabs. The address has what is shown, and never the key.

import { Api, pause } from "/ui/api.js";
import { ago, bytes, h, keyed, number, say } from "/ui/dom.js";
import { Curves } from "/ui/curves.js";
import { Chat } from "/ui/chat.js";
import { Rollouts } from "/ui/rollouts.js";
import { headline, Series } from "/ui/series.js";
import { System } from "/ui/system.js";
import { Versions } from "/ui/versions.js";

const LIST_MILLISECONDS = 2000;
/** Runs whose newest values the list shows. */
const MOST_HEADLINES = 40;
const USED_LATELY_SECONDS = 30;
const get = (id) => document.getElementById(id);

class App {
  constructor() {
    this.api = new Api((message) => this.askForKey(message));
    this.runs = [];
    /** Whether the list was read. */
    this.isRead = false;
    this.run = "";
    this.other = "";
    this.tab = "curves";
    this.states = new Map();
    /** Newest values by run: {step, series}. */
    this.headlines = new Map();
    this.curves = new Curves(this);
    this.tabs = [
      { id: "curves", title: "Curves", panel: this.curves },
      { id: "rollouts", title: "Rollouts", panel: new Rollouts(this) },
      { id: "versions", title: "Versions", panel: new Versions(this) },
      { id: "chat", title: "Chat", panel: new Chat(this) },
      { id: "system", title: "System", panel: new System(this) },
    ];
    this.polling = null;
  }

  start() {
    for (const tab of this.tabs) {
      tab.button = h("button", {
        type: "button", role: "tab", id: `tab-${tab.id}`, "aria-controls": `panel-${tab.id}`, onclick: () => this.open(tab.id),
      }, tab.title);
      tab.box = h("section", { role: "tabpanel", id: `panel-${tab.id}`, "aria-labelledby": `tab-${tab.id}`, hidden: true }, tab.panel.element);
      get("tabs").append(tab.button);
      get("panels").append(tab.box);
    }
    get("tabs").addEventListener("keydown", (event) => this.moveTab(event));
    get("runs-filter").addEventListener("input", () => this.showRuns());
    get("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.api.key = get("key").value.trim();
      get("key").value = "";
      this.enter();
    });
    get("leave").addEventListener("click", () => {
      this.api.key = "";
      this.askForKey("");
    });
    addEventListener("hashchange", () => this.readAddress());
    document.addEventListener("visibilitychange", () => (document.hidden ? this.rest() : this.wake()));
    if (matchMedia("(max-width: 760px)").matches) get("runs-details").open = false;
    this.readAddress();
    this.enter();
  }

  /** Try the key, or no key: a gateway may need none. */
  async enter() {
    try {
      const me = await this.api.get("me");
      say(get("tenant"), me.key_name ? `${me.tenant} · ${me.key_name}` : me.tenant);
      get("leave").hidden = !this.api.key;
      get("sign-in").hidden = true;
      get("app").hidden = false;
      this.wake();
    } catch (problem) {
      if (problem.status !== 401) {
        this.tellConnection(problem.message);
        setTimeout(() => this.enter(), LIST_MILLISECONDS);
      }
    }
  }

  /** Ask for a key; `message` says why the last one was refused. */
  askForKey(message) {
    const had = this.api.key !== "";
    this.api.key = "";
    this.rest();
    this.runs = [];
    this.headlines.clear();
    this.curves.select([]);
    get("app").hidden = true;
    get("leave").hidden = true;
    get("sign-in").hidden = false;
    say(get("tenant"), "");
    this.tellConnection("");
    say(get("key-problem"), had ? message : "");
    get("key").focus();
  }

  wake() {
    if (this.polling || get("app").hidden || document.hidden) return;
    this.polling = new AbortController();
    this.poll(this.polling.signal);
    this.refreshPanel(this.polling.signal);
    this.curves.resume();
    this.openPanel();
  }

  /** Hold no connection while nobody looks. */
  rest() {
    this.polling?.abort();
    this.polling = null;
    this.curves.stop();
  }

  async poll(signal) {
    while (!signal.aborted) {
      try {
        const told = await this.api.get("runs", {}, { signal });
        this.runs = told.runs;
        const isFirst = !this.isRead;
        this.isRead = true;
        this.tellConnection("");
        this.choose();
        this.showRuns();
        if (isFirst) this.openPanel();
        await this.readHeadlines(signal);
      } catch (problem) {
        if (signal.aborted) return;
        this.tellConnection(problem.message);
      }
      await pause(LIST_MILLISECONDS, signal);
    }
  }

  /** Select the run of the address, else the newest. */
  choose() {
    const known = (id) => this.runs.some((run) => run.run_id === id);
    if (!known(this.run)) this.run = this.runs[0]?.run_id ?? "";
    if (!known(this.other) || this.other === this.run) this.other = "";
    this.follow();
  }

  follow() {
    const ids = [this.run, this.other].filter(Boolean);
    if (ids.join() !== this.curves.followed.map((one) => one.id).join()) this.curves.select(ids);
    this.curves.offer(this.runs, this.run, this.other);
    this.showRun();
  }

  select(id) {
    if (this.other === id) this.other = "";
    this.run = id;
    this.writeAddress();
    this.follow();
    this.showRuns();
    this.openPanel();
    if (matchMedia("(max-width: 760px)").matches) get("runs-details").open = false;
  }

  compareWith(id) {
    this.other = id;
    this.writeAddress();
    this.follow();
  }

  /** Read newest values of runs that have gone on since they were read. */
  async readHeadlines(signal) {
    for (const run of this.runs.slice(0, MOST_HEADLINES)) {
      const known = this.headlines.get(run.run_id) ?? { used: "", series: new Series() };
      this.headlines.set(run.run_id, known);
      const used = `${run.step} ${run.last_use}`;
      if (known.used === used || run.run_id === this.run || signal.aborted) continue;
      const query = known.series.last ? { after: known.series.last } : { points: 32 };
      const told = await this.api.get(`runs/${encodeURIComponent(run.run_id)}/rows`, query, { signal }).catch(() => null);
      if (!told) continue;
      known.series.add(told.rows);
      known.used = used;
    }
    this.showRuns();
  }

  summary(run) {
    const series = run.run_id === this.run ? this.curves.series : this.headlines.get(run.run_id)?.series;
    const name = series && headline(series.sources.keys());
    return name ? { name: name.replace(/:mean$/, ""), value: series.newest(name) } : null;
  }

  showRuns() {
    const wanted = get("runs-filter").value.trim().toLowerCase();
    const shown = this.runs.filter((run) => `${run.name} ${run.run_id}`.toLowerCase().includes(wanted));
    say(get("runs-count"), this.runs.length || "");
    get("runs-empty").hidden = this.runs.length > 0 || !this.isRead;
    keyed(get("runs-list"), shown, (run) => run.run_id, (run) => this.makeEntry(run), (entry, run) => this.updateEntry(entry, run));
  }

  makeEntry(run) {
    const name = h("span", { class: "entry-name" });
    const value = h("span", { class: "entry-value" });
    const facts = h("span", { class: "entry-facts muted" });
    const state = h("span", { class: "dot" });
    const button = h("button", { type: "button", "data-run-id": run.run_id, onclick: () => this.select(run.run_id) }, state, name, value, facts);
    return Object.assign(h("li", {}, button), { parts: { name, value, facts, state, button } });
  }

  updateEntry(entry, run) {
    const { name, value, facts, state, button } = entry.parts;
    const summary = this.summary(run);
    const words = stateOf(run);
    say(name, run.name || run.run_id);
    say(value, summary ? number(summary.value) : "");
    say(facts, `step ${number(run.step)} · ${words}${summary ? ` · ${summary.name}` : ""}`);
    state.className = `dot ${words}`;
    button.title = run.run_id;
    if (run.run_id === this.run) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }

  nameOf(id) {
    return this.runs.find((run) => run.run_id === id)?.name || id;
  }

  showRun() {
    if (!this.isRead) return;
    const run = this.runs.find((one) => one.run_id === this.run);
    say(get("run-name"), run ? run.name || run.run_id : "No run yet");
    document.title = run ? `${run.name || run.run_id} – Paceline` : "Paceline";
    const facts = run && [
      run.run_id, run.base_model, `step ${number(run.step)}`, run.latest_version ? `version ${run.latest_version}` : "not published",
      stateOf(run), `${bytes(run.volume_bytes)} on disk`, run.last_use && stateOf(run) === "idle" ? `used ${ago(run.last_use)}` : "",
      run.damage.length ? `damaged: ${run.damage.join(", ")}` : "",
    ];
    say(get("run-facts"), facts ? facts.filter(Boolean).join(" · ") : "A training loop that creates a run appears here.");
  }

  onSeries() {
    const run = this.runs.find((one) => one.run_id === this.run);
    const last = this.curves.series?.sorted.at(-1)?.step;
    if (run && last !== undefined && last > run.step) run.step = last; // rows come before the list is read again
    this.showRun();
    this.showRuns();
  }

  tellState(id, state) {
    this.states.set(id, state);
    if (id === this.run) this.tellConnection(state === "live" ? "" : state);
  }

  tellConnection(problem) {
    const isLive = !problem && this.states.get(this.run) === "live";
    const place = get("connection");
    say(place, problem || (isLive ? "live" : ""));
    place.className = `connection ${problem ? "broken" : isLive ? "live" : ""}`;
  }

  open(id) {
    this.tab = id;
    this.writeAddress();
    this.openPanel();
  }

  openPanel() {
    for (const tab of this.tabs) {
      const isOpen = tab.id === this.tab;
      tab.button.setAttribute("aria-selected", String(isOpen));
      tab.button.tabIndex = isOpen ? 0 : -1;
      tab.box.hidden = !isOpen;
      if (isOpen && tab.panel === this.curves) this.curves.draw();
      else if (isOpen && this.isRead) tab.panel.open(this.run);
    }
  }

  /** Have the open tab show what is new, also while the list of runs cannot be read. */
  async refreshPanel(signal) {
    while (!signal.aborted) {
      const { panel } = this.tabs.find((tab) => tab.id === this.tab);
      if (panel !== this.curves && this.isRead) {
        if (panel.run !== this.run) await panel.open(this.run);
        else await panel.tick();
      }
      await pause(LIST_MILLISECONDS, signal);
    }
  }

  moveTab(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    const place = this.tabs.findIndex((tab) => tab.id === this.tab);
    const next = this.tabs[(place + move + this.tabs.length) % this.tabs.length];
    this.open(next.id);
    next.button.focus();
  }

  readAddress() {
    const told = new URLSearchParams(location.hash.slice(1));
    this.run = told.get("run") ?? this.run;
    this.other = told.get("with") ?? "";
    const tab = told.get("tab") ?? "curves";
    this.tab = this.tabs.some((one) => one.id === tab) ? tab : "curves";
    if (this.runs.length) this.choose();
    this.openPanel();
  }

  writeAddress() {
    const told = new URLSearchParams();
    if (this.run) told.set("run", this.run);
    if (this.tab !== "curves") told.set("tab", this.tab);
    if (this.other) told.set("with", this.other);
    history.replaceState(null, "", `#${told}`);
  }
}

/** Return what a run does, in a word. */
function stateOf(run) {
  if (run.state === "lost") return "lost";
  return run.waiting || (run.last_use && Date.now() / 1000 - run.last_use < USED_LATELY_SECONDS) ? "training" : "idle";
}

new App().start();
