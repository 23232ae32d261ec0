// Elements and their text. Nothing here takes HTML: what users wrote is always text.

/** Return an element. Properties that begin with "on" are listeners; null and false leave an attribute out. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set an element's text if it differs, so that selections and screen readers are left alone. */
export function say(element, text) {
  const wanted = String(text ?? "");
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** Have `parent` show one child per item, in order. Children of known keys are kept and updated. */
export function keyed(parent, items, keyOf, make, update) {
  const known = (parent.known ??= new Map());
  const left = new Set(known.keys());
  let before = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    left.delete(key);
    let child = known.get(key);
    if (!child) known.set(key, (child = make(item)));
    update?.(child, item);
    if (child === before) before = before.nextSibling;
    else parent.insertBefore(child, before);
  }
  for (const key of left) {
    known.get(key).remove();
    known.delete(key);
  }
}

/** Return a table; a column that begins with ">" is aligned to the right. Cells are text or elements. */
export function table(caption, columns, rows, empty) {
  const side = (place) => (columns[place].startsWith(">") ? "end" : null);
  const head = columns.map((name, place) => h("th", { scope: "col", class: side(place) }, name.replace(/^>/, "")));
  const body = rows.map((cells) => h("tr", {}, ...cells.map((cell, place) => h("td", { class: side(place) }, cell ?? ""))));
  if (!rows.length) body.push(h("tr", {}, h("td", { colspan: columns.length, class: "muted" }, empty)));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...body)));
}

/** Return a number as people read it, in about four digits. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e12) return value.toLocaleString("en");
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  return value.toLocaleString("en", size >= 100 ? { maximumFractionDigits: 1 } : { maximumSignificantDigits: 4 });
}

/** Return a number of bytes, such as 1.5 GB. */
export function bytes(value) {
  if (!Number.isFinite(value)) return number(value);
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let place = 0;
  while (Math.abs(value) >= 1000 && place < units.length - 1) {
    value /= 1000;
    place += 1;
  }
  return `${place && Math.abs(value) < 100 ? value.toFixed(1) : Math.round(value)} ${units[place]}`;
}

/** Return a duration in seconds, such as 3 h. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return number(seconds);
  for (const [name, length] of [["d", 86400], ["h", 3600], ["min", 60]])
    if (Math.abs(seconds) >= 2 * length) return `${Math.round(seconds / length)} ${name}`;
  return `${Math.abs(seconds) < 10 && seconds % 1 ? seconds.toFixed(1) : Math.round(seconds)} s`;
}

/** Return how long ago a time, in seconds since the epoch, was. */
export function ago(time) {
  return time ? `${duration(Math.max(0, Date.now() / 1000 - time))} ago` : "";
}
