// How tabs talk to the server, to each other, and to the address bar.

export class Problem extends Error {
  // What the server refused, as {problem, expected, advice, code, field}.
  constructor(fields) {
    super(fields.problem);
    Object.assign(this, { expected: "", advice: "", code: "", field: "" }, fields);
  }

  get sentence() {
    const what = this.expected ? `${this.problem}; expected ${this.expected}` : this.problem;
    return [what, this.advice].filter(Boolean).map((text) => (/[.?!]$/.test(text) ? text : `${text}.`)).join(" ");
  }
}

async function request(path, options) {
  let answer;
  try {
    answer = await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({ problem: "The studio does not answer", advice: "Check that it still runs in its terminal", code: "offline" });
  }
  const data = await answer.json().catch(() => ({ problem: `The studio answered ${answer.status}`, code: "no_json" }));
  if (!answer.ok) throw new Problem(data);
  return data;
}

const get = (path, options) => request(path, options);

const post = (path, body = {}, options) =>
  request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), ...options });

const FINISHED = ["done", "failed", "cancelled"];

// Start a job and wait for its result. `onStage` gets {stages, fraction, data, notes, seconds, status, is_committed}
// after every change; aborting `signal` cancels the job, and the promise then rejects with a Problem whose code is
// "cancelled".
async function job(path, body, options) {
  return follow(await post(path, body), options);
}

// Wait for a job that runs already; `state` needs its id.
async function follow(state, { onStage = () => {}, signal } = {}) {
  const cancel = () => post(`/api/jobs/${state.id}/cancel`).catch(() => {});
  if (signal?.aborted) cancel();
  signal?.addEventListener("abort", cancel, { once: true });
  try {
    if (state.stages) onStage(state);
    while (!FINISHED.includes(state.status)) {
      state = await get(`/api/jobs/${state.id}?after=${state.version ?? -1}`);
      onStage(state);
    }
  } finally {
    signal?.removeEventListener("abort", cancel);
    emit("job");
  }
  if (state.status === "failed") throw new Problem(state.error);
  if (state.status === "cancelled") throw new Problem({ problem: "Canceled", advice: "The model is as it was", code: "cancelled" });
  return state.result;
}

// Events between tabs: "model" when another model is loaded, "ledger" when the edits of the model changed, "job" when a
// job of this page ended.
const listeners = new Map();

function on(name, listener) {
  listeners.set(name, [...(listeners.get(name) ?? []), listener]);
}

function emit(name, detail) {
  for (const listener of listeners.get(name) ?? []) listener(detail);
}

// The part of the address after "#": a link that restores the state.
const link = {
  get(name, missing = "") {
    return new URLSearchParams(location.hash.slice(1)).get(name) ?? missing;
  },
  set(values) {
    const parameters = new URLSearchParams(location.hash.slice(1));
    for (const [name, value] of Object.entries(values)) {
      if (value === "" || value == null) parameters.delete(name);
      else parameters.set(name, value);
    }
    history.replaceState(null, "", `#${parameters}`);
  },
};

export const api = { get, post, job, follow, on, emit, link };
