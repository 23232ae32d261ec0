// Small charts of one run, or of two over each other, with one crosshair and one range of x for all.

import { bytes, duration, h, number, say } from "/ui/dom.js";

const HEIGHT = 150;
const FIRST = ["--curve-1", "--curve-2", "--curve-3", "--curve-4"];
const SECOND = ["--other-1", "--other-2", "--other-3", "--other-4"];

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Return the moving average of values with weight `weight` on the past, without a pull to zero at the start. */
export function smoothed(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** What all charts share. */
export class View {
  constructor() {
    this.by = "step";
    this.weight = 0;
    /** The range that was dragged; null shows all. */
    this.zoom = null;
    this.all = [0, 1];
    this.charts = new Set();
  }

  zoomTo(range) {
    this.zoom = range;
    for (const chart of this.charts) chart.rescale();
  }

  get range() {
    const [low, high] = this.zoom ?? this.all;
    return high > low ? [low, high] : [low - 0.5, low + 0.5];
  }

  formatX(value) {
    return this.by === "step" ? number(Math.round(value)) : duration(value);
  }
}

export class Chart {
  /** `kind`: {id, title, names, short, format, stacked}. */
  constructor(kind, view) {
    this.kind = kind;
    this.view = view;
    this.plot = null;
    this.columns = [];
    this.frame = h("div", { class: "plot", tabindex: "0", role: "img", onkeydown: (event) => this.onKey(event) });
    this.readout = h("dl", { class: "readout" });
    this.at = h("span", { class: "muted at" });
    this.element = h("figure", { class: "chart", "data-chart": kind.id },
      h("figcaption", {}, h("span", { class: "chart-title" }, kind.title), this.at), this.readout, this.frame);
    this.cells = new Map();
    this.resized = new ResizeObserver(() => {
      if (this.plot && this.frame.clientWidth) this.plot.setSize({ width: this.frame.clientWidth, height: HEIGHT });
    });
    this.resized.observe(this.frame);
    view.charts.add(this);
  }

  /** Whether heights are amounts, which are compared from zero up. */
  get fromZero() {
    return this.kind.stacked || this.kind.format === "bytes";
  }

  format(value) {
    return this.kind.format === "bytes" ? bytes(value) : number(value);
  }

  /** Show these runs, the first one and perhaps one over it. */
  show(runs) {
    this.isCompared = runs.length > 1;
    this.columns = runs.flatMap((series, run) => this.columnsOf(series, run));
    const drawn = this.columns.filter((column) => column.xs.length);
    this.element.hidden = !drawn.length;
    if (!drawn.length) return;
    const data = this.joined(drawn);
    const shape = drawn.map((column) => column.id).join("|") + this.view.weight + colour("--ink");
    if (!this.plot || this.shape !== shape) {
      this.plot?.destroy();
      this.shape = shape;
      this.plot = new uPlot(this.options(drawn), data, this.frame);
      this.plot.over.addEventListener("dblclick", () => this.view.zoomTo(null));
    } else {
      this.plot.setData(data);
    }
    this.drawn = drawn;
    this.tell();
  }

  columnsOf(series, run) {
    const { names, stacked } = this.kind;
    const own = (place) => this.kind.short?.[place] ?? names[place];
    const label = (place) => (!this.isCompared ? own(place) : names.length > 1 ? `${own(place)}${run ? ", other" : ""}` : series.label);
    const palette = run ? SECOND : FIRST;
    const columns = names.map((name, place) => ({
      id: `${run}:${name}`, run, name, label: label(place), colour: palette[place % palette.length],
      ...series.curve(name, this.view.by), newest: series.newest(name),
    })).filter((column) => column.xs.length);
    return stacked ? stackedColumns(columns, run) : columns;
  }

  /** Return the data that uPlot draws: x, then the curves (twice if they are smoothed). */
  joined(drawn) {
    const weight = this.view.weight;
    const tables = drawn.map((column) => {
      const heights = column.heights ?? column.ys;
      const ys = [column.ys, heights];
      if (weight) ys.push(smoothed(heights, weight));
      return [column.xs, ...ys];
    });
    const [xs, ...columns] = uPlot.join(tables);
    const per = weight ? 3 : 2;
    drawn.forEach((column, place) => (column.values = columns[per * place]));
    this.xs = xs;
    const finite = (values) => values.map((value) => (Number.isFinite(value) ? value : null));
    return [xs, ...columns.filter((_, place) => place % per).map(finite)];
  }

  options(drawn) {
    const { view } = this;
    const axis = { stroke: colour("--muted"), font: "11px system-ui, sans-serif", size: 24 };
    const grid = { stroke: colour("--line"), width: 1 };
    const lines = drawn.flatMap((column) => {
      const stroke = colour(column.colour);
      const fill = column.heights && !column.run ? stroke : undefined;
      const few = column.xs.length < 2;
      const line = { stroke, fill, width: 1.5, spanGaps: true, points: { show: few, size: 5 } };
      if (!view.weight) return [line];
      const raw = { stroke: `${stroke}55`, width: 1, spanGaps: true, points: { show: few }, show: !column.heights };
      return [raw, { ...line, width: 2 }];
    });
    return {
      width: this.frame.clientWidth || 300,
      height: HEIGHT,
      padding: [8, 16, 0, 0],
      legend: { show: false },
      cursor: {
        sync: { key: "runs", scales: ["x", null] },
        drag: { x: true, y: false, setScale: false },
        points: { size: 6 },
        y: false,
      },
      scales: { x: { time: false, range: () => view.range }, y: this.fromZero ? { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } : {} },
      axes: [
        { ...axis, grid, ticks: { show: false }, values: (_, splits) => splits.map((split) => (view.by === "step" && split % 1 ? "" : view.formatX(split))) },
        { ...axis, size: 54, grid, ticks: { show: false }, space: 28, values: (_, splits) => splits.map((split) => this.format(split)) },
      ],
      series: [{}, ...lines],
      hooks: {
        setCursor: [(plot) => this.tell(plot.cursor.idx)],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (width < 4) return;
          const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          view.zoomTo(range);
        }],
      },
    };
  }

  rescale() {
    if (this.plot && !this.element.hidden) this.plot.setData(this.plot.data);
  }

  /** Say the values under the crosshair, or the newest ones. */
  tell(place) {
    if (!this.drawn) return;
    const isAt = place !== null && place !== undefined && this.xs[place] !== undefined;
    say(this.at, isAt ? this.view.formatX(this.xs[place]) : "");
    const shown = [...this.drawn].sort((a, b) => a.run - b.run);
    const wanted = new Set(shown.map((column) => column.id));
    for (const [id, cell] of this.cells)
      if (!wanted.has(id)) {
        cell.element.remove();
        this.cells.delete(id);
      }
    for (const column of shown) {
      let cell = this.cells.get(column.id);
      if (!cell) {
        const swatch = h("i", { class: `swatch ${column.colour.slice(2)}`, "aria-hidden": "true" });
        cell = { label: document.createTextNode(""), value: h("dd", { "data-value": column.name, "data-run": column.run ? "second" : "first" }) };
        cell.element = h("div", {}, h("dt", {}, swatch, cell.label), cell.value);
        this.cells.set(column.id, cell);
        this.readout.append(cell.element);
      }
      say(cell.label, column.label);
      say(cell.value, this.format(isAt ? nearest(column.values, place) : column.newest));
    }
    const words = shown.map((column) => `${column.label} ${this.format(column.newest)}`).join(", ");
    this.frame.setAttribute("aria-label", `${this.kind.title}, newest: ${words}. Left and right arrows move the crosshair.`);
  }

  onKey(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.view.zoomTo(null);
    if (!steps || !this.plot) return;
    event.preventDefault();
    const from = this.plot.cursor.idx ?? (steps > 0 ? -1 : this.xs.length);
    const place = Math.min(this.xs.length - 1, Math.max(0, from + steps));
    this.plot.setCursor({ left: this.plot.valToPos(this.xs[place], "x"), top: HEIGHT / 3 }, true, true);
  }

  close() {
    this.view.charts.delete(this);
    this.resized.disconnect();
    this.plot?.destroy();
  }
}

/** Return the value at a place; if there is none, the one before it: curves do not have values at the same steps. */
function nearest(values, place) {
  while (place >= 0 && (values[place] === null || values[place] === undefined)) place -= 1;
  return place >= 0 ? values[place] : undefined;
}

/**
 * Return columns whose heights are the sums of the values up to theirs, the highest first, because each is painted over
 * the one before. A second run is one line: the sum.
 */
function stackedColumns(columns, run) {
  const steps = new Map();
  for (const column of columns)
    column.xs.forEach((x, place) => {
      if (!steps.has(x)) steps.set(x, {});
      steps.get(x)[column.name] = column.ys[place];
    });
  const xs = [...steps.keys()].sort((a, b) => a - b);
  const sums = xs.map(() => 0);
  const stacked = columns.map((column) => {
    const ys = xs.map((x) => steps.get(x)[column.name] ?? 0);
    ys.forEach((y, place) => (sums[place] += Number.isFinite(y) ? y : 0));
    return { ...column, xs, ys, heights: [...sums] };
  });
  if (!run || !stacked.length) return stacked.reverse();
  return [{ ...stacked.at(-1), id: `${run}:sum`, name: "sum", label: "sum, other", colour: SECOND[0], ys: sums, newest: sums.at(-1) }];
}
