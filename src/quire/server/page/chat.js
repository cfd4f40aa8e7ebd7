// The conversation: questions go to /v1/chat/completions, answers are streamed into the page.

import { Answer, question } from "./answer.js";
import { events, request } from "./api.js";
import { Images, content } from "./images.js";
import { count } from "./numbers.js";

const AT_END_PX = 48;

export class Chat {
  maxLen = 0;
  #messages = [];
  #running = null; // the AbortController of the answer under way
  #usedLen = 0;
  #refused = false; // whether the newest question has no answer but an error
  #atEnd = true; // whether the reader sees the newest text
  #controls;
  #log = document.getElementById("log");
  #hello = document.getElementById("hello");
  #form = document.getElementById("composer");
  #input = document.getElementById("question");
  #context = document.getElementById("context");
  #send = document.getElementById("send");
  #stop = document.getElementById("stop");
  #images = new Images(document.querySelector(".chat"), this.#input);

  constructor(controls) {
    this.#controls = controls;
    this.#form.addEventListener("submit", async (event) => {
      event.preventDefault();
      await this.#images.ready;
      this.#ask(this.#input.value.trim());
    });
    this.#input.addEventListener("input", () => this.#fit());
    this.#input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#form.requestSubmit();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.stop();
    });
    this.#stop.addEventListener("click", () => this.stop());
    document.getElementById("new").addEventListener("click", () => this.clear());
    this.#log.addEventListener("click", (event) => this.#clicked(event.target));
    this.#log.addEventListener("scroll", () => {
      this.#atEnd = this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < AT_END_PX;
    }, { passive: true });
  }

  /** Kinds of input that the model accepts besides text. */
  set modalities(names) {
    this.#images.enabled = names.includes("image");
  }

  stop() {
    this.#running?.abort();
  }

  clear() {
    this.stop();
    this.#begin(null);
    this.#messages = [];
    this.#refused = false;
    this.#images.removeAll();
    this.#log.replaceChildren(this.#hello);
    this.showContext(0);
    this.#input.focus();
  }

  /** Show how many tokens of the context the conversation uses. */
  showContext(usedLen = this.#usedLen) {
    this.#usedLen = usedLen;
    const limit = this.maxLen ? ` of ${count(this.maxLen)}` : "";
    this.#context.textContent = usedLen ? `context: ${count(usedLen)}${limit} tokens` : "";
  }

  #clicked(target) {
    const { copy, retry, example } = target.dataset;
    if (copy) copyText(copy === "code" ? codeBeside(target) : this.#textOf(target), target);
    if (example) this.#ask(target.textContent);
    if (retry && !this.#running) this.#askAgain();
  }

  #ask(text) {
    if (!(text || this.#images.size) || this.#running || !this.#controls.check()) return;
    const urls = this.#images.removeAll();
    // With the refused question in the conversation, every further question would be refused, too.
    if (this.#refused) this.#messages.pop();
    this.#input.value = "";
    this.#fit();
    this.#hello.remove();
    this.#messages.push({ role: "user", content: content(text, urls) });
    this.#log.append(question(text, urls));
    this.#answer();
  }

  #askAgain() {
    if (!this.#controls.check()) return;
    if (this.#messages.at(-1).role === "assistant") this.#messages.pop();
    this.#log.lastElementChild.remove();
    this.#answer();
  }

  async #answer() {
    const messages = this.#messages;
    const control = new AbortController();
    const answer = new Answer(() => this.#keepAtEnd());
    answers.set(answer.node, answer);
    this.#refused = false;
    this.#begin(control);
    this.#log.append(answer.node);
    this.#toEnd();
    try {
      answer.end(await this.#stream(answer, control.signal));
    } catch (error) {
      this.#refused = !control.signal.aborted && !answer.text;
      if (control.signal.aborted) answer.end("stopped");
      else answer.end("failed", messageOf(error));
    }
    if (answer.text) messages.push({ role: "assistant", content: answer.text });
    if (this.#running === control) this.#begin(null);
  }

  /** Stream the reply into `answer` and return the finish reason. */
  async #stream(answer, signal) {
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(this.#body()),
      signal,
    });
    let reason = null;
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const { error, choices, usage } = JSON.parse(data);
      if (error) throw new Error(error.message);
      if (usage && !signal.aborted) this.showContext(usage.total_tokens);
      const [choice] = choices;
      if (choice?.delta.content) answer.add(choice.delta.content, usage?.completion_tokens);
      reason = choice?.finish_reason ?? reason;
    }
    if (!reason) throw new Error("The connection ended before the answer did.");
    return reason;
  }

  #body() {
    const { system, sampling } = this.#controls;
    return {
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.#messages],
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      ...sampling,
    };
  }

  #begin(control) {
    this.#running = control;
    this.#stop.hidden = !control;
    this.#send.hidden = Boolean(control);
    this.#log.classList.toggle("busy", Boolean(control));
  }

  #textOf(target) {
    return answers.get(target.closest(".answer")).text;
  }

  #fit() {
    this.#input.style.height = "auto";
    this.#input.style.height = `${this.#input.scrollHeight}px`;
  }

  /** Scroll with the growing text only while its end is visible. */
  #keepAtEnd() {
    if (this.#atEnd) this.#toEnd();
  }

  #toEnd() {
    this.#atEnd = true;
    this.#log.scrollTop = this.#log.scrollHeight;
  }
}

const answers = new WeakMap();

const codeBeside = (button) => button.closest(".code").querySelector("code").textContent;

const messageOf = (error) => (error instanceof TypeError ? "The server cannot be reached." : error.message);

async function copyText(text, button) {
  await writeClipboard(text);
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

/** Browsers offer the clipboard on https and localhost only; `execCommand` also works elsewhere. */
async function writeClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
