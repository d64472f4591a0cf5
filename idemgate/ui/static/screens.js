// The screens. Each has a title, `load` for what the snapshot does not hold, and `draw`.

import { ask } from "./api.js";
import { html, nothing } from "./vendor/lit-html.js";
import { count, labelOf, normalize, plain, plural, quantiles, rate, span, time, title } from "./text.js";
import {
  answerOf,
  button,
  hashOf,
  keyLink,
  nowOf,
  processLink,
  rowsOf,
  shown,
  sinceOf,
  sparkline,
  table,
  topicLink,
} from "./view.js";

const SHOWN = 3; // findings of a kind; the others are behind a summary
const MOST_LETTERS = 1000; // of which the screen of dead letters makes groups

// The answer of a verb that reads; null if it is not allowed.
const read = (app, name, given) => (app.verbs.get(name).allowed ? ask(app.verbs.get(name), given) : null);

// -- what is wrong ----------------------------------------------------------------------------------------------------

export function findings(app, only = null) {
  const found = app.snapshot.findings.filter((one) => only === null || one.of === only);
  if (!found.length) return only === null ? html`<p class="fine">Nothing is wrong.</p>` : nothing;
  const boxes = [...groupBy(found, (one) => namesOf(one).join(" · ") || one.id)];
  const kinds = groupBy(boxes, ([, [first]]) => first.id);
  const list = (some) =>
    html`<ul class="findings">
      ${some.map(([, found]) => box(app, found))}
    </ul>`;
  return html`<section aria-label="What is wrong">
    ${[...kinds].map(([kind, some]) =>
      some.length <= SHOWN
        ? list(some)
        : html`${list(some.slice(0, SHOWN))}
            <details>
              <summary>${count(some.length - SHOWN)} more of ${kind}</summary>
              ${list(some.slice(SHOWN))}
            </details>`,
    )}
  </section>`;
}

function groupBy(all, nameOf) {
  const groups = new Map();
  for (const one of all) groups.set(nameOf(one), [...(groups.get(nameOf(one)) ?? []), one]);
  return groups;
}

const namesOf = (one) => [...new Set([one.of, one.key, one.where])].filter(Boolean).map(plain);

// All that is wrong with one subject, the most severe first.
const box = (app, found) => html`
  <li class=${found[0].severity}>
    ${found.map((one, n) => finding(app, one, n ? "" : namesOf(one).join(" · ")))}
  </li>
`;

const finding = (app, one, names) => html`
  <div class="finding">
    <div>
      <span class="severity ${one.severity}">${one.severity}</span>
      ${names ? html`<strong>${names}</strong>: ` : nothing}${plain(one.what)}${
        one.since ? html`, for ${span((nowOf(app.snapshot) - Date.parse(one.since)) / 1000)}` : nothing
      }.
      ${one.mend && !one.verb ? html`<code class="command">${plain(one.mend)}</code>` : nothing}
      <details>
        <summary>Why</summary>
        <p>Likely cause: ${one.cause}.</p>
        <p>What to do: ${one.advice}.</p>
        ${one.mend && one.verb ? html`<code class="command">${plain(one.mend)}</code>` : nothing}
        <p class="quiet">${one.id}, see ${one.link}</p>
      </details>
    </div>
    ${mend(app, one)}
  </div>
`;

// A verb that changes something is a button; one that reads is a link to its screen.
const SCREENS = {
  "worker ls": (given) => [["processes"], { of: given.of, key: given.key }],
  "worker show": (given) => [["process", given.process]],
  "topic show": (given) => [["topic", given.topic]],
  "key show": (given) => [["key"], { key: given.key, scope: given.scope }],
};

function mend(app, { id, verb, mend: line }) {
  if (!verb) return line ? copying(line) : nothing;
  const screen = SCREENS[verb.title];
  if (screen) {
    return html`<span class="buttons">
      <a class="button" href=${hashOf(...screen(verb.arguments))}>Look</a>
      ${id === "key-held" ? button(app, "key resolve", verb.arguments) : nothing}
    </span>`;
  }
  const [noun, name] = verb.title.split(" ");
  const of = noun === "dead" ? "letters" : verb.arguments.key === undefined ? noun : "message";
  return button(app, verb.title, verb.arguments, name === "reset-version" ? null : `${labelOf(name)} ${of}`);
}

// A browser gives the clipboard only to a page of this machine, and to one by TLS.
const copying = (line) =>
  navigator.clipboard
    ? html`<button title="Copy the command" @click=${() => navigator.clipboard.writeText(line)}>Copy</button>`
    : nothing;

// A server that evicts keys may have lost acts and histories: what is not shown may have happened.
const lossOf = (app) =>
  app.snapshot.findings.some((one) => one.id === "evicted")
    ? html`<p class="problem">The server evicted keys: acts and histories may be missing.</p>`
    : nothing;

// -- now --------------------------------------------------------------------------------------------------------------

const now = {
  title: () => "Now",
  draw(app) {
    const rows = app.snapshot.topics;
    const columns = [
      ["topic", (row) => topicLink(row.topic)],
      ["state", (row) => state(row)],
      ["in", (row) => rate(app.rates(row.topic).in), "number"],
      ["out", (row) => rate(app.rates(row.topic).out), "number"],
      ["last 5 min", (row) => sparkline(app.samples(row.topic))],
      ["due", (row) => count(row.due), "number"],
      ["oldest", (row) => age(app, row.oldest_due), "number"],
      ["in flight", (row) => count(row.in_flight), "number"],
      ["scheduled", (row) => count(row.scheduled), "number"],
      [
        "dead",
        (row) => (row.dead ? html`<a href=${hashOf(["dead", row.topic])}>${count(row.dead)}</a>` : "0"),
        "number",
      ],
      ["handler p50 · p99, 1 min", (row) => quantiles(row.handling), "number"],
      ["places", (row) => (row.places ? `${row.busy} of ${row.places}` : "–"), "number"],
      ["processes", (row) => versions(row.versions)],
    ];
    return rows.length ? table("Topics", columns, rows, "wide") : html`<p>The store holds no topic.</p>`;
  },
};

const QUIET = ["idle", "working", "scheduled"];
const state = (row) => html`<span class=${QUIET.includes(row.state) ? "" : "notable"}>${row.state}</span>`;
const age = (app, at) => (at ? span((nowOf(app.snapshot) - Date.parse(at)) / 1000) : "–");
const versions = (found) =>
  Object.entries(found)
    .map(([version, n]) => `${n} × ${plain(version)}`)
    .join(", ") || "–";

// -- a topic ----------------------------------------------------------------------------------------------------------

const TOPIC_VERBS = [
  "pause",
  "resume",
  "flush",
  "trigger",
  "messages",
  "peek",
  "transfer",
  "cancel",
  "bury",
  "move",
  "versions",
  "reset-version",
  "reshard",
  "delete",
];

const topic = {
  title: ([name]) => name,
  load: (app, [name]) => ({
    facts: read(app, "topic show", { topic: name }),
    work: read(app, "worker ls", { of: name }),
  }),
  draw(app, [name], _, { facts, work }) {
    const row = app.snapshot.topics.find((one) => one.topic === name);
    if (!row) return html`<p>The store holds no topic of this name.</p>`;
    const limits = [
      row.concurrency === null ? null : `${row.in_flight} of ${plural(row.concurrency, "delivery")} in flight`,
      facts?.policy.group_concurrency ? `${plural(facts.policy.group_concurrency, "delivery")} of a group` : null,
      row.rate === null ? null : `at most ${row.rate}/s`,
    ].filter(Boolean);
    const paused = row.paused;
    return html`
      <p class="lead">
        ${state(row)}${
          paused
            ? html`, since ${time(paused.since)}, by
              ${plain(paused.by)}${paused.reason ? html`: “${plain(paused.reason)}”` : nothing}`
            : nothing
        }${limits.length ? `. Limits: ${limits.join(", ")}` : ""}.
      </p>
      <div class="buttons">
        ${TOPIC_VERBS.filter((one) => one !== (paused ? "pause" : "resume")).map((one) =>
          button(app, `topic ${one}`, { topic: name }, null, one === "pause" || one === "resume" ? "primary" : ""),
        )}
      </div>
      <dl class="numbers">
        ${["ready", "waiting", "blocked", "scheduled", "in_flight", "dead"].map(
          (one) =>
            html`<div>
              <dt>${title(one)}</dt>
              <dd>
                ${
                  one === "dead" && row.dead
                    ? html`<a href=${hashOf(["dead", name])}>${count(row.dead)}</a>`
                    : count(row[one])
                }
              </dd>
            </div>`,
        )}
        <div>
          <dt>oldest due</dt>
          <dd>${age(app, row.oldest_due)}</dd>
        </div>
        <div>
          <dt>in · out</dt>
          <dd>${rate(app.rates(name).in)} · ${rate(app.rates(name).out)}</dd>
        </div>
        <div>
          <dt>handler p50 · p99, 1 min</dt>
          <dd>${quantiles(row.handling)}</dd>
        </div>
        <div>
          <dt>lateness p50 · p99, 1 min</dt>
          <dd>${quantiles(row.lateness)}</dd>
        </div>
        <div>
          <dt>places</dt>
          <dd>${row.places ? `${row.busy} of ${row.places}` : "–"}</dd>
        </div>
        <div>
          <dt>processes</dt>
          <dd>${versions(row.versions)}</dd>
        </div>
      </dl>
      ${
        facts?.blocked_groups?.length
          ? html`<h2>Groups that wait</h2>
              ${rowsOf("Groups that wait", facts.blocked_groups)}
              <div class="buttons">${button(app, "group ls", { topic: name }, "All groups")}</div>`
          : nothing
      }
      ${work ? workOf(app, work, name) : nothing}
      ${
        facts
          ? html`<details>
              <summary>Policy and counters</summary>
              ${answerOf({ policy: facts.policy, counters: facts.counters, slots: facts.slots })}
            </details>`
          : nothing
      }
    `;
  },
};

// Running work and failures, with the buttons of the messages of a topic.
function workOf(app, work, name = null) {
  const pending = (row) => row.next_at && row.attempt > 1 && app.snapshot.topics.some((one) => one.topic === row.of);
  return html`
    <h2>Running</h2>
    ${
      work.running.length
        ? table(
            "Running",
            [
              ...(name === null ? [["of", (row) => plain(row.of)]] : []),
              ["key", (row) => keyLink(row.key)],
              ["for", (row) => age(app, row.since), "number"],
              ["process", (row) => processLink(row.process)],
              ["location", (row) => html`<code>${plain(row.location || "–")}</code>`],
            ],
            work.running,
          )
        : html`<p>No process reports work.</p>`
    }
    <h2>Failing</h2>
    ${
      work.failures.length
        ? table(
            "Failing",
            [
              ...(name === null ? [["of", (row) => plain(row.of)]] : []),
              ["key", (row) => keyLink(row.key)],
              ["at", (row) => sinceOf(app, row.at), "number"],
              ["attempt", (row) => shown("attempt", row.attempt), "number"],
              ["next try", (row) => sinceOf(app, row.next_at), "number"],
              ["error", (row) => plain(row.error)],
              ...(work.failures.some((row) => row.others)
                ? [["others with this error", (row) => shown("others", row.others), "number"]]
                : []),
              ["", (row) => (pending(row) ? button(app, "topic bury", { topic: row.of, key: row.key }) : nothing)],
            ],
            work.failures,
          )
        : html`<p>No failure was reported lately.</p>`
    }
  `;
}

// -- dead letters -----------------------------------------------------------------------------------------------------

const WINDOWS = {
  "1h": ["the last hour", 3600],
  "24h": ["the last 24 hours", 86400],
  "7d": ["the last 7 days", 604800],
  all: ["any time", null],
};

const option = (value, selected, text) => html`<option value=${value} ?selected=${selected}>${text}</option>`;
const windowOf = (options) => (options.window in WINDOWS ? options.window : "24h");

// The filters of the verbs, from the URL.
function filtersOf(app, options) {
  const [, seconds] = WINDOWS[windowOf(options)];
  const since = seconds === null ? undefined : new Date(nowOf(app.snapshot) - seconds * 1000).toISOString();
  const found = { key: options.key || undefined, reason: options.reason || undefined, since };
  return Object.fromEntries(Object.entries(found).filter(([, value]) => value));
}

const dead = {
  rarely: true,
  title: ([name]) => (name ? `Dead letters of ${name}` : "Dead letters"),
  load: (app, [name], options) =>
    name ? { letters: read(app, "dead ls", { topic: name, limit: MOST_LETTERS, ...filtersOf(app, options) }) } : {},
  draw(app, [name], options, { letters }) {
    const dying = app.snapshot.topics.filter((one) => one.dead || one.topic === name);
    const filters = filtersOf(app, options);
    const narrowed = filters.key || filters.reason || filters.since ? filters : { all: true };
    const change = (event) => {
      const values = Object.fromEntries(new FormData(event.target.form ?? event.target));
      app.go(["dead", values.topic], { window: values.window, key: values.key, reason: values.reason });
    };
    return html`
      <form class="filters" @submit=${(event) => (event.preventDefault(), change(event))}>
        <label
          >Topic
          <select name="topic" @change=${change}>
            <option value="" ?selected=${!name}>–</option>
            ${dying.map((one) => option(one.topic, one.topic === name, `${plain(one.topic)} (${count(one.dead)})`))}
          </select>
        </label>
        <label
          >Died in
          <select name="window" @change=${change}>
            ${Object.entries(WINDOWS).map(([id, [text]]) => option(id, id === windowOf(options), text))}
          </select>
        </label>
        <label>Key <input name="key" placeholder="order-*" .value=${options.key ?? ""} @change=${change} /></label>
        <label>Reason contains <input name="reason" .value=${options.reason ?? ""} @change=${change} /></label>
      </form>
      ${
        !name
          ? html`<p>${dying.length ? "Choose a topic." : "No topic has dead letters."}</p>`
          : html`
              <div class="buttons">
                ${button(app, "dead redrive", { topic: name, ...narrowed }, "Redrive all that match", "primary")}
                ${button(app, "dead rm", { topic: name, ...narrowed }, "Delete all that match")}
                ${button(app, "dead export", { topic: name, ...filters }, "Export")}
                ${button(app, "dead import", { topic: name }, "Import")}
                ${button(app, "dead ls", { topic: name, ...filters, values: true }, "Show payloads")}
              </div>
              ${letters ? groupsOf(app, name, letters, WINDOWS[windowOf(options)][0]) : nothing}
            `
      }
    `;
  },
};

function groupsOf(app, name, letters, window) {
  if (!letters.length) return html`<p>No letter of ${window} matches.</p>`;
  const groups = groupBy(letters, (one) => normalize(one.reason));
  const sorted = [...groups].sort(([, a], [, b]) => b.length - a.length);
  return html`
    <p>
      ${letters.length === MOST_LETTERS ? "The newest " : ""}${plural(letters.length, "letter")} of ${window}, in
      ${plural(sorted.length, "group")} by error.
    </p>
    ${sorted.map(([kind, found]) => {
      const given = { topic: name, ids: found.map((one) => one.id) };
      return html`
        <details
          class="group"
          .open=${app.opened.has(kind)}
          @toggle=${(event) => app.opened[event.target.open ? "add" : "delete"](kind)}
        >
          <summary><span class="amount">${count(found.length)}</span> ${kind || "(no reason)"}</summary>
          <div class="buttons">
            ${button(app, "dead redrive", given, `Redrive ${plural(found.length, "letter")}`)}
            ${button(app, "dead rm", given, `Delete ${plural(found.length, "letter")}`)}
          </div>
          ${table(
            kind,
            [
              ["key", (row) => keyLink(row.key)],
              ["died", (row) => sinceOf(app, row.died_at), "number"],
              ["attempts", (row) => count(row.attempts), "number"],
              ["triggers", (row) => count(row.triggers), "number"],
              ["reason", (row) => plain(row.reason)],
              ["id", (row) => html`<code>${row.id}</code>`],
            ],
            found.slice(0, 100),
          )}
          ${found.length > 100 ? html`<p class="quiet">and ${count(found.length - 100)} more</p>` : nothing}
        </details>
      `;
    })}
  `;
}

// -- a key ------------------------------------------------------------------------------------------------------------

const key = {
  title: (_, options) => (options.key ? `Key ${options.key}` : "Keys"),
  load: (app, _, { key: name, scope, values }) =>
    name
      ? { facts: read(app, "key show", { key: name, ...(scope && { scope }), ...(values && { values: true }) }) }
      : {},
  draw(app, _, options, { facts }) {
    const find = (event) => {
      event.preventDefault();
      const values = Object.fromEntries(new FormData(event.target.form ?? event.target));
      app.go(["key"], { key: values.key, values: values.values && "1" });
    };
    return html`
      <form class="filters" @submit=${find} role="search">
        <label class="wide"
          >Key <input name="key" autocomplete="off" spellcheck="false" .value=${options.key ?? ""}
        /></label>
        <label class="flag"
          ><input type="checkbox" name="values" .checked=${!!options.values} @change=${find} /> Show payloads and
          results</label
        >
        <button class="primary">Find</button>
        ${button(app, "held ls", {}, "Find held keys")}
      </form>
      ${lossOf(app)} ${facts ? keyOf(app, facts) : nothing}
    `;
  },
};

const KEY_VERBS = { held: ["resolve", "forget"], in_progress: ["cancel", "forget"] }; // by the state of the record
const MESSAGE_VERBS = { pending: ["move", "flush", "bury", "cancel"], "in flight": ["cancel"] };

function keyOf(app, facts) {
  if (facts.state === "absent") {
    return html`<p class="lead">Nothing is stored for this key.</p>
      ${decisionOf(facts)}
      <p class="quiet">
        Searched scopes: ${shown("", facts.scopes_searched)}. Searched topics: ${shown("", facts.topics_searched)}.
        ${facts.no_trace_since ? html`No trace since ${shown("no_trace_since", facts.no_trace_since)}.` : nothing}
      </p>
      ${timelineOf(facts)}`;
  }
  const { records, messages, dead_letters: letters, timeline, ...others } = facts;
  // Where the process is known, the id of the owner says no more, and would push the buttons out of sight.
  const guarded = records.map((row) => (row.process ? { ...row, owner: null } : row));
  const ofRecord = (row) => ({ key: facts.key, scope: row.scope });
  const ofMessage = (row) => ({ topic: row.topic, key: facts.key, ...(row.group && { group: row.group }) });
  const buttons = (noun, names, given) => [
    "",
    (row) => html`<span class="buttons">${names(row).map((one) => button(app, `${noun} ${one}`, given(row)))}</span>`,
  ];
  return html`
    ${decisionOf(facts)}
    ${
      records.length
        ? html`<h2>Guarded</h2>
            ${rowsOf("Guarded", guarded, [buttons("key", (row) => KEY_VERBS[row.state] ?? ["forget"], ofRecord)])}`
        : nothing
    }
    ${
      messages.length
        ? html`<h2>Messages</h2>
            ${rowsOf("Messages", messages, [buttons("topic", (row) => MESSAGE_VERBS[row.state], ofMessage)])}`
        : nothing
    }
    ${
      letters.length
        ? html`<h2>Dead letters</h2>
            ${rowsOf("Dead letters", letters, [
              buttons(
                "dead",
                () => ["redrive", "rm"],
                (row) => ({ topic: row.topic, ids: [row.id] }),
              ),
            ])}`
        : nothing
    }
    ${answerOf({ ...others, key: null, decision: null, scopes_searched: null, topics_searched: null })} ${timelineOf(facts)}
  `;
}

const decisionOf = ({ decision }) => (decision ? html`<p class="lead">The last decision: ${plain(decision)}</p>` : nothing);

const timelineOf = ({ timeline }) =>
  timeline.length ? html`<h2>What happened</h2> ${rowsOf("What happened", timeline)}` : nothing;

// -- processes --------------------------------------------------------------------------------------------------------

const processes = {
  title: (_, { of, key: name }) => (of || name ? `Processes of ${of || name}` : "Processes"),
  load: (app, _, { of, key: name }) => ({
    work: read(app, "worker ls", { ...(of && { of }), ...(name && { key: name }) }),
  }),
  draw(app, _, options, { work }) {
    if (!work) return nothing;
    return html`
      ${options.of || options.key ? html`<p><a href="#/processes">Show all</a></p>` : nothing}
      ${
        work.processes.length
          ? table(
              "Processes",
              [
                ["process", (row) => processLink(row.process)],
                ["role", (row) => row.role],
                ["program", (row) => plain(row.program)],
                ["version", (row) => plain(row.version)],
                ["started", (row) => sinceOf(app, row.started_at), "number"],
                ["busy", (row) => row.busy ?? "–", "number"],
                ["topics", (row) => row.topics.map((one, n) => html`${n ? ", " : nothing}${topicLink(one)}`)],
                ["scopes", (row) => shown("scopes", row.scopes)],
                ["seen", (row) => sinceOf(app, row.seen_at), "number"],
              ],
              work.processes,
            )
          : html`<p>No process reports here.</p>`
      }
      ${workOf(app, work)}
    `;
  },
};

const process = {
  title: ([name]) => name,
  load: (app, [name]) => ({ facts: read(app, "worker show", { process: name }) }),
  draw: (_, __, ___, { facts }) => (facts ? answerOf(facts) : nothing),
};

// -- the others -------------------------------------------------------------------------------------------------------

const audit = {
  rarely: true,
  title: () => "Audit",
  load: (app) => ({ acts: read(app, "act ls", { limit: 200 }) }),
  draw(app, _, __, { acts }) {
    if (!acts) return nothing;
    if (!acts.length) return html`${lossOf(app)}<p>The store holds no acts.</p>`;
    return html`${lossOf(app)}${table(
      "Acts",
      [
        ["at", (row) => html`<time datetime=${row.at}>${time(row.at)}</time>`],
        ["who", (row) => plain(row.who)],
        ["what", (row) => html`<code>${plain(row.what)}</code>`],
        ["why", (row) => plain(row.why)],
      ],
      acts,
    )}`;
  },
};

const commands = {
  title: () => "Commands",
  draw: (app) =>
    Object.entries(app.session.nouns).map(
      ([noun, about]) => html`
        <h2>${noun} <span class="quiet">${about}</span></h2>
        <ul class="commands">
          ${app.session.verbs
            .filter((one) => one.noun === noun)
            .map(
              (one) =>
                html`<li>
                  ${button(app, `${noun} ${one.name}`)}
                  <span>${one.allowed ? "" : labelOf(one.name)} ${one.about}</span>
                </li>`,
            )}
        </ul>
      `,
    ),
};

export const SCREENS_BY_NAME = { now, topic, dead, key, processes, process, audit, commands };
