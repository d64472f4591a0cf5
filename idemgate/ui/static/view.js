// Parts that all screens use: tables, facts, buttons of verbs.

import { html, nothing, svg } from "./vendor/lit-html.js";
import { ago, count, isTime, labelOf, plain, span, time, title } from "./text.js";

const STORED = ["payload", "value", "checkpoint"]; // stored values of users
const BUTTONS = html`<span class="hidden">commands</span>`; // the head of a column of buttons
const NAMES = ["token", "version"]; // numbers that name something

const isRow = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isTable = (value) => Array.isArray(value) && value.length > 0 && value.every(isRow);
const isKnown = (value) =>
  !(value === null || value === undefined || value === "" || (typeof value === "object" && !Object.keys(value).length));

// The server's time, in ms since 1970.
export const nowOf = (snapshot) => Date.parse(snapshot.taken_at) + performance.now() - snapshot.received;

// A fact of an answer as text, or as a template of texts.
export function shown(name, value) {
  if (STORED.includes(name) && value !== undefined) {
    return html`<code class="value">${plain(typeof value === "string" ? value : JSON.stringify(value))}</code>`;
  }
  if (!isKnown(value)) return "–";
  if (name === "topic") return topicLink(value);
  if (name === "process") return processLink(value);
  if (isTime(value)) return html`<time datetime=${value}>${time(value)}</time>`;
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "number") {
    if (name.endsWith("_left") || name === "lateness") return span(value);
    if (name === "clock_ahead") return `${value < 0 ? "−" : ""}${span(Math.abs(value))}`;
    return Number.isInteger(value) && !NAMES.includes(name) ? count(value) : String(value);
  }
  if (Array.isArray(value)) return value.map((one) => plain(one)).join(", ");
  if (isRow(value)) {
    return Object.entries(value).map(
      ([key, one], n) => html`${n ? " · " : nothing}<span class="quiet">${plain(title(key))}</span> ${shown(key, one)}`,
    );
  }
  return plain(value);
}

// A table. A column is [title, (row) => content, class].
export const table = (name, columns, rows, kind = "") => html`
  <div class="scroll" tabindex="0" role="region" aria-label=${name}>
    <table class=${kind}>
      <thead>
        <tr>
          ${columns.map(([head, , kind]) => html`<th scope="col" class=${kind ?? ""}>${head || BUTTONS}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${rows.map(
          (row) =>
            html`<tr>
              ${columns.map(([, content, kind]) => html`<td class=${kind ?? ""}>${content(row)}</td>`)}
            </tr>`,
        )}
      </tbody>
    </table>
  </div>
`;

// A table of rows of an answer, without empty columns and empty buckets of durations. `more` are further columns.
export function rowsOf(name, rows, more = []) {
  const names = Object.keys(rows[0]).filter((one) =>
    rows.some((row) => isKnown(row[one]) && !(row[one] === 0 && /^[<>]/.test(one))),
  );
  const columns = names.map((one) => [
    title(one),
    (row) => shown(one, row[one]),
    rows.every((row) => !isKnown(row[one]) || typeof row[one] === "number") ? "number" : "",
  ]);
  return table(name, [...columns, ...more], rows);
}

// An answer: facts by name, and lists of rows as tables below them. An export is a file.
export function answerOf(answer) {
  if (answer instanceof Blob) return html`<p>${answer.size ? "The file is downloaded." : "Nothing matches."}</p>`;
  if (Array.isArray(answer)) return answer.length ? rowsOf("answer", answer) : html`<p>Nothing was found.</p>`;
  const known = Object.entries(answer).filter(([, value]) => isKnown(value));
  return html`
    <dl>
      ${known
        .filter(([, value]) => !isTable(value))
        .map(
          ([name, value]) =>
            html`<div>
              <dt>${title(name)}</dt>
              <dd>${shown(name, value)}</dd>
            </div>`,
        )}
    </dl>
    ${known
      .filter(([, value]) => isTable(value))
      .map(
        ([name, value]) =>
          html`<h3>${title(name)}</h3>
            ${rowsOf(title(name), value)}`,
      )}
  `;
}

// The button of a verb. It opens the form of the verb with these arguments; a verb that is not allowed has none.
export function button(app, name, given = {}, label = null, kind = "") {
  const verb = app.verbs.get(name);
  if (!verb?.allowed) return nothing;
  const danger = verb.loses ? "danger" : "";
  return html`<button class="${kind} ${danger}" title=${verb.about} @click=${() => app.open(verb, given)}>
    ${label ?? labelOf(verb.name)}
  </button>`;
}

export const link = (path, text) => html`<a href=${hashOf(path)}>${plain(text)}</a>`;

// The hash of a screen: names of the path, and its options.
export function hashOf([screen, ...names], options = {}) {
  const query = new URLSearchParams(Object.entries(options).filter(([, value]) => value)).toString();
  return `#/${[screen, ...names].map(encodeURIComponent).join("/")}${query ? `?${query}` : ""}`;
}

export const topicLink = (name) => link(["topic", name], name);
export const keyLink = (name) => html`<a href=${hashOf(["key"], { key: name })}>${plain(name)}</a>`;
export const processLink = (name) => link(["process", name], name);

export const sinceOf = (app, at) =>
  at ? html`<time datetime=${at} title=${time(at)}>${ago(at, nowOf(app.snapshot))}</time>` : "–";

// Two lines of rates: what came in (grey) and what ended.
export function sparkline(samples) {
  if (samples.length < 3) return nothing;
  const most = Math.max(...samples.map((one) => Math.max(one.in, one.out)), 1e-9);
  const line = (name) =>
    samples
      .map(
        (one, n) => `${((n / (samples.length - 1)) * 96 + 2).toFixed(1)},${(20 - (one[name] / most) * 18).toFixed(1)}`,
      )
      .join(" ");
  return html`<svg class="spark" viewBox="0 0 100 22" aria-hidden="true" focusable="false">
    ${["in", "out"].map((name) => svg`<polyline class=${name} points=${line(name)} />`)}
  </svg>`;
}
