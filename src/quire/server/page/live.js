// The live view of the engine: a field of a snapshot is shown in the elements with its name as `data-field`.

import { BlockMap, Sparkline } from "./charts.js";
import { NOTHING, count, duration, percent, rate, span } from "./numbers.js";
import { Slowest } from "./slowest.js";

const SPARK_VALUES = 240; // one minute, at four values per second

const FORMATS = {
  model: String,
  version: (version) => `Quire ${version}`,
  uptime_s: duration,
  running: count,
  waiting: count,
  max_num_seqs: (limit) => `of ${count(limit)}`,
  kv_usage: percent,
  prompt_tok_s: rate,
  generation_tok_s: rate,
  "ttft_ms.p50": span,
  "ttft_ms.p90": span,
  "ttft_ms.p99": span,
  "itl_ms.p50": span,
  "itl_ms.p90": span,
  "itl_ms.p99": span,
  prefix_hit_rate: percent,
  preemptions: count,
  requests_finished: count,
  targets: String,
};

const STATES = {
  connecting: "connecting",
  healthy: "healthy",
  sick: "not healthy",
  lost: "connection lost, trying again",
  locked: "needs an API key",
};

export class LiveView {
  #fields = [...document.querySelectorAll("[data-field]")];
  #map = new BlockMap(document.getElementById("blocks"));
  #mapText = document.getElementById("blocks-text");
  #sparks = Object.fromEntries(
    ["generation_tok_s", "prompt_tok_s"].map((name) => [
      name,
      new Sparkline(document.getElementById(`spark-${name}`), SPARK_VALUES),
    ]),
  );
  #slowest = new Slowest(document.getElementById("slowest"));
  #status = document.getElementById("status");
  #statusText = document.getElementById("status-text");

  /** Show a connection state of `follow`, except "live": the next snapshot shows the engine's state. */
  connection(state) {
    if (state !== "live") this.#state(state);
  }

  show(snapshot) {
    this.#state(snapshot.healthy === false ? "sick" : "healthy", snapshot.problem);
    for (const node of this.#fields) {
      const value = valueAt(snapshot, node.dataset.field);
      setText(node, value === undefined ? NOTHING : FORMATS[node.dataset.field](value));
    }
    for (const [name, spark] of Object.entries(this.#sparks)) spark.push(snapshot[name] ?? 0);
    if (snapshot.blocks !== undefined) this.#drawBlocks(snapshot);
    this.#slowest.show(snapshot.slowest ?? []);
  }

  #drawBlocks({ blocks, num_blocks: numBlocks, block_size: blockSize, kv_usage: usage }) {
    const cells = Uint8Array.from(atob(blocks), (letter) => letter.charCodeAt(0));
    this.#map.draw(cells);
    const used = Math.round(numBlocks * usage);
    setText(this.#mapText, `${count(used)} of ${count(numBlocks)} blocks of ${blockSize} tokens in use`);
  }

  #state(state, problem) {
    this.#status.dataset.state = state;
    document.body.classList.toggle("stale", state !== "healthy");
    setText(this.#statusText, problem ?? STATES[state]);
    this.#status.title = this.#statusText.textContent;
    document.getElementById("unlock").hidden = state !== "locked";
  }
}

/** The value at a dotted name, such as `ttft_ms.p50`; undefined if the engine has no value yet. */
function valueAt(snapshot, name) {
  return name.split(".").reduce((found, key) => found?.[key], snapshot) ?? undefined;
}

/** Set only text that differs: unchanged text causes no layout, and screen readers do not read it again. */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
