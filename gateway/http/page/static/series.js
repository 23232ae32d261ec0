// What was measured of a run: rows of the same step joined, later ones over earlier ones, as paceline.Metrics does.

import { Problem, events, pause } from "/ui/api.js";

const FIRST_POINTS = 2000;
const MOST_POINTS = 6000;
const AGAIN_MILLISECONDS = 2000;

export class Series {
  /** `label` is the run's name. */
  constructor(label = "") {
    this.label = label;
    /** Steps by their numbers: {step, time, values}. */
    this.points = new Map();
    /** Who logs a value: "trainer" or "client". */
    this.sources = new Map();
    /** Number of the last row. */
    this.last = 0;
    /** Grows with each change. */
    this.changes = 0;
    this.sorted = [];
  }

  add(rows) {
    for (const row of rows) {
      let point = this.points.get(row.step);
      if (!point) {
        this.points.set(row.step, (point = { step: row.step, time: row.time, values: {} }));
        this.sorted.push(point);
        if (this.sorted.length > 1 && this.sorted.at(-2).step > row.step) this.sorted.sort((a, b) => a.step - b.step);
      }
      for (const [name, value] of Object.entries(row.values)) {
        point.values[name] = Number(value);
        if (!this.sources.has(name) || row.source === "trainer") this.sources.set(name, row.source);
      }
      this.last = Math.max(this.last, row.number);
    }
    if (this.sorted.length > MOST_POINTS) this.thin();
    if (rows.length) this.changes += 1;
  }

  /** Drop every second step of the older half. */
  thin() {
    const half = this.sorted.length >> 1;
    this.sorted = this.sorted.filter((_, place) => place > half || place % 2 === 0);
    this.points = new Map(this.sorted.map((point) => [point.step, point]));
  }

  names() {
    return [...this.sources.keys()].sort();
  }

  /** Return where and what a value was: xs ascending, ys, without the steps that lack it. `by` is "step" or "time". */
  curve(name, by) {
    const xs = [];
    const ys = [];
    const start = this.sorted[0]?.time ?? 0;
    let last = -Infinity;
    for (const point of this.sorted) {
      const value = point.values[name];
      if (value === undefined) continue;
      // Steps that were made again after an earlier checkpoint are later in time; a curve's x must not go back.
      last = by === "step" ? point.step : Math.max(last, point.time - start);
      xs.push(last);
      ys.push(value);
    }
    return { xs, ys };
  }

  newest(name) {
    for (let place = this.sorted.length - 1; place >= 0; place -= 1) {
      const value = this.sorted[place].values[name];
      if (value !== undefined) return value;
    }
    return undefined;
  }
}

/** Return the name of the value that sums a run up: its reward if the client logs one, else the loss. */
export function headline(names) {
  const rewards = [...names].filter((name) => /reward/i.test(name)).sort((a, b) => a.length - b.length || (a < b ? -1 : 1));
  return rewards[0] ?? ([...names].includes("loss:mean") ? "loss:mean" : undefined);
}

/**
 * Fill a series with a run's rows and follow it until `signal` aborts. `onChange` is called after each change, and
 * `onState` with "live", or with the sentence that says why nothing is followed at the moment.
 */
export async function follow(api, runId, series, signal, onChange, onState) {
  while (!signal.aborted) {
    let failed = false;
    try {
      if (!series.last) await read(api, runId, series, signal, onChange);
      const response = await api.fetch(`/ui/api/runs/${encodeURIComponent(runId)}/watch?after=${series.last}`, { signal });
      onState("live");
      for await (const data of events(response)) {
        const told = JSON.parse(data);
        if (told.error) throw new Problem(told.error.message, told.error.code === "INVALID_API_KEY" ? 401 : 0);
        series.add(told.rows);
        if (told.rows.length) onChange();
      }
    } catch (problem) {
      if (signal.aborted) return;
      failed = true;
      onState(problem.message);
      if (problem.status === 401 || problem.status === 404) return;
    }
    await pause(failed ? AGAIN_MILLISECONDS : 0, signal);
  }
}

/** Read what is there. A run with more rows than fit is read again by value, so that each curve has its points. */
async function read(api, runId, series, signal, onChange) {
  const path = `runs/${encodeURIComponent(runId)}/rows`;
  const first = await api.get(path, { points: FIRST_POINTS }, { signal });
  series.add(first.rows);
  onChange();
  const isThinned = first.rows.length && first.rows.at(-1).number > first.rows.length;
  if (!isThinned) return;
  for (const name of series.names()) {
    const last = series.last;
    const more = await api.get(path, { points: FIRST_POINTS / 2, name }, { signal });
    series.add(more.rows);
    series.last = last; // rows of other values may be missing up to this one's last
    onChange();
  }
}
