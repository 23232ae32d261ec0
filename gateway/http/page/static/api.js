// Calls of the gateway with the caller's key, which is kept in this tab's session storage and is never part of an address.

const PLACE = "paceline-key";

/** A refusal, with the gateway's sentence. */
export class Problem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function problemOf(response) {
  const told = await response.json().catch(() => null);
  return new Problem(told?.error?.message ?? told?.detail ?? `the gateway answered ${response.status}`, response.status);
}

export class Api {
  /** `onKeyRefused` is called with the gateway's sentence when it does not admit the key. */
  constructor(onKeyRefused) {
    this.onKeyRefused = onKeyRefused;
  }

  get key() {
    return sessionStorage.getItem(PLACE) ?? "";
  }

  set key(value) {
    if (value) sessionStorage.setItem(PLACE, value);
    else sessionStorage.removeItem(PLACE);
  }

  async fetch(path, options = {}) {
    const headers = { ...options.headers };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    if (response.ok) return response;
    const problem = await problemOf(response);
    if (problem.status === 401) this.onKeyRefused(problem.message);
    throw problem;
  }

  /** Return the JSON of a path below /ui/api; a query's arrays are repeated, and undefined is left out. */
  async get(path, query = {}, options = {}) {
    const search = new URLSearchParams();
    for (const [name, value] of Object.entries(query))
      for (const one of [value].flat()) if (one !== undefined && one !== null) search.append(name, one);
    const response = await this.fetch(`/ui/api/${path}${search.size ? `?${search}` : ""}`, options);
    return response.json();
  }

  post(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    return this.fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  }
}

/** Yield the data of a response's server-sent events. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      left += value;
      const whole = left.split("\n\n");
      left = whole.pop();
      for (const event of whole) {
        const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("");
        if (data) yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Wait; ends early, without an error, if `signal` aborts. */
export function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}
