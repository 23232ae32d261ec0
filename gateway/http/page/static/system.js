// The deployment: services, what waits for what, memory, and who fills the disk.

import { ago, bytes, duration, h, number, table } from "/ui/dom.js";
import { Latest } from "/ui/latest.js";

export class System {
  constructor(app) {
    this.app = app;
    this.latest = new Latest(app);
    this.element = h("div", { class: "system" }, h("p", { class: "muted empty" }, "Reading…"));
  }

  open(run) {
    this.run = run;
    return this.tick();
  }

  tick() {
    return this.latest.read("status", "status", {}, (told) => this.show(told));
  }

  show(told) {
    const parts = [this.services(told), this.queue(told), this.disk(told), this.runs(), this.quotas(told)];
    if (told.trainer_error) parts.unshift(h("p", { class: "problem", role: "alert" }, `Trainer: ${told.trainer_error}`));
    this.element.replaceChildren(...parts.filter(Boolean));
  }

  services(told) {
    const rows = told.services.map((one) => [
      `${one.kind} ${one.sampler_id}`.trim(), h("span", { class: one.reachable ? "good" : "problem" }, one.reachable ? "answers" : "does not answer"),
      one.version, one.start_time ? duration(Date.now() / 1000 - Date.parse(one.start_time) / 1000) : "",
      one.memory_bytes ? bytes(one.memory_bytes) : "", one.machine_total_bytes ? `${bytes(one.machine_available_bytes)} of ${bytes(one.machine_total_bytes)}` : "",
      one.unused_because,
    ]);
    return table("Services", ["Service", "State", "Version", ">Up", ">Memory", ">Machine has left", "Note"], rows, "None");
  }

  queue(told) {
    const rows = told.queue.map((one) => [
      one.run_name || one.run_id, number(one.seq_id), one.state, reason(one), one.executing_seconds ? duration(one.executing_seconds) : "",
    ]);
    return table("Queue", ["Run", ">Command", "State", "Waits for", ">Executing for"], rows, "No command waits.");
  }

  disk(told) {
    if (!told.disk) return null;
    const { free_bytes: free, total_bytes: total, used_bytes: own, limit_bytes: limit } = told.disk;
    const others = Math.max(0, total - free - own);
    const words = `${bytes(own)} are this tenant's${limit ? ` (of at most ${bytes(limit)})` : ""}, ${bytes(others)} are others', ${bytes(free)} of ${bytes(total)} are free`;
    return h("section", {}, h("h2", {}, "Disk"), bar([["own", own], ["others", others], ["free", free]], words), h("p", { class: "muted" }, words));
  }

  /** Who fills the disk: the runs, largest first. */
  runs() {
    const runs = [...this.app.runs].sort((a, b) => b.volume_bytes - a.volume_bytes).slice(0, 50);
    const most = runs[0]?.volume_bytes || 1;
    const rows = runs.map((run) => [
      run.name || run.run_id, bytes(run.volume_bytes), bar([["own", run.volume_bytes], ["free", most - run.volume_bytes]], bytes(run.volume_bytes)),
      run.last_use ? ago(run.last_use) : "",
    ]);
    return table("Disk by run", ["Run", ">On disk", "Share of the largest", "Last used"], rows, "No runs.");
  }

  quotas(told) {
    const show = (name, value) => (name.endsWith("bytes") ? bytes(value) : number(value));
    const rows = told.quotas.map((one) => [one.name, show(one.name, one.used), one.limit ? show(one.name, one.limit) : "no limit"]);
    return table("Quotas of this tenant", ["Quota", ">Used", ">Limit"], rows, "None");
  }
}

function reason(one) {
  if (one.commands_ahead) return `${number(one.commands_ahead)} command${one.commands_ahead > 1 ? "s" : ""} ahead`;
  return one.state === "executing" ? "" : one.state === "held" ? "an earlier command that has not arrived" : "its turn in the engine";
}

/** A bar of parts; widths are set by script, which the policy allows, and not by style attributes. */
function bar(parts, words) {
  const total = parts.reduce((sum, [, size]) => sum + size, 0) || 1;
  return h("div", { class: "bar", role: "img", "aria-label": words }, ...parts.map(([name, size]) => {
    const part = h("i", { class: name });
    part.style.width = `${(100 * size) / total}%`;
    return part;
  }));
}
