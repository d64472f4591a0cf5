// How values are written for people. Every function returns text: nothing of a store becomes markup.

const UNSAFE = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}]/gu;

// Text with control characters and those that change its direction as escapes: they could hide or forge what is shown.
export const plain = (value) => String(value).replace(UNSAFE, (char) => `\\u{${char.codePointAt(0).toString(16)}}`);

export const title = (name) => name.replaceAll("_", " ");

const LABELS = { ls: "List", rm: "Delete" };
export const labelOf = (name) => LABELS[name] ?? name[0].toUpperCase() + name.slice(1).replaceAll("-", " ");

const counts = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const count = (n) => counts.format(n);

export const plural = (n, noun) => `${count(n)} ${n === 1 ? noun : `${noun}s`.replace(/ys$/, "ies")}`;

export const rate = (n) => (n === null ? "–" : n === 0 ? "0/s" : n < 10 ? `${n.toFixed(1)}/s` : `${count(n)}/s`);

// A duration in seconds, with two units at most.
export function span(seconds) {
  const s = Math.max(0, seconds);
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 60) return `${s < 10 ? s.toFixed(1).replace(/\.0$/, "") : Math.round(s)} s`;
  const whole = Math.round(s);
  const [days, hours, minutes] = [
    Math.floor(whole / 86400),
    Math.floor(whole / 3600) % 24,
    Math.floor(whole / 60) % 60,
  ];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return `${minutes} min ${whole % 60} s`;
}

// The bound of a bucket: null is above the largest one.
export const bound = (seconds) =>
  seconds === null ? "> 300 s" : seconds < 1 ? `≤ ${seconds * 1000} ms` : `≤ ${seconds} s`;

export const quantiles = (found) => (found ? `${bound(found.p50)} · ${bound(found.p99)}` : "–");

const TIME = /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d/;
export const isTime = (value) => typeof value === "string" && TIME.test(value);

// A time of the server, in UTC.
export const time = (text) => `${text.slice(0, 10)} ${text.slice(11, 19)} UTC`;

// A time as its distance from the server's now, in ms since 1970.
export function ago(text, now) {
  const seconds = (now - Date.parse(text)) / 1000;
  return seconds < 0 ? `in ${span(-seconds)}` : `${span(seconds)} ago`;
}

// What letters with the same failure have in common: the reason without numbers, ids and quoted texts.
export const normalize = (reason) =>
  plain(reason.split("\n")[0])
    .replace(/'[^']*'|"[^"]*"/g, "'…'")
    .replace(/\b[0-9a-f]{8}-[0-9a-f-]{27}\b|\b0x[0-9a-f]+\b|\b(?=[a-f]*\d)[0-9a-f]{8,}\b/gi, "…")
    .replace(/\d+(\.\d+)?/g, "…");
