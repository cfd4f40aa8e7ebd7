// One message of the conversation on the page.

import { MarkdownView, element } from "./markdown.js";
import { count, rate, span } from "./numbers.js";

const ENDINGS = {
  length: "reached the token limit",
  abort: "aborted by the server",
  stopped: "stopped",
};

export function question(text, urls) {
  const node = element("article", "question");
  node.setAttribute("aria-label", "You");
  for (const url of urls) {
    const image = element("img");
    image.src = url;
    image.alt = "An image sent with the question";
    node.append(image);
  }
  if (text) node.append(element("p", "", text));
  return node;
}

/** An answer that grows, with its speed below it. */
export class Answer {
  node = element("article", "answer");
  text = "";
  numTokens = 0;
  #body = element("div", "prose");
  #note = element("p", "note");
  #stats = element("span", "stats", "waiting for the first token");
  #actions = element("span", "actions");
  #view = new MarkdownView(this.#body);
  #sentAt = performance.now();
  #firstAt = 0;
  #lastAt = 0;
  #frame = 0;
  #onDraw;

  constructor(onDraw) {
    this.#onDraw = onDraw;
    const foot = element("footer");
    foot.append(this.#stats, this.#actions);
    this.#note.hidden = true;
    this.#actions.append(action("Copy", { copy: "answer" }), action("Retry", { retry: "yes" }));
    this.node.setAttribute("aria-label", "Answer");
    this.node.setAttribute("aria-busy", "true");
    this.node.append(this.#body, this.#note, foot);
  }

  add(text, numTokens) {
    this.#lastAt = performance.now();
    this.#firstAt ||= this.#lastAt;
    this.text += text;
    this.numTokens = numTokens ?? this.numTokens + 1;
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  /** `reason` is a finish reason, "stopped" or "failed"; `problem` says why it failed. */
  end(reason, problem = "") {
    cancelAnimationFrame(this.#frame);
    this.#note.textContent = problem;
    this.#note.hidden = !problem;
    this.node.setAttribute("aria-busy", "false");
    this.#draw(ENDINGS[reason]);
  }

  #draw(ending) {
    this.#frame = 0;
    this.#view.update(this.text);
    this.#stats.textContent = [...this.#speed(), ending].filter(Boolean).map(unbroken).join(" · ");
    this.#onDraw();
  }

  #speed() {
    if (!this.#firstAt) return [];
    const seconds = (this.#lastAt - this.#firstAt) / 1000;
    const perSecond = seconds > 0 ? `${rate((this.numTokens - 1) / seconds)} tok/s` : "";
    const tokens = `${count(this.numTokens)} ${this.numTokens === 1 ? "token" : "tokens"}`;
    return [tokens, perSecond, `TTFT ${span(this.#firstAt - this.#sentAt)}`];
  }
}

const unbroken = (text) => text.replaceAll(" ", "\u00a0");

function action(label, data) {
  const button = element("button", "quiet", label);
  button.type = "button";
  Object.assign(button.dataset, data);
  return button;
}
