// Requests to this server: the API key, and server-sent events read from a fetch (EventSource cannot send a header).

const KEY_NAME = "quire-api-key";
const RETRY_FIRST_MS = 500;
const RETRY_LONGEST_MS = 8000;
const SILENCE_MS = 5000;

/** The server requires an API key, and the user did not enter one. */
export class KeyNeeded extends Error {}

/** Fetch with the API key; ask the user for one if the server answers 401. Throws the server's message. */
export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY_NAME);
    const headers = new Headers(options.headers);
    if (key) headers.set("Authorization", `Bearer ${key}`);
    const response = await fetch(path, { ...options, headers, cache: "no-store" });
    if (response.ok) return response;
    if (response.status !== 401) throw new Error(await problemOf(response));
    // Another request may have asked for the key in the meantime.
    if (key === sessionStorage.getItem(KEY_NAME)) await askForKey(key !== null);
  }
}

async function problemOf(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `The server answered with status ${response.status}.`;
}

let asking = null;

/** Ask the user for the API key; concurrent callers share one dialog. */
export function askForKey(refused = false) {
  asking ??= showKeyDialog(refused).finally(() => { asking = null; });
  return asking;
}

function showKeyDialog(refused) {
  const dialog = document.getElementById("key-dialog");
  const input = document.getElementById("key");
  document.getElementById("key-refused").hidden = !refused;
  input.value = "";
  dialog.returnValue = "";
  document.getElementById("key-cancel").onclick = () => dialog.close();
  dialog.showModal();
  return new Promise((resolve, reject) => {
    dialog.addEventListener("close", () => {
      if (dialog.returnValue !== "use") return reject(new KeyNeeded("This server needs an API key."));
      sessionStorage.setItem(KEY_NAME, input.value);
      resolve();
    }, { once: true });
  });
}

/** The data of each server-sent event of a response. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (data.length) yield data.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

/** Pass the events of `path` to `onEvent`, and reconnect without end. `onState` is called with "live", "lost" or
 *  "locked"; "locked" means that an API key is needed, and the next attempt follows when `unlocked()` has settled. */
export async function follow(path, { onEvent, onState, unlocked }) {
  let wait = RETRY_FIRST_MS;
  for (;;) {
    try {
      for await (const data of lively(path)) {
        wait = RETRY_FIRST_MS;
        onState("live");
        // Outside of this try: an error in the view must not look like a lost connection.
        queueMicrotask(() => onEvent(JSON.parse(data)));
      }
    } catch (error) {
      if (error instanceof KeyNeeded) {
        onState("locked");
        await unlocked();
        continue;
      }
    }
    onState("lost");
    await sleep(wait * (0.75 + Math.random() / 2));
    wait = Math.min(wait * 2, RETRY_LONGEST_MS);
  }
}

/** Events of a stream, which is aborted after `SILENCE_MS` without an event. */
async function* lively(path) {
  const control = new AbortController();
  let timer = 0;
  const alive = () => {
    clearTimeout(timer);
    timer = setTimeout(() => control.abort(), SILENCE_MS);
  };
  try {
    const response = await request(path, { signal: control.signal });
    alive();
    for await (const data of events(response)) {
      alive();
      yield data;
    }
  } finally {
    clearTimeout(timer);
  }
}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
