// What the policy was asked and what it answered, with the rewards.

import { ago, h, keyed, number, say } from "/ui/dom.js";
import { Latest } from "/ui/latest.js";

const PAGE = 50;
const ORDERS = {
  newest: (a, b) => b.number - a.number,
  best: (a, b) => rank(b) - rank(a) || b.number - a.number,
  worst: (a, b) => (Number.isNaN(rewardOf(a)) ? Infinity : rank(a)) - (Number.isNaN(rewardOf(b)) ? Infinity : rank(b)) || b.number - a.number,
};

function rewardOf(rollout) {
  return rollout.reward === null ? NaN : Number(rollout.reward);
}

/** Those without a reward come last. */
function rank(rollout) {
  const reward = rewardOf(rollout);
  return Number.isNaN(reward) ? -Infinity : reward;
}

export class Rollouts {
  constructor(app) {
    this.app = app;
    this.rollouts = [];
    this.latest = new Latest(app);
    this.step = h("input", { id: "rollouts-step", type: "number", min: "0", step: "1", placeholder: "All", onchange: () => this.begin() });
    this.order = h("select", { id: "rollouts-order", onchange: () => this.show() },
      h("option", { value: "newest" }, "newest first"), h("option", { value: "best" }, "highest reward first"), h("option", { value: "worst" }, "lowest reward first"));
    this.newer = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.begin() }, "Show newer ones");
    this.older = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.readOlder() }, "Load older ones");
    this.summary = h("span", { class: "muted", role: "status" });
    this.list = h("ol", { class: "rollouts" });
    this.empty = h("p", { class: "muted empty", hidden: true });
    this.element = h("div", {},
      h("div", { class: "toolbar" },
        h("div", { class: "field" }, h("label", { for: "rollouts-step" }, "Step"), this.step),
        h("div", { class: "field" }, h("label", { for: "rollouts-order" }, "Order"), this.order),
        this.summary, this.newer),
      this.empty, this.list, this.older);
  }

  open(run) {
    if (run === this.run) return undefined;
    this.run = run;
    this.step.value = "";
    return this.begin();
  }

  /** Look for newer rollouts while the tab is open. */
  tick() {
    if (this.isReading || !this.run || this.step.value) return undefined;
    if (!this.rollouts.length) return this.begin();
    const after = Math.max(...this.rollouts.map((one) => one.number));
    return this.latest.read("newer", this.path, { after, limit: 1 }, (told) => (this.newer.hidden = !told.rollouts.length));
  }

  get path() {
    return `runs/${encodeURIComponent(this.run)}/rollouts`;
  }

  begin() {
    this.newer.hidden = true;
    if (!this.run) return this.take([], true);
    this.isReading = true;
    return this.latest.read("page", this.path, { step: this.step.value || undefined, limit: PAGE }, (told) => this.take(told.rollouts, true), () => (this.isReading = false));
  }

  readOlder() {
    const before = Math.min(...this.rollouts.map((one) => one.number));
    const query = { step: this.step.value || undefined, before, limit: PAGE };
    return this.latest.read("page", this.path, query, (told) => this.take(told.rollouts, false));
  }

  take(found, isFirst) {
    this.rollouts = isFirst ? found : [...this.rollouts, ...found];
    this.older.hidden = found.length === 0 || this.rollouts.at(-1).number <= 1;
    this.show();
  }

  show() {
    const rewards = this.rollouts.map(rewardOf).filter(Number.isFinite);
    const mean = rewards.length ? `, mean reward ${number(rewards.reduce((a, b) => a + b, 0) / rewards.length)}` : "";
    say(this.summary, this.rollouts.length ? `${this.rollouts.length} shown${mean}` : "");
    this.empty.hidden = this.rollouts.length > 0;
    say(this.empty, this.step.value ? `No rollouts of step ${this.step.value}.` : "No rollouts yet. A loop logs them with training.log_rollouts([...]).");
    const ordered = [...this.rollouts].sort(ORDERS[this.order.value]);
    keyed(this.list, ordered, (one) => `${this.run} ${one.number}`, makeRollout);
  }
}

function makeRollout(one) {
  const extras = Object.entries(one.extras).map(([name, value]) => h("span", { class: "extra" }, h("b", {}, name), ` ${value}`));
  const reward = one.reward === null ? "no reward" : number(Number(one.reward));
  return h("li", { class: "rollout" },
    h("div", { class: "rollout-head" }, h("span", { class: "reward" }, reward), h("span", { class: "muted" }, `step ${number(one.step)} · ${ago(one.time)}`), ...extras),
    h("pre", { class: "said" }, h("span", { class: "prompt" }, one.prompt), h("mark", {}, one.completion)));
}
