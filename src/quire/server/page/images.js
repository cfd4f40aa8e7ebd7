// Images for the next question: added by button, drop or paste, and shown until they are sent or removed.

import { element } from "./markdown.js";

export class Images {
  /** Settles when every image added so far has been read. */
  ready = Promise.resolve();
  #enabled = false;
  #urls = new Map(); // data URLs by thumbnail
  #list = document.getElementById("images");
  #note = document.getElementById("image-note");
  #button = document.getElementById("add-images");
  #picker = document.getElementById("image-files");

  /** `place` is where images may be dropped, `input` where they may be pasted. */
  constructor(place, input) {
    this.#button.addEventListener("click", () => this.#picker.click());
    this.#picker.addEventListener("change", () => {
      this.#addAll([...this.#picker.files]);
      this.#picker.value = "";
    });
    input.addEventListener("paste", (event) => {
      const { files, types } = event.clipboardData;
      // Office programs copy text together with a picture of the text.
      if (!files.length || types.includes("text/plain")) return;
      event.preventDefault();
      this.#addAll([...files]);
    });
    for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
      place.addEventListener(name, (event) => this.#dragged(event, place));
    }
  }

  /** Whether the model accepts images. */
  set enabled(enabled) {
    this.#enabled = enabled;
    this.#button.hidden = !enabled;
  }

  get size() {
    return this.#urls.size;
  }

  /** Remove all images and return their data URLs. */
  removeAll() {
    const urls = [...this.#urls.values()];
    this.#urls.clear();
    this.#list.replaceChildren();
    this.#list.hidden = true;
    this.#tell("");
    return urls;
  }

  #dragged(event, place) {
    if (!event.dataTransfer.types.includes("Files")) return;
    // By default the browser opens a dropped file, and the conversation is lost.
    event.preventDefault();
    const leaves = event.type === "dragleave" && !place.contains(event.relatedTarget);
    if (event.type === "drop" || leaves) place.classList.remove("dropping");
    else if (this.#enabled) place.classList.add("dropping");
    if (event.type === "drop") this.#addAll([...event.dataTransfer.files]);
  }

  #addAll(files) {
    this.#tell(this.#enabled ? "" : "This model takes no images.");
    if (!this.#enabled) return;
    this.ready = Promise.all([this.ready, ...files.map((file) => this.#read(file))]);
  }

  async #read(file) {
    try {
      const url = await dataUrl(file);
      const image = new Image();
      image.src = url;
      await image.decode();
      this.#add(image, file.name);
    } catch {
      this.#tell(`${file.name} cannot be read as an image.`);
    }
  }

  #add(image, name) {
    const item = element("li");
    const remove = element("button", "", "×");
    image.alt = name;
    remove.type = "button";
    remove.setAttribute("aria-label", `Remove ${name}`);
    remove.addEventListener("click", () => {
      this.#urls.delete(item);
      item.remove();
      this.#list.hidden = !this.#urls.size;
    });
    item.append(image, remove);
    this.#urls.set(item, image.src);
    this.#list.append(item);
    this.#list.hidden = false;
  }

  #tell(problem) {
    this.#note.textContent = problem;
    this.#note.hidden = !problem;
  }
}

/** The content of a message in the API's format: a string without images, else a list of parts. */
export function content(text, urls) {
  if (!urls.length) return text;
  const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
