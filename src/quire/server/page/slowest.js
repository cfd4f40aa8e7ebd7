// The slowest of the last requests, each with a bar of its queue, prefill and decode time.

import { element } from "./markdown.js";
import { count, span } from "./numbers.js";

const PARTS = ["queue", "prefill", "decode"];

export class Slowest {
  #section;
  #list;
  #shown = "";

  constructor(section) {
    this.#section = section;
    this.#list = section.querySelector("ol");
  }

  show(requests) {
    const key = JSON.stringify(requests);
    if (key === this.#shown) return;
    this.#shown = key;
    this.#section.hidden = requests.length === 0;
    this.#list.replaceChildren(...requests.map(item));
  }
}

function item(request) {
  const node = element("li");
  const row = element("div", "row");
  const name = element("span", "", request.id);
  name.title = request.id;
  row.append(name, element("b", "", span(request.total_ms)));
  const times = element("div", "times");
  for (const part of PARTS) {
    const piece = element("i", part);
    piece.style.width = `${(100 * request[`${part}_ms`]) / Math.max(request.total_ms, 1e-3)}%`;
    times.append(piece);
  }
  node.append(row, times, element("p", "fine", words(request)));
  return node;
}

function missWords(miss) {
  const name = miss.reason.replaceAll("_", " ");
  if (miss.why) return `cache ${name}: ${miss.why}`;
  const start = miss.from_token ? ` from token ${count(miss.from_token)}` : "";
  const since = miss.evicted_s === undefined ? "" : ` ${span(1e3 * miss.evicted_s)} ago from ${miss.tier}`;
  return `not cached${start}: ${name}${since}`;
}

function tierWords(request) {
  const tiers = { "host memory": request.cached_tokens_from_host, disk: request.cached_tokens_from_disk };
  return Object.entries(tiers).filter(([, tokens]) => tokens).map(([name, tokens]) => `, ${count(tokens)} from ${name}`);
}

function words(request) {
  const tiers = tierWords(request).join("");
  const cached = request.cached_tokens ? ` (${count(request.cached_tokens)} cached${tiers})` : "";
  const found = [
    ...PARTS.map((part) => span(request[`${part}_ms`])),
    `${count(request.prompt_tokens)}${cached} + ${count(request.completion_tokens)} tokens`,
  ];
  if (request.cache_miss) found.push(missWords(request.cache_miss));
  if (request.num_preemptions) {
    found.push(`preempted ${count(request.num_preemptions)} times, ${span(request.preempted_ms)}`);
  }
  return found.join(" · ");
}
