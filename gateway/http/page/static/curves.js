// The curves of a run, and of another one over them.

import { h, keyed, say } from "/ui/dom.js";
import { Chart, View } from "/ui/charts.js";
import { follow, headline, Series } from "/ui/series.js";

const REDRAW_MILLISECONDS = 200;
/** What the trainer records (docs/metrics.md), as charts. */
const KNOWN = [
  { id: "loss", title: "Loss", names: ["loss:mean"] },
  { id: "kl", title: "KL", names: ["kl:mean"] },
  { id: "grad_norm", title: "Gradient norm", names: ["grad_norm"] },
  { id: "learning_rate", title: "Learning rate", names: ["learning_rate"] },
  { id: "tokens_per_second", title: "Tokens per second", names: ["tokens_per_second"] },
  {
    id: "time", title: "Milliseconds by stage", stacked: true,
    names: ["time/forward_backward", "time/optim_step", "time/wait", "time/between"],
    short: ["forward, backward", "step", "waiting", "between steps"],
  },
  { id: "publish", title: "Milliseconds to publish", names: ["time/publish_stage", "time/publish_active"], short: ["staged", "active"] },
  { id: "difference", title: "Sampler against trainer, nats", names: ["difference/mean"] },
  { id: "memory", title: "Memory", names: ["memory/peak", "memory/gpu"], short: ["engine", "GPU"], format: "bytes" },
];
const NAMED = new Set(KNOWN.flatMap((kind) => kind.names));

/** Return the charts of these series: the reward, if clients log one, what the trainer records, what else clients log. */
function kindsOf(runs) {
  const sources = new Map(runs.flatMap((series) => [...series.sources]));
  const single = (name) => ({ id: `value:${name}`, title: name, names: [name] });
  const first = headline(sources.keys());
  const clients = [...sources].filter(([name, source]) => source === "client" && !NAMED.has(name)).map(([name]) => name);
  clients.sort();
  const rest = [...sources.keys()].filter((name) => !NAMED.has(name) && !clients.includes(name) && name !== first).sort();
  const known = KNOWN.filter((kind) => kind.names.some((name) => sources.has(name)));
  const others = clients.filter((name) => name !== first).map(single);
  const shown = first && !NAMED.has(first) ? [single(first), ...known, ...others] : [...known, ...others];
  return { shown, more: rest.map(single) };
}

export class Curves {
  constructor(app) {
    this.app = app;
    this.view = new View();
    this.charts = new Map();
    this.followed = [];
    this.other = h("select", { id: "compare", onchange: () => app.compareWith(this.other.value) });
    this.slider = h("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: "0", id: "smoothing", oninput: () => this.smooth() });
    this.weight = h("output", { for: "smoothing" }, "off");
    this.filter = h("input", { type: "search", id: "values-filter", placeholder: "All values", oninput: () => this.draw() });
    const axis = (by, label) => h("label", { class: "choice" },
      h("input", { type: "radio", name: "axis", value: by, checked: by === "step", onchange: () => this.turn(by) }), label);
    this.unzoom = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.view.zoomTo(null) }, "Show all");
    this.empty = h("p", { class: "muted empty", hidden: true }, "Nothing was measured yet. Curves begin with the first optimizer step.");
    this.grid = h("div", { class: "charts" });
    this.more = h("div", { class: "charts" });
    this.details = h("details", { class: "more", hidden: true, ontoggle: () => this.draw() }, h("summary", {}, "More values of the trainer"), this.more);
    this.element = h("div", {},
      h("div", { class: "toolbar" },
        h("div", { class: "field" }, h("label", { for: "compare" }, "Compare with"), this.other),
        h("div", { class: "field" }, h("label", { for: "smoothing" }, "Smoothing"), this.slider, this.weight),
        h("fieldset", { class: "field" }, h("legend", {}, "x"), axis("step", "step"), axis("time", "time")),
        h("div", { class: "field" }, h("label", { for: "values-filter" }, "Show"), this.filter),
        this.unzoom),
      this.empty, this.grid, this.details);
    const zoomTo = this.view.zoomTo.bind(this.view);
    this.view.zoomTo = (range) => {
      zoomTo(range);
      this.unzoom.hidden = !range;
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** Series of the first run, for others to read. */
  get series() {
    return this.followed[0]?.series;
  }

  /** Follow these runs and stop following others. */
  select(ids) {
    const kept = new Map(this.followed.map((one) => [one.id, one]));
    const isNew = ids[0] !== this.followed[0]?.id;
    this.followed = ids.map((id) => kept.get(id) ?? this.begin(id));
    for (const [id, one] of kept) if (!ids.includes(id)) one.control.abort();
    if (isNew) this.view.zoomTo(null);
    this.draw();
  }

  begin(id) {
    const one = { id, series: new Series(this.app.nameOf(id)), control: new AbortController() };
    follow(this.app.api, id, one.series, one.control.signal, () => this.drawSoon(), (state) => this.app.tellState(id, state));
    return one;
  }

  /** Follow again after `stop`, from the last row on. */
  resume() {
    this.followed = this.followed.map((one) => {
      const again = { ...one, control: new AbortController() };
      follow(this.app.api, one.id, one.series, again.control.signal, () => this.drawSoon(), (state) => this.app.tellState(one.id, state));
      return again;
    });
  }

  stop() {
    for (const one of this.followed) one.control.abort();
  }

  smooth() {
    this.view.weight = Number(this.slider.value);
    say(this.weight, this.view.weight ? this.view.weight.toFixed(2) : "off");
    this.draw();
  }

  turn(by) {
    this.view.by = by;
    this.view.zoomTo(null);
    this.draw();
  }

  drawSoon() {
    this.waiting ??= setTimeout(() => {
      this.waiting = undefined;
      this.draw();
    }, this.drawn && performance.now() - this.drawn < REDRAW_MILLISECONDS ? REDRAW_MILLISECONDS : 0);
  }

  /** Show what there is, if the tab is open. */
  draw() {
    this.app.onSeries();
    if (!this.element.isConnected || this.element.parentElement.hidden) return;
    this.drawn = performance.now();
    const runs = this.followed.map((one) => one.series);
    const ranges = runs.filter((series) => series.sorted.length).map((series) => {
      const first = series.sorted[0];
      const end = Math.max(...series.sorted.slice(-50).map((point) => point.time)) - first.time;
      return this.view.by === "step" ? [first.step, series.sorted.at(-1).step] : [0, end];
    });
    this.view.all = ranges.length ? [Math.min(...ranges.map(([low]) => low)), Math.max(...ranges.map(([, high]) => high))] : [0, 1];
    const wanted = this.filter.value.trim().toLowerCase();
    const matches = (kind) => [kind.title, ...kind.names].some((name) => name.toLowerCase().includes(wanted));
    const { shown, more } = kindsOf(runs);
    this.place(this.grid, shown.filter(matches), runs);
    const isOpen = this.details.open || wanted !== "";
    this.place(this.more, isOpen ? more.filter(matches) : [], runs);
    if (wanted && more.some(matches)) this.details.open = true;
    this.details.hidden = !more.length;
    this.empty.hidden = shown.length > 0 || !this.followed.length;
  }

  place(grid, kinds, runs) {
    const wanted = new Set(kinds.map((kind) => kind.id));
    for (const [id, chart] of this.charts)
      if (chart.grid === grid && !wanted.has(id)) {
        chart.close();
        this.charts.delete(id);
      }
    const chartOf = (kind) => {
      if (!this.charts.has(kind.id)) {
        const chart = new Chart(kind, this.view);
        chart.grid = grid;
        this.charts.set(kind.id, chart);
      }
      return this.charts.get(kind.id);
    };
    keyed(grid, kinds, (kind) => kind.id, (kind) => chartOf(kind).element);
    for (const kind of kinds) chartOf(kind).show(runs);
  }

  /** Offer the other runs for comparison. */
  offer(runs, selected, other) {
    const others = [{ run_id: "", name: "no other run" }, ...runs.filter((run) => run.run_id !== selected)];
    keyed(this.other, others, (run) => run.run_id, (run) => h("option", { value: run.run_id }), (option, run) => say(option, run.name || run.run_id));
    if (this.other.value !== other) this.other.value = other;
  }
}
