// The page: the URL says which screen is shown, and every two seconds it is read and drawn again.

import { Problem, readSnapshot, readVerbs, setToken } from "./api.js";
import { form, formOf, writeCommand } from "./form.js";
import { html, nothing, render } from "./vendor/lit-html.js";
import { SCREENS_BY_NAME, findings } from "./screens.js";
import { plain, span, time } from "./text.js";
import { hashOf } from "./view.js";

const EVERY = 2000; // ms
const RARELY = 10_000; // ms: for screens that read much
const KEPT = 150; // samples of each topic: five minutes
const GONE = [0, 503]; // the server of the page does not answer, or the store does not
const RATE_OVER = 10_000; // ms
const SECTIONS = {
  now: "Now",
  dead: "Dead letters",
  key: "Keys",
  processes: "Processes",
  audit: "Audit",
  commands: "Commands",
};
const OF_SECTION = { topic: "now", process: "processes" };
const root = document.getElementById("page");

const app = {
  session: null,
  verbs: new Map(),
  snapshot: null,
  data: {},
  problem: null,
  heard: 0, // when the snapshot was read, in ms since 1970 by this machine
  lost: 0, // when the store or the server of the page did not answer first, in ms since 1970 by this machine
  form: null,
  opened: new Set(), // what the user opened on this screen

  // Open the form of a verb with these arguments.
  open(verb, given) {
    app.opener = document.activeElement;
    app.form = formOf(verb, given);
    app.draw();
    writeCommand(app);
    document.getElementById("form").showModal();
  },
  close() {
    if (!app.form) return;
    app.form = null;
    app.draw();
    app.opener?.focus();
  },
  go(path, options) {
    location.hash = hashOf(path, options);
  },
  // A problem that concerns the whole page: the token, or the access list of the server.
  note(problem) {
    if (problem.status === 401 || (problem.status === 403 && problem.kind === "ServerRejected")) start();
  },
  refresh() {
    read = -Infinity;
    poll();
  },
  draw,
  samples: (topic) => history.get(topic)?.rates ?? [],
  rates: (topic) => history.get(topic)?.rates.at(-1) ?? { in: null, out: null },
};

// -- the URL ----------------------------------------------------------------------------------------------------------

function routeOf(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split("?");
  const [name, ...names] = path.split("/").map(decodeURIComponent);
  const screen = name in SCREENS_BY_NAME ? name : "now";
  return { screen, names, options: Object.fromEntries(new URLSearchParams(query)) };
}

let route = { screen: "now", names: [], options: {} };

function follow() {
  try {
    route = routeOf(location.hash);
  } catch {
    route = routeOf("");
  }
  app.data = {};
  app.problem = null;
  app.form = null;
  app.opened.clear();
  draw();
  read = -Infinity;
  document.querySelector("h1")?.focus();
  poll();
}

// -- rates ------------------------------------------------------------------------------------------------------------

const history = new Map();

// Remember the counters of a topic, and its rates over the last ten seconds.
function sample(snapshot) {
  const at = performance.now();
  for (const { topic, accepted, ended } of snapshot.topics) {
    const kept = history.get(topic) ?? { counts: [], rates: [] };
    history.set(topic, kept);
    kept.counts.push({ at, accepted, ended });
    const before = kept.counts.find((one) => at - one.at <= RATE_OVER);
    const seconds = (at - before.at) / 1000;
    if (seconds > 0.5) {
      const of = (name, value) => Math.max(0, value - before[name]) / seconds;
      kept.rates.push({ in: of("accepted", accepted), out: of("ended", ended) });
    }
    kept.counts = kept.counts.filter((one) => at - one.at <= RATE_OVER);
    kept.rates.splice(0, kept.rates.length - KEPT);
  }
}

// -- reading ----------------------------------------------------------------------------------------------------------

let timer = 0;
let polling = 0; // the number of the newest poll: an older one is not drawn
let read = -Infinity; // when what the screen shows beside the snapshot was read

async function poll() {
  clearTimeout(timer);
  const mine = ++polling;
  const { screen, names, options } = route;
  try {
    app.snapshot = await readSnapshot();
    app.heard = Date.now();
    sample(app.snapshot);
    if (mine !== polling) return;
    const { load, rarely } = SCREENS_BY_NAME[screen];
    if (load && performance.now() - read >= (rarely ? RARELY : 0)) {
      const parts = Object.entries(load(app, names, options));
      const found = await Promise.all(parts.map(([, part]) => part));
      if (mine !== polling) return;
      app.data = Object.fromEntries(parts.map(([name], n) => [name, found[n]]));
      read = performance.now();
    }
    app.problem = null;
    app.lost = 0;
  } catch (problem) {
    if (mine !== polling) return;
    if (!(problem instanceof Problem)) throw problem;
    app.problem = problem;
    app.lost = GONE.includes(problem.status) ? app.lost || Date.now() : 0;
  }
  if (app.problem?.status === 401) return start();
  draw();
  if (!document.hidden) timer = setTimeout(poll, app.problem ? 2 * EVERY : EVERY);
}

async function start() {
  clearTimeout(timer);
  polling++;
  try {
    app.session = await readVerbs();
    app.verbs = new Map(app.session.verbs.map((one) => [`${one.noun} ${one.name}`, one]));
    app.problem = null;
    poll();
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    app.problem = problem;
    if (problem.status !== 401) timer = setTimeout(start, 2 * EVERY);
  }
  draw();
}

// -- drawing ----------------------------------------------------------------------------------------------------------

function draw() {
  if (app.problem?.status === 401) app.form = null;
  render(app.problem?.status === 401 ? login() : app.session ? page() : waiting(), root);
}

const waiting = () => html`<main><p role="status">${app.problem ? plain(app.problem.message) : "Loading …"}</p></main>`;

function page() {
  const { screen, names, options } = route;
  const shown = SCREENS_BY_NAME[screen];
  const heading = plain(shown.title(names, options));
  document.title = `${heading} · ${plain(app.session.namespace)} · idemgate`;
  const section = OF_SECTION[screen] ?? screen;
  const changes = app.session.verbs.some((one) => one.changes && one.allowed);
  return html`
    <header class="top">
      <span class="name">idemgate <span class="quiet">${plain(app.session.namespace)}</span></span>
      <nav aria-label="Screens">
        ${Object.entries(SECTIONS).map(
          ([name, text]) =>
            html`<a href=${hashOf([name])} aria-current=${name === section ? "page" : "false"}>${text}</a>`,
        )}
      </nav>
      <span class="who">
        ${plain(app.session.who)} ${changes ? nothing : html`<strong class="badge">read only</strong>`}
      </span>
    </header>
    <main>
      ${app.lost ? gone() : app.problem ? html`<p class="problem" role="alert">${plain(app.problem.message)}</p>` : nothing}
      <div class=${app.lost && app.snapshot ? "stale" : ""}>
        ${app.snapshot ? findings(app, screen === "topic" ? names[0] : null) : nothing}
        <h1 tabindex="-1">${heading}</h1>
        ${app.snapshot ? shown.draw(app, names, options, app.data) : html`<p>Loading …</p>`}
      </div>
    </main>
    ${app.form ? form(app) : nothing}
  `;
}

// Without an answer nothing on the page is true any more: this is the first finding, and the rest has an age.
function gone() {
  const who = app.problem.status === 503 ? "The store" : "The server of this page";
  const since = time(new Date(app.lost).toISOString());
  return html`<div role="alert">
      <ul class="findings">
        <li class="critical">
          <div>
            <span class="severity critical">critical</span>
            ${who} does not answer since ${since}: ${plain(app.problem.message)}.
          </div>
        </li>
      </ul>
    </div>
    ${app.snapshot ? html`<p>What follows was read ${span((Date.now() - app.heard) / 1000)} ago.</p>` : nothing}`;
}

function login() {
  const enter = (event) => {
    event.preventDefault();
    setToken(new FormData(event.target).get("token"));
    start();
  };
  return html`<main class="login">
    <h1>idemgate</h1>
    <form @submit=${enter}>
      <label>Token <input type="password" name="token" autocomplete="current-password" required autofocus /></label>
      <button class="primary">Log in</button>
    </form>
    <p class="problem" role="alert">${plain(app.problem.message)}</p>
  </main>`;
}

addEventListener("hashchange", follow);
document.addEventListener("visibilitychange", () => !document.hidden && app.session && poll());
try {
  route = routeOf(location.hash);
} catch {
  // a damaged link leads to the first screen
}
start();
