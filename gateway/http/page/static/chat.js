// A conversation with any version, through the OpenAI route and with the same key.

import { events } from "/ui/api.js";
import { h, keyed, say } from "/ui/dom.js";

const MOST_VERSIONS = 20;

export class Chat {
  constructor(app) {
    this.app = app;
    this.messages = [];
    this.model = h("select", { id: "chat-model" });
    this.mode = h("select", { id: "chat-mode", onchange: () => this.forget() }, h("option", { value: "chat" }, "chat"), h("option", { value: "text" }, "plain text"));
    this.temperature = h("input", { id: "chat-temperature", type: "number", min: "0", max: "2", step: "0.1", value: "0.7" });
    this.tokens = h("input", { id: "chat-tokens", type: "number", min: "1", step: "1", value: "256" });
    this.log = h("ol", { class: "messages", "aria-live": "polite" });
    this.text = h("textarea", { id: "chat-text", rows: "3", onkeydown: (event) => this.onKey(event) });
    this.send = h("button", { type: "submit" }, "Send");
    this.stop = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.control?.abort() }, "Stop");
    this.problem = h("p", { class: "problem", role: "alert" });
    const field = (label, control) => h("div", { class: "field" }, h("label", { for: control.id }, label), control);
    this.element = h("form", { class: "chat", onsubmit: (event) => this.submit(event) },
      h("div", { class: "toolbar" }, field("Weights", this.model), field("As", this.mode), field("Temperature", this.temperature), field("Most tokens", this.tokens)),
      this.log, this.problem,
      h("label", { for: "chat-text", class: "muted" }, "Message (Enter sends, Shift+Enter starts a line)"), this.text,
      h("div", { class: "buttons" }, this.send, this.stop, h("button", { type: "button", class: "quiet", onclick: () => this.forget() }, "Clear")));
  }

  open(run) {
    const isNew = run !== this.run;
    this.run = run;
    this.offer(isNew);
  }

  tick() {
    this.offer(false);
  }

  /** Offer the chosen run's versions, the other runs and the base model. */
  offer(choose) {
    const run = this.app.runs.find((one) => one.run_id === this.run);
    const versions = Array.from({ length: Math.min(MOST_VERSIONS, run?.latest_version ?? 0) }, (_, place) => run.latest_version - place);
    const name = run?.name || run?.run_id;
    const offered = [
      ...(versions.length ? [{ id: run.run_id, label: `${name}, newest` }] : []),
      ...versions.map((version) => ({ id: `${run.run_id}@${version}`, label: `${name}, version ${version}` })),
      ...this.app.runs.filter((one) => one.run_id !== this.run && one.latest_version).map((one) => ({ id: one.run_id, label: `${one.name || one.run_id}, newest` })),
      ...[...new Set(this.app.runs.map((one) => one.base_model))].map((base) => ({ id: base, label: `${base} (base model)` })),
    ];
    const before = this.model.value;
    keyed(this.model, offered, (one) => one.id, (one) => h("option", { value: one.id }), (option, one) => say(option, one.label));
    this.model.value = !choose && offered.some((one) => one.id === before) ? before : (offered[0]?.id ?? "");
  }

  forget() {
    this.control?.abort();
    this.messages = [];
    say(this.problem, "");
    this.show();
  }

  onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.element.requestSubmit();
  }

  async submit(event) {
    event.preventDefault();
    const text = this.text.value;
    if (!text.trim() || this.control) return;
    say(this.problem, "");
    this.text.value = "";
    const isChat = this.mode.value === "chat";
    const asked = { role: "user", content: text };
    const sent = [...this.messages.filter((one) => one.content), asked].map(({ role, content }) => ({ role, content }));
    const answer = { role: "assistant", content: "", from: "" };
    this.messages.push(asked, answer);
    const control = (this.control = new AbortController());
    this.busy(true);
    try {
      const body = { model: this.model.value, stream: true, temperature: Number(this.temperature.value), max_tokens: Number(this.tokens.value) };
      const response = await this.app.api.post(isChat ? "/v1/chat/completions" : "/v1/completions", { ...body, ...(isChat ? { messages: sent } : { prompt: text }) }, control.signal);
      answer.from = servedBy(response.headers);
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        const told = JSON.parse(data);
        if (told.error) throw new Error(told.error.message);
        const choice = told.choices?.[0];
        answer.content += choice?.delta?.content ?? choice?.text ?? "";
        this.show();
      }
    } catch (problem) {
      if (!control.signal.aborted) {
        say(this.problem, problem.message);
        this.text.value ||= text;
        this.messages = this.messages.filter((one) => one !== asked && one !== answer);
      }
    }
    if (this.control === control) this.control = null;
    this.busy(false);
  }

  busy(isBusy) {
    this.send.disabled = isBusy;
    this.stop.hidden = !isBusy;
    this.show();
  }

  show() {
    const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    const numbered = this.messages.map((message, place) => ({ message, key: `${place} ${message.role}` }));
    keyed(this.log, numbered, ({ key }) => key,
      ({ message }) => {
        const who = h("span", { class: "muted" });
        const content = h("pre", { class: "said" });
        return Object.assign(h("li", { class: message.role }, who, content), { who, content });
      },
      (item, { message }) => {
        say(item.who, message.role === "user" ? "You" : message.from || "…");
        say(item.content, message.content);
      });
    if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
  }
}

/** Say which weights answered, as the gateway's headers name them. */
function servedBy(headers) {
  const version = headers.get("X-Paceline-Version");
  const hash = headers.get("X-Paceline-Blake3")?.slice(0, 12);
  if (version) return `version ${version} of ${headers.get("X-Paceline-Run")}, ${hash}`;
  return headers.get("X-Paceline-Checkpoint") || `${headers.get("X-Paceline-Model")}, the base model`;
}
