// A run's versions, and which samplers hold each.

import { ago, h, number, table } from "/ui/dom.js";
import { Latest } from "/ui/latest.js";

export class Versions {
  constructor(app) {
    this.app = app;
    this.latest = new Latest(app);
    this.element = h("div", {}, h("p", { class: "muted empty" }, "Reading…"));
  }

  open(run) {
    if (run !== this.run) this.shown = undefined;
    this.run = run;
    return this.tick();
  }

  tick() {
    if (!this.run) return undefined;
    return this.latest.read("versions", `runs/${encodeURIComponent(this.run)}/versions`, {}, (told) => this.show(told));
  }

  show(told) {
    const words = JSON.stringify([told, Math.floor(Date.now() / 10_000)]);
    if (words === this.shown) return;
    this.shown = words;
    const rows = told.versions.map((one) => [
      number(one.version), one.step === null ? "" : number(one.step), h("code", { title: one.blake3 }, one.blake3.slice(0, 12)),
      one.held.map((held) => `${held.sampler}${held.acknowledged ? "" : " (loading)"}`).join(", "), one.time ? ago(one.time) : "",
    ]);
    const watching = told.samplers.length ? `Watching samplers: ${told.samplers.join(", ")}.` : "No sampler watches the trainer, so new versions reach none.";
    this.element.replaceChildren(
      table("Versions", [">Version", ">Step", "BLAKE3", "Held by", "Published"], rows, "None was published yet."),
      h("p", { class: "muted" }, watching, " Hashes are those of versions that a sampler has loaded or that were compared."));
  }
}
