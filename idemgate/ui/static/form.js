// The form of a verb: its arguments, what it would change, the reason, and the name to type before data is lost.

import { act, ask, readCommand } from "./api.js";
import { html, nothing } from "./vendor/lit-html.js";
import { labelOf, plain, title } from "./text.js";
import { answerOf } from "./view.js";

const HINTS = { texts: ", one a line", json: ', such as {"n": 1}' };

// The state of an open form. `given` are the arguments that were typed, by name.
export const formOf = (verb, given) => ({
  verb,
  given: { ...given },
  command: "…",
  why: "",
  confirm: "",
  busy: false,
  step: "fill",
});

// Show the command of what was typed. It is never run. The content of a file is not sent for it.
export async function writeCommand(app) {
  const open = app.form;
  const files = open.verb.parameters.filter((one) => one.kind === "lines" && open.given[one.name]);
  const mine = (open.writing = { ...open.given, ...Object.fromEntries(files.map((one) => [one.name, "FILE"])) });
  const line = await readCommand(open.verb, mine).catch(() => "…");
  if (open.writing !== mine) return; // more was typed
  open.command = line;
  app.draw();
}

export function form(app) {
  const open = app.form;
  const { verb } = open;
  const looked = open.step === "looked";
  const done = open.step === "done";
  const needs = verb.loses && looked && open.confirm !== open.given[verb.subject];
  return html`
    <dialog id="form" aria-labelledby="form-title" @close=${() => app.close()} @cancel=${() => app.close()}>
      <form @submit=${(event) => submit(app, event)} novalidate>
        <header>
          <h2 id="form-title">${title(verb.noun)} ${title(verb.name)}</h2>
          <button type="button" class="close" aria-label="Close" @click=${() => app.close()}>✕</button>
        </header>
        <p class="about">${sentence(verb.about)}</p>
        ${
          done || looked
            ? nothing
            : html`<fieldset ?disabled=${open.busy}>${verb.parameters.map((one) => field(app, one))}</fieldset>`
        }
        <p><code class="command">${plain(open.command)}</code></p>
        ${open.problem ? html`<p class="problem" role="alert">${plain(open.problem)}</p>` : nothing}
        ${
          looked && !open.problem
            ? html`<section aria-label="What would change">
                <h3>This is there now</h3>
                ${answerOf(open.answer)}
              </section>`
            : nothing
        }
        ${done ? html`<section role="status" aria-label="Result">${answerOf(open.answer)}</section>` : nothing}
        ${
          verb.changes && looked
            ? html`
                <label>
                  <span>Why <span class="quiet">for the list of acts</span></span>
                  <input
                    name="why"
                    autocomplete="off"
                    .value=${open.why}
                    @input=${(event) => (open.why = event.target.value)}
                  />
                </label>
              `
            : nothing
        }
        ${
          verb.loses && looked
            ? html`
                <label>
                  <span>Type <strong>${plain(open.given[verb.subject] ?? "")}</strong> to confirm</span>
                  <input
                    name="confirm"
                    autocomplete="off"
                    .value=${open.confirm}
                    @input=${(event) => {
                      open.confirm = event.target.value;
                      app.draw();
                    }}
                  />
                </label>
              `
            : nothing
        }
        <footer>
          ${
            looked && verb.changes
              ? html`<button type="button" @click=${() => back(app)}>Back</button>`
              : html`<button type="button" @click=${() => app.close()}>Close</button>`
          }
          ${
            done
              ? nothing
              : html`<button class="primary ${verb.loses ? "danger" : ""}" ?disabled=${open.busy || needs}>
                  ${open.busy ? "…" : verb.changes ? (looked ? labelOf(verb.name) : "Look first") : "Show"}
                </button>`
          }
        </footer>
      </form>
    </dialog>
  `;
}

const sentence = (text) => text[0].toUpperCase() + text.slice(1);

function field(app, { name, about, kind, required, choice }) {
  const open = app.form;
  const set = (value) => {
    if (value === "" || value === false || (Array.isArray(value) && !value.length)) delete open.given[name];
    else open.given[name] = value;
    open.step = "fill";
    app.draw();
    writeCommand(app);
  };
  if (choice) {
    const others = open.verb.parameters.filter((one) => one.choice === choice && one.name !== name);
    const choose = () => {
      for (const one of others) delete open.given[one.name];
      set(true);
    };
    return html`<label class="flag">
      <input type="radio" name=${choice} value=${name} .checked=${!!open.given[name]} @change=${choose} />
      <span>${title(name)} <span class="quiet">${about}</span></span>
    </label>`;
  }
  if (kind === "flag") {
    return html`<label class="flag">
      <input
        type="checkbox"
        name=${name}
        .checked=${!!open.given[name]}
        @change=${(event) => set(event.target.checked)}
      />
      <span>${title(name)} <span class="quiet">${about}</span></span>
    </label>`;
  }
  const label = html`<span>${title(name)} <span class="quiet">${about}${HINTS[kind] ?? ""}</span></span>`;
  const must = required && kind !== "texts";
  if (kind === "lines") {
    return html`<label
      >${label}
      <input
        type="file"
        name=${name}
        required
        @change=${async (event) => set((await event.target.files[0]?.text()) ?? "")}
      />
    </label>`;
  }
  if (kind === "texts") {
    const lines = (event) => set(event.target.value.split("\n").filter((one) => one.trim()));
    return html`<label
      >${label}
      <textarea name=${name} rows="2" .value=${(open.given[name] ?? []).join("\n")} @change=${lines}></textarea>
    </label>`;
  }
  return html`<label
    >${label}
    <input
      name=${name}
      autocomplete="off"
      spellcheck="false"
      inputmode=${kind === "count" || kind === "number" ? "numeric" : "text"}
      ?required=${must}
      .value=${open.given[name] ?? ""}
      @input=${(event) => set(event.target.value)}
    />
  </label>`;
}

function back(app) {
  app.form.step = "fill";
  app.form.problem = null;
  app.draw();
}

// Look first; what was looked at is then done. A verb that only reads is done at once.
async function submit(app, event) {
  event.preventDefault();
  const open = app.form;
  const { verb, given } = open;
  const looked = open.step === "looked";
  open.busy = true;
  open.problem = null;
  app.draw();
  try {
    if (!verb.changes) {
      open.answer = await ask(verb, given);
      if (open.answer instanceof Blob && open.answer.size) save(open.answer, `${given.topic ?? verb.noun}.ndjson`);
    } else {
      open.answer = await act(verb, { arguments: given, dry_run: !looked, why: open.why, confirm: open.confirm });
    }
    open.step = verb.changes && !looked ? "looked" : "done";
    if (verb.changes && looked) app.refresh();
  } catch (problem) {
    open.problem = problem.message;
    app.note(problem);
  }
  open.busy = false;
  if (app.form === open) app.draw();
  if (app.form === open && open.step === "looked" && !looked) focusNext();
}

const focusNext = () => document.querySelector("#form [name=confirm], #form .primary")?.focus();

function save(blob, name) {
  const address = URL.createObjectURL(blob);
  const anchor = Object.assign(document.createElement("a"), { href: address, download: name });
  anchor.click();
  URL.revokeObjectURL(address);
}
