// The sampling controls: an empty field is not sent, so that the model's default applies.

const STORE = "quire-controls";

export class Controls {
  #details;
  #fields;

  constructor(details) {
    this.#details = details;
    this.#fields = [...details.querySelectorAll("[name]")];
    const stored = JSON.parse(localStorage.getItem(STORE) ?? "{}");
    for (const field of this.#fields) field.value = stored[field.name] ?? "";
    details.addEventListener("input", () => this.#changed());
    details.querySelector("#defaults").addEventListener("click", () => {
      for (const field of this.#fields) field.value = "";
      this.#changed();
    });
    this.#changed();
  }

  /** Whether all values are valid; shows the first invalid one. */
  check() {
    const wrong = this.#fields.find((field) => !field.validity.valid);
    if (!wrong) return true;
    this.#details.open = true;
    wrong.reportValidity();
    return false;
  }

  get system() {
    return this.#fields.find((field) => field.name === "system").value.trim();
  }

  /** The sampling fields of the request body. */
  get sampling() {
    const numbers = this.#fields.filter((field) => field.type === "number" && field.value !== "");
    return Object.fromEntries(numbers.map((field) => [field.name, field.valueAsNumber]));
  }

  #changed() {
    const values = Object.fromEntries(this.#fields.map((field) => [field.name, field.value]));
    localStorage.setItem(STORE, JSON.stringify(values));
    const shown = Object.entries(this.sampling).map(([name, value]) => `${name.replace("_", " ")} ${value}`);
    if (this.system) shown.push("system prompt");
    this.#details.querySelector("#controls-summary").textContent = shown.join(" · ") || "model defaults";
  }
}
